"""``mosstalk bench codec``: hops to sound, live sound to codes."""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from mosstalk.cli import options as opt
from mosstalk.cli.command import WritesPage, from_evals, measured_document, numbers, print_found
from mosstalk.cli.options import option
from mosstalk.errors import OptionError

if TYPE_CHECKING:
    from mosstalk.bench.codec import Asked, OfSpeech
    from mosstalk.models.codec_folder import Codec
    from mosstalk.models.voices import Voice

FORMAT = "mosstalk-codec-1"
_VOICES_S = (7.0, 27.0)


@dataclass(frozen=True, eq=False, repr=False)
class BenchCodec(WritesPage):
    """Measure the codec in real time: hops to sound, live sound to codes.

    mosstalk bench codec --replies 1,4 --hops 50

    mosstalk bench codec --random-weights full --replies 1,32,128 --hops 250

    A hop of 5 codes (400 ms of sound) of so many replies at once, early and
    late, beside the form that decodes everything anew at each hop; 400 ms of
    live sound to codes; the memory of all of it; beside what the hardware
    allows, by rates measured in the same run. Every timed run must repeat an
    untimed one bit for bit, and live codes the offline ones: else no time is
    printed and the exit code is 1.
    """

    codec: opt.CodecAlone = None
    random_weights: opt.RandomWeights = None
    voice: opt.VoiceName = "default"
    part: list[str] | None = option(
        None,
        "Measure this part alone: decode, recompute, encode, memory; curves (errors of a "
        "shorter memory and of fewer steps) or repairs (how often live codes change in 30"
        " minutes of speech). May be repeated.",
        metavar="NAME",
        autocompletion=opt.offered(
            *("decode", "recompute", "encode", "memory", "curves", "repairs"),
        ),
    )
    replies: str = option("1,2,4,8", "How many replies at once, e.g. 1,8,32.", metavar="N,N,...")
    hops: int = option(50, "Hops of one reply alone; several have 12.", metavar="N", min=2)
    streams: str = option("1,8", "How many live streams at once, e.g. 1,64.", metavar="N,N,...")
    rounds: int = option(3, "Walk through all hops N times.", metavar="N", min=1)
    flow_context: opt.FlowContext = None
    flow_steps: opt.FlowSteps = None
    memory: opt.CodecMemory = None
    graphs: opt.Graphs = True
    device: opt.Device = "auto"
    dtype: opt.SoundDtype = None
    vocoder: opt.Vocoder = "hift"
    vocoder_dir: opt.VocoderDir = None

    def run(self) -> None:
        """Measure, print tables, write the document and the page.

        Raises:
            OptionError: a part or a number that means nothing.
            BenchError: a run whose output was not right; no time is printed.
        """
        from mosstalk.bench.codec import measure_codec, memory_table
        from mosstalk.progress import progress_bar
        from mosstalk.reporting.html import tables_page

        with self.printing():
            codec, voices, weights = self._opened()
            asked = self._asked(codec)
            with progress_bar() as tell:
                found = measure_codec(codec, voices, asked, tell, _of_speech())
            found.settings = _settings(codec, voices, weights, asked) | found.settings
            if found.memory:
                found.tables.append(memory_table(found.memory))
            print_found(found.settings, found.tables)
        self.deliver_both(
            measured_document(
                FORMAT,
                found.settings,
                timed=found.timed,
                memory_mb=found.memory,
                curves=found.curves,
            ),
            partial(tables_page, "mosstalk codec", found.settings, found.tables),
        )

    def _opened(self) -> "tuple[Codec, dict[str, Voice], str]":
        """The codec, voices by name, and the kind of weights."""
        from mosstalk.bench.codec import seconds_of
        from mosstalk.config import WEIGHTS_KIND_KEY
        from mosstalk.models.codec_folder import load_codec
        from mosstalk.prepared.default_models import chosen_codec
        from mosstalk.runtime.device import fit_threads, pick_device
        from mosstalk.synthesis.sizes import named_sizes
        from mosstalk.synthesis.weights import random_codec, random_voice

        device = pick_device(self.device)
        if self.random_weights:
            codec = random_codec(named_sizes(self.random_weights), device)
            voices = [random_voice(codec, seconds) for seconds in _VOICES_S]
            weights = "synthetic"
        else:
            codec = load_codec(chosen_codec(self.codec), device=device)
            fit_threads(device, (codec.tokenizer, codec.flow, codec.vocoder))
            voices = [codec.voice(self.voice)]
            weights = codec.tokenizer.config.extra.get(WEIGHTS_KIND_KEY, "real")
        return codec, {f"voice of {seconds_of(voice):.1f} s": voice for voice in voices}, weights

    def _asked(self, codec: "Codec") -> "Asked":
        from mosstalk.bench.codec import PARTS, Asked
        from mosstalk.codec.sound_request import SoundRequest
        from mosstalk.codec.speech_decoder import DecoderOptions

        known = (*PARTS, *_of_speech())
        unknown = sorted(set(self.part or ()) - {*known})
        if unknown:
            raise OptionError(f"--part {unknown[0]}: choose of {', '.join(known)}")
        sound = SoundRequest(
            self.flow_context,
            self.flow_steps,
            self.dtype,
            self.memory,
            self.graphs,
            self.vocoder,
            self.vocoder_dir,
        )
        return Asked(
            tuple(self.part or PARTS),
            numbers("--replies", self.replies),
            self.hops,
            min(12, self.hops),
            self.rounds,
            numbers("--streams", self.streams),
            options=DecoderOptions.of(sound, codec.device),
        )


def _of_speech() -> "dict[str, OfSpeech]":
    """Parts that are measured on speech, which are there where ``evals`` is."""
    return from_evals("codec_parts", "PARTS") or {}


def _settings(
    codec: "Codec", voices: "dict[str, Voice]", weights: str, asked: "Asked"
) -> dict[str, str]:
    from mosstalk.prepared.machine import machine_facts

    flow, config = asked.options.flow, codec.flow.config
    context = "everything" if flow.context_s is None else f"{flow.context_s:g} s"
    return machine_facts(codec.device, weights) | {
        "precision": str(flow.dtype).removeprefix("torch."),
        "euler steps": str(flow.steps or config.n_timesteps),
        "own history": f"{context} besides the voice",
        "graphs": "on" if flow.graphs and codec.device.type == "cuda" else "off",
        "voices": ", ".join(voices),
    }
