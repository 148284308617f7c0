"""``mosstalk chat``."""

from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand

from mosstalk.cli import options as opt
from mosstalk.cli.common import one_of, reported


class OrderedTurns(TyperCommand):
    """A command that remembers in which order --speech and --text were given."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse as usual; ``ctx.meta['turns']`` becomes the names of the turns in order."""
        _, _, order = self.make_parser(ctx).parse_args(args=list(args))
        ctx.meta["turns"] = [p.name for p in order if p.name in ("speech", "text")]
        return super().parse_args(ctx, args)


def chat(
    ctx: typer.Context,
    speech: opt.Speech = None,
    text: opt.Text = None,
    reply: opt.ReplyKind = "speech",
    out: opt.Out = Path("answer.wav"),
    model: opt.Model = None,
    codec: opt.Codec = None,
    voice: opt.VoiceName = "default",
    vocoder: opt.Vocoder = "hift",
    vocoder_dir: opt.VocoderDir = None,
    system: opt.System = None,
    temperature: opt.Temperature = None,
    top_k: opt.TopK = None,
    top_p: opt.TopP = None,
    repetition_penalty: opt.RepetitionPenalty = None,
    seed: opt.Seed = 0,
    max_rows: opt.MaxRows = None,
    script: opt.ReplyScript = None,
    show_rows: opt.ShowRows = False,
    channel: opt.Channel = None,
    device: opt.Device = "auto",
    dtype: opt.ModelDtype = None,
    trace: opt.TraceFile = None,
    json: opt.AsJson = False,
) -> None:
    """Answer spoken or typed turns, in the order given, with speech or text.

    mosstalk chat --speech question.wav --out answer.wav

    mosstalk chat --text "Good morning" --speech question.wav --reply text

    The answer grows hop by hop in OUT.part, which is renamed at the end.
    Printed are the input's length, rows, steps, the time of every stage with
    its share, the time from the end of the turn to the first sound, the
    real-time factor and the peak memory; with --json one document has them,
    alone on stdout, and the text goes to stderr.
    """
    with reported():
        from mosstalk.cli.console import ChatRequest, Outputs, run_chat
        from mosstalk.cli.opening import ModelRequest, SamplingRequest
        from mosstalk.codec.sound_request import SoundRequest
        from mosstalk.offline.defaults import Choices

        sound = SoundRequest(vocoder=vocoder, vocoder_folder=vocoder_dir)
        choices = Choices(temperature, top_k, top_p, repetition_penalty, max_rows)
        request = ChatRequest(
            turns=_in_order(ctx.meta["turns"], speech or [], text or []),
            reply=one_of("--reply", reply, "speech", "text"),
            to=Outputs(out, trace, json, show_rows),
            voice=voice,
            system=system,
            model=ModelRequest(model, codec, device, dtype, sound),
            sampling=SamplingRequest.of(choices, seed, script),
            channel=channel,
        )
        run_chat(request)


def _in_order(kinds: list[str], speech: list[Path], text: list[str]) -> tuple[tuple[str, str], ...]:
    """Pairs (speech, file) and (text, words), in the order their options were given."""
    queues = {"speech": iter(map(str, speech)), "text": iter(text)}
    return tuple((kind, next(queues[kind])) for kind in kinds)
