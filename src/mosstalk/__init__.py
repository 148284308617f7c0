"""Talk with MOSS-Speech: engine and codec of a two-headed speech-to-speech model.

The names below are loaded on first use, so that ``import mosstalk`` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mosstalk.audio.sound import AudioWriter, read_audio
    from mosstalk.conversation import FinishReason, Mode
    from mosstalk.errors import MosstalkError
    from mosstalk.offline.pipeline import Answer, Chat, Pipeline
    from mosstalk.offline.tasks import speak, transcribe
    from mosstalk.prepared.default_models import default_model, synthetic_model
    from mosstalk.sampling_options import Limits, SamplingOptions
    from mosstalk.script import Script

_HOMES = {
    "Answer": "mosstalk.offline.pipeline",
    "AudioWriter": "mosstalk.audio.sound",
    "Chat": "mosstalk.offline.pipeline",
    "FinishReason": "mosstalk.conversation",
    "Limits": "mosstalk.sampling_options",
    "Mode": "mosstalk.conversation",
    "MosstalkError": "mosstalk.errors",
    "Pipeline": "mosstalk.offline.pipeline",
    "SamplingOptions": "mosstalk.sampling_options",
    "Script": "mosstalk.script",
    "default_model": "mosstalk.prepared.default_models",
    "read_audio": "mosstalk.audio.sound",
    "speak": "mosstalk.offline.tasks",
    "synthetic_model": "mosstalk.prepared.default_models",
    "transcribe": "mosstalk.offline.tasks",
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
    "SamplingOptions",
    "Script",
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
