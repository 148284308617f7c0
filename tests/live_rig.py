"""For tests of live codes: two small tokenizers, sounds of many kinds, and a stream's user."""

from collections.abc import Callable
from itertools import pairwise

import torch
from conftest import GOLDENS, QUESTION, ROOT
from hypothesis import strategies as st
from torch import Tensor

from mosstalk.audio.sound import read_audio
from mosstalk.codec.tokenizer_state import Change, LiveCodes
from mosstalk.codec.tokenizer_stream import LiveTokenizer
from mosstalk.config import SpeechTokenizerConfig
from mosstalk.constants import INPUT_RATE
from mosstalk.models.codec_folder import build
from mosstalk.models.speech_tokenizer import SpeechTokenizer
from mosstalk.models.weights import open_sharded
from mosstalk.prepared.default_models import shipped_model

CODE = 1280
CPU = torch.device("cpu")


def tokenizer_in(name: str) -> SpeechTokenizer:
    """The speech tokenizer that ships, or the one of the golden case."""
    shipped = shipped_model()
    assert shipped is not None
    folder = shipped[1] if name == "pocket" else GOLDENS / "speech-tokenizer"
    config = SpeechTokenizerConfig.from_folder(folder)
    store = open_sharded(folder)
    return build(lambda: SpeechTokenizer(config), store, folder, device=CPU, dtype=torch.float32)


LIVE = {name: LiveTokenizer(tokenizer_in(name)) for name in ("goldens", "pocket")}
BOTH = st.sampled_from(sorted(LIVE))


SPEECH = torch.cat(
    [
        torch.from_numpy(read_audio(path, INPUT_RATE).samples)
        for path in (QUESTION, ROOT / "assets" / "librivox.flac")
    ]
)


def speech(samples: int, start: int = 0) -> Tensor:
    """So much of two people's speech, over and over."""
    return SPEECH[torch.arange(start, start + samples) % SPEECH.shape[0]]


def rising(samples: int) -> Tensor:
    """Speech that grows by 50 dB from its beginning to its end."""
    return speech(samples) * 10 ** torch.linspace(-2.5, 0, samples)


def noise(samples: int) -> Tensor:
    return 0.1 * torch.randn(samples, generator=torch.Generator().manual_seed(samples))


def silent(samples: int) -> Tensor:
    return torch.zeros(samples)


def clicking(samples: int) -> Tensor:
    """Digital silence with a click every second, each louder than the one before."""
    sound = torch.zeros(samples)
    sound[::INPUT_RATE] = torch.linspace(0.001, 1, sound[::INPUT_RATE].shape[0])
    return sound


def quiet(samples: int) -> Tensor:
    return 1e-4 * speech(samples)


Kind = Callable[[int], Tensor]
KINDS: tuple[Kind, ...] = (speech, rising, noise, silent, clicking, quiet)


@st.composite
def clips(draw: st.DrawFn, longest: int = 60 * CODE) -> Tensor:
    """Sound of some kind, of 1 to ``longest`` samples."""
    return draw(st.sampled_from(KINDS))(draw(st.integers(1, longest)))


@st.composite
def sliced(draw: st.DrawFn, longest: int = 60 * CODE) -> list[Tensor]:
    """A clip in pieces from one sample to all, some of them empty."""
    clip = draw(clips(longest))
    cuts = sorted(draw(st.lists(st.integers(0, clip.shape[0]), max_size=12)))
    return [clip[start:end] for start, end in pairwise([0, *cuts, clip.shape[0]])]


class Consumer:
    """Follows a stream by its changes alone, as one does who keeps something for each code."""

    def __init__(self) -> None:
        self.codes: list[int] = []

    def take(self, change: Change) -> None:
        assert change.kept <= len(self.codes)
        self.codes[change.kept :] = change.codes


def heard(live: LiveTokenizer, pieces: list[Tensor], maximum: float | None = None) -> LiveCodes:
    """The stream of a turn that came in ``pieces``, finished; its changes must tell its codes."""
    state, consumer = live.open(maximum), Consumer()
    for piece in pieces:
        consumer.take(live.push(state, piece))
        assert consumer.codes == state.codes
    consumer.take(live.finish(state))
    assert consumer.codes == state.codes
    return state
