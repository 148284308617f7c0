"""The settings that a folder was built for, where a start chooses none."""

from dataclasses import replace

from mosstalk.build.folder import built_engine
from mosstalk.server.messages import WorkerOptions


def as_built(
    options: WorkerOptions, sessions: int | None, rows: int | None, usual_sessions: int
) -> WorkerOptions:
    """``options`` with these sessions and rows; what is None is taken from a built folder.

    So is the decoder's memory on a GPU. Of another folder there are ``usual_sessions``, and the
    longest conversation is the model's context.
    """
    built = built_engine(options.model)
    if built is None:
        return replace(options, sessions=sessions or usual_sessions, context_rows=rows)
    sound = options.sound
    if sound.memory_mib is None and (sessions or built.sessions) == built.sessions:
        sound = replace(sound, memory_mib=built.flow_memory_mib)
    return replace(
        options,
        sessions=sessions or built.sessions,
        context_rows=rows or built.rows,
        sound=sound,
    )
