"""Talk with MOSS-Speech: engine and codec of a two-headed speech-to-speech model.

The names below are loaded on first use, so that ``import mosstalk`` costs nothing.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mosstalk.codec.audio import AudioWriter, read_audio
    from mosstalk.conversation import FinishReason, Mode
    from mosstalk.default_models import default_model, synthetic_model
    from mosstalk.errors import MosstalkError
    from mosstalk.model.generate import Limits
    from mosstalk.model.sampling import SamplingOptions
    from mosstalk.pipeline import Answer, Chat, Pipeline
    from mosstalk.script import Script
    from mosstalk.tasks import speak, transcribe

_HOMES = {
    "Answer": "mosstalk.pipeline",
    "AudioWriter": "mosstalk.codec.audio",
    "Chat": "mosstalk.pipeline",
    "FinishReason": "mosstalk.conversation",
    "Limits": "mosstalk.model.generate",
    "Mode": "mosstalk.conversation",
    "MosstalkError": "mosstalk.errors",
    "Pipeline": "mosstalk.pipeline",
    "SamplingOptions": "mosstalk.model.sampling",
    "Script": "mosstalk.script",
    "default_model": "mosstalk.default_models",
    "read_audio": "mosstalk.codec.audio",
    "speak": "mosstalk.tasks",
    "synthetic_model": "mosstalk.default_models",
    "transcribe": "mosstalk.tasks",
}

__version__ = version("mosstalk")
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
    if name not in _HOMES:
        raise AttributeError(f"module 'mosstalk' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
