"""Talk with MOSS-Speech: a two-headed speech-to-speech model, its engine and its codec.

    import mosstalk

    pipeline = mosstalk.Pipeline.load()  # the model that ships; a GPU if there is one
    for samples in mosstalk.speak(pipeline, "Good morning."):
        ...  # float32 (n,) at 24 kHz, as soon as it is made

The names below are loaded on first use, so that ``import mosstalk`` costs nothing.
``mosstalk.session`` holds conversations in real time, ``mosstalk serve`` serves them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mosstalk.audio.sound import AudioWriter, Recording, read_audio
    from mosstalk.conversation import FinishReason, Mode
    from mosstalk.errors import MosstalkError
    from mosstalk.models.voices import Voice
    from mosstalk.offline.pipeline import Answer, Chat, Pipeline, speak, transcribe
    from mosstalk.prepared.default_models import default_model, synthetic_model
    from mosstalk.reply_options import Limits, SamplingOptions, Script

_HOMES = {
    "Answer": "mosstalk.offline.pipeline",
    "AudioWriter": "mosstalk.audio.sound",
    "Chat": "mosstalk.offline.pipeline",
    "FinishReason": "mosstalk.conversation",
    "Limits": "mosstalk.reply_options",
    "Mode": "mosstalk.conversation",
    "MosstalkError": "mosstalk.errors",
    "Pipeline": "mosstalk.offline.pipeline",
    "Recording": "mosstalk.audio.sound",
    "SamplingOptions": "mosstalk.reply_options",
    "Script": "mosstalk.reply_options",
    "Voice": "mosstalk.models.voices",
    "default_model": "mosstalk.prepared.default_models",
    "read_audio": "mosstalk.audio.sound",
    "speak": "mosstalk.offline.pipeline",
    "synthetic_model": "mosstalk.prepared.default_models",
    "transcribe": "mosstalk.offline.pipeline",
}

__version__: str
"""Found when it is asked for: the metadata of packages takes longer to import than all else."""
__all__ = [
    "Answer",
    "AudioWriter",
    "Chat",
    "FinishReason",
    "Limits",
    "Mode",
    "MosstalkError",
    "Pipeline",
    "Recording",
    "SamplingOptions",
    "Script",
    "Voice",
    "default_model",
    "read_audio",
    "speak",
    "synthetic_model",
    "transcribe",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("mosstalk")
    if name not in _HOMES:
        raise AttributeError(f"module 'mosstalk' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*__all__, "__version__", *(name for name in globals() if name[:2] == "__")})
