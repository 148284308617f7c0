"""``mosstalk bench codec``: what is asked for, and what is printed."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mosstalk.bench.codec_speed import (
    MORE_PARTS,
    PARTS,
    Asked,
    measure_codec,
    memory_table,
    seconds_of,
)
from mosstalk.bench.html import tables_page
from mosstalk.bench.machine import machine_facts
from mosstalk.cli.measured_output import Outputs, measured_document, print_found
from mosstalk.codec.sound_request import SoundRequest
from mosstalk.codec.speech_decoder import DecoderOptions
from mosstalk.config import WEIGHTS_KIND_KEY
from mosstalk.errors import OptionError
from mosstalk.models.codec_folder import Codec, load_codec
from mosstalk.models.voices import Voice
from mosstalk.prepared.default_models import chosen_codec
from mosstalk.progress import progress_bar
from mosstalk.runtime.device import fit_threads, pick_device
from mosstalk.synthesis.direct import random_codec, random_voice
from mosstalk.synthesis.sizes import named_sizes

FORMAT = "mosstalk-codec-1"
_VOICES_S = (7.0, 27.0)


@dataclass(frozen=True)
class CodecRequest:
    """Which codec: a folder, or random weights of a named size; and where it runs."""

    codec: Path | None
    random: str | None
    voice: str
    device: str


@dataclass(frozen=True)
class Loads:
    """What is measured, as the command line says it."""

    parts: Sequence[str]
    replies: str
    hops: int
    streams: str
    rounds: int


def run_codec(request: CodecRequest, sound: SoundRequest, loads: Loads, to: Outputs) -> None:
    """Measure, print tables, write the document and the page.

    Raises:
        OptionError: a part or a number that means nothing.
        BenchError: a run whose output was not right; no time is printed.
    """
    to.require()
    with to.text_for_people():
        codec, voices, weights = _opened(request)
        asked = _asked(sound, loads, codec)
        with progress_bar() as tell:
            found = measure_codec(codec, voices, asked, tell)
        found.settings = _settings(codec, voices, weights, asked) | found.settings
        if found.memory:
            found.tables.append(memory_table(found.memory))
        print_found(found.settings, found.tables)
    to.write(
        measured_document(
            FORMAT,
            found.settings,
            timed=found.timed,
            memory_mb=found.memory,
            curves=found.curves,
        ),
        partial(tables_page, "mosstalk codec", found.settings, found.tables),
    )


def _opened(request: CodecRequest) -> tuple[Codec, dict[str, Voice], str]:
    """The codec, voices by name, and the kind of weights."""
    device = pick_device(request.device)
    if request.random:
        codec = random_codec(named_sizes(request.random), device)
        voices = [random_voice(codec, seconds) for seconds in _VOICES_S]
        return codec, {f"voice of {seconds_of(v):.1f} s": v for v in voices}, "synthetic"
    folder = chosen_codec(request.codec)
    codec = load_codec(folder, device=device)
    fit_threads(device, (codec.tokenizer, codec.flow, codec.vocoder))
    voice = codec.voice(request.voice)
    return (
        codec,
        {f"voice of {seconds_of(voice):.1f} s": voice},
        codec.tokenizer.config.extra.get(WEIGHTS_KIND_KEY, "real"),
    )


def _asked(sound: SoundRequest, loads: Loads, codec: Codec) -> Asked:
    unknown = sorted(set(loads.parts) - {*PARTS, *MORE_PARTS})
    if unknown:
        raise OptionError(f"--part {unknown[0]}: choose of {', '.join((*PARTS, *MORE_PARTS))}")
    return Asked(
        loads.parts or PARTS,
        _numbers(loads.replies, "--replies"),
        loads.hops,
        min(12, loads.hops),
        loads.rounds,
        _numbers(loads.streams, "--streams"),
        options=DecoderOptions.of(sound, codec.device),
    )


def _numbers(words: str, option: str) -> list[int]:
    try:
        numbers = [int(word) for word in words.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise OptionError(f"{option} {words}: give numbers above 0, like 1,8,32")
    return numbers


def _settings(codec: Codec, voices: dict[str, Voice], weights: str, asked: Asked) -> dict[str, str]:
    flow, config = asked.options.flow, codec.flow.config
    context = "everything" if flow.context_s is None else f"{flow.context_s:g} s"
    return machine_facts(codec.device, weights) | {
        "precision": str(flow.dtype).removeprefix("torch."),
        "euler steps": str(flow.steps or config.n_timesteps),
        "own history": f"{context} besides the voice",
        "graphs": "on" if flow.graphs and codec.device.type == "cuda" else "off",
        "voices": ", ".join(voices),
    }
