"""The settings that a folder was built for, where a start chooses none."""

from dataclasses import replace

from mosstalk.prepared.folder import built_engine
from mosstalk.server.ipc import WorkerOptions


def as_built(
    options: WorkerOptions,
    sessions: int | None,
    rows: int | None,
    usual_sessions: int,
    embeddings: str | None = None,
) -> WorkerOptions:
    """``options`` with these; what is None is taken from a built folder.

    So is the decoder's memory on a GPU. Of another folder there are ``usual_sessions``, the
    longest conversation is the model's context, and embeddings are on the device.
    """
    built = built_engine(options.model)
    if built is None:
        return replace(
            options, sessions=sessions or usual_sessions, context_rows=rows,
            embeddings=embeddings or "device",
        )  # fmt: skip
    sound = options.sound
    if sound.memory_mib is None and (sessions or built.sessions) == built.sessions:
        sound = replace(sound, memory_mib=built.flow_memory_mib)
    return replace(
        options,
        sessions=sessions or built.sessions,
        context_rows=rows or built.rows,
        sound=sound,
        embeddings=embeddings or built.embeddings,
    )
