"""Parts of ``bench codec`` that need speech: what a shorter memory and fewer Euler steps cost, and
how often live codes are repaired.
"""

from dataclasses import replace

import numpy as np
import torch

from evals.live_codes import measure_repairs, repair_tables, varied_speech
from evals.readings import TEACHER, asset_recordings, read_aloud
from mosstalk.audio.sound import Samples, resample
from mosstalk.bench.codec import OfSpeech
from mosstalk.codec.flow import flow_curve
from mosstalk.codec.flow_options import FlowOptions
from mosstalk.codec.tokenizer_stream import LiveTokenizer
from mosstalk.constants import INPUT_RATE, OUTPUT_RATE
from mosstalk.errors import BenchError
from mosstalk.models.codec_folder import Codec
from mosstalk.models.voices import Voice
from mosstalk.reporting.sentences import read_sentences
from mosstalk.reporting.tables import Table

CONTEXTS_S = (0.4, 0.8, 1.2, 1.6, 2.0, 3.2, 4.8, 8.0)
STEPS = (2, 3, 4, 5, 6, 8)
_MINUTES = 30.0
_SENTENCES, _REPLIES = 4, 6
"""Sentences of a reply, which is then some 11 s long, and replies."""


def curve_tables(codec: Codec, voice: Voice) -> tuple[list[Table], dict[str, dict[str, float]]]:
    """Errors by context and by steps, as tables and as plain values."""
    sounds, source = _speech()
    replies = [_codes(codec, sound) for sound in sounds]
    spoken, full = [(voice, codes) for codes in replies], FlowOptions()
    ways = {context_s: replace(full, context_s=context_s) for context_s in CONTEXTS_S}
    contexts = flow_curve(codec.flow, spoken, ways, full)
    fewer = [steps for steps in STEPS if steps < codec.flow.config.n_timesteps]
    ways = {float(steps): replace(full, steps=steps) for steps in fewer}
    steps = flow_curve(codec.flow, spoken, ways, full)
    note = (
        f"Relative error of the mel, its mean taken out, over {len(replies)} replies of "
        f"{min(map(len, replies)) / 12.5:.1f} to {max(map(len, replies)) / 12.5:.1f} s: {source}."
    )
    tables = [
        _table("Own history that a reply remembers, s", note, contexts),
        _table("Euler steps", note, steps),
    ]
    values = {
        "context_s": {f"{at:g}": float(np.mean(errors)) for at, errors in contexts.items()},
        "steps": {f"{at:g}": float(np.mean(errors)) for at, errors in steps.items()},
    }
    return tables, values


def _table(title: str, note: str, curve: dict[float, list[float]]) -> Table:
    rows = tuple(
        (f"{at:g}", f"{np.mean(errors):.3f}", f"{max(errors):.3f}") for at, errors in curve.items()
    )
    return Table(title, note, ("", "mean", "max"), rows)


def _speech() -> tuple[list[Samples], str]:
    """Sounds at 16 kHz and where they are from: festival's voice, or people's recordings."""
    texts = read_sentences()[-_SENTENCES * _REPLIES :]
    pieces = [texts[at : at + _SENTENCES] for at in range(0, len(texts), _SENTENCES)]
    try:
        reading = read_aloud(TEACHER, [" ".join(piece) for piece in pieces])
    except BenchError:
        people = asset_recordings()
        return [resample(s, OUTPUT_RATE, INPUT_RATE) for s in people.sounds], people.name
    return [resample(s, OUTPUT_RATE, INPUT_RATE) for s in reading.sounds], reading.name


def _codes(codec: Codec, sound: Samples) -> list[int]:
    return codec.tokenizer.encode(torch.from_numpy(sound))


def _repairs(codec: Codec, _: Voice) -> tuple[list[Table], dict[str, dict[str, float]]]:
    figures = measure_repairs(LiveTokenizer(codec.tokenizer), varied_speech(_MINUTES))
    return repair_tables(figures), {}


PARTS: dict[str, OfSpeech] = {"curves": curve_tables, "repairs": _repairs}
"""By the name that ``--part`` takes."""
