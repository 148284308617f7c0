"""``mosstalk bench codec``: hops to sound, live sound to codes."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from mosstalk.cli import options as opt
from mosstalk.cli.command import WritesPage, from_evals, measured_document, numbers, print_found
from mosstalk.cli.options import option
from mosstalk.errors import OptionError

if TYPE_CHECKING:
    import torch

    from mosstalk.bench.codec import CodecBench, OfSpeech
    from mosstalk.codec.speech_decoder import DecoderOptions

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
        from mosstalk.bench.documents import CODEC
        from mosstalk.progress import progress_bar
        from mosstalk.reporting.html import tables_page

        with self.printing():
            found = self._opened()
            with progress_bar() as tell:
                found.measure(_of_speech(), tell)
            print_found(found.settings, found.tables)
        self.deliver_both(
            measured_document(
                CODEC,
                found.settings,
                timed=found.timed,
                memory_mb=found.memory,
                curves=found.curves,
            ),
            partial(tables_page, "mosstalk codec", found.settings, found.tables),
        )

    def _opened(self) -> "CodecBench":
        """The codec and what is asked of it, with the settings that are known before."""
        from mosstalk.bench.codec import CodecBench
        from mosstalk.config import WEIGHTS_KIND_KEY
        from mosstalk.constants import CODES_PER_SECOND
        from mosstalk.models.codec_folder import load_codec
        from mosstalk.prepared.default_models import chosen_codec
        from mosstalk.prepared.machine import machine_facts
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
        named = {f"voice of {len(each.codes) / CODES_PER_SECOND:.1f} s": each for each in voices}
        options = self._decoding(codec.device)
        flow = options.flow
        context = "everything" if flow.context_s is None else f"{flow.context_s:g} s"
        settings = machine_facts(codec.device, weights) | {
            "precision": str(flow.dtype).removeprefix("torch."),
            "euler steps": str(flow.steps or codec.flow.config.n_timesteps),
            "own history": f"{context} besides the voice",
            "graphs": "on" if flow.graphs and codec.device.type == "cuda" else "off",
            "voices": ", ".join(named),
        }
        return CodecBench(
            codec,
            named,
            self._parts(),
            numbers("--replies", self.replies),
            self.hops,
            self.rounds,
            numbers("--streams", self.streams),
            options,
            settings,
        )

    def _parts(self) -> "Sequence[str]":
        """What is measured, by name."""
        from mosstalk.bench.codec import PARTS

        known = (*PARTS, *_of_speech())
        unknown = sorted(set(self.part or ()) - {*known})
        if unknown:
            raise OptionError(f"--part {unknown[0]}: choose of {', '.join(known)}")
        return self.part or PARTS

    def _decoding(self, device: "torch.device") -> "DecoderOptions":
        """How codes become sound."""
        from mosstalk.codec.speech_decoder import DecoderOptions
        from mosstalk.reply_options import SoundRequest

        sound = SoundRequest(
            self.flow_context,
            self.flow_steps,
            self.dtype,
            self.memory,
            self.graphs,
            self.vocoder,
            self.vocoder_dir,
        )
        return DecoderOptions.of(sound, device)


def _of_speech() -> "dict[str, OfSpeech]":
    """Parts that are measured on speech, which are there where ``evals`` is."""
    return from_evals("codec_parts", "PARTS") or {}
