"""``mosstalk bench``: every number that the project publishes."""

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from mosstalk.cli import bench_compare, bench_report, bench_serve, bench_start
from mosstalk.cli import options as opt
from mosstalk.cli.bench_step import BenchStep
from mosstalk.cli.command import add_command, add_moved
from mosstalk.cli.common import reported

app = typer.Typer(help="Measure what the project publishes.", no_args_is_help=True)
app.command("compare")(bench_compare.compare)
app.command("report")(bench_report.report)
app.command("serve")(bench_serve.serve)
app.command("start")(bench_start.start)
add_command(app, "step", BenchStep)
add_moved(app, "bench prefill", "bench step --prefill")

Sentences: TypeAlias = Annotated[
    Path | None,
    typer.Option(help="A text file, one sentence a line. Default: a hundred held-out ones."),
]
Limit: TypeAlias = Annotated[
    int, typer.Option(help="Take the first N sentences; 0 takes all.", metavar="N")
]
Recordings: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="The teacher's recordings: sound files and a transcripts.txt (name, tab, words). "
        "Default: festival reads the sentences on the spot.",
    ),
]
People: TypeAlias = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="More people to write down: a folder like --recordings."),
]
Beside: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        metavar="VOICE",
        help="Also judge this voice of another program, e.g. flite-slt. May be repeated.",
    ),
]
JsonFile: TypeAlias = Annotated[
    str | None,
    typer.Option("--json", metavar="FILE|-", help="Write every figure as json; - is stdout."),
]
HtmlFile: TypeAlias = Annotated[
    Path | None,
    typer.Option("--html", metavar="FILE", help="Write one page with tables and sound to play."),
]
Detectors: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--detector",
        metavar="silero|webrtc",
        help="Measure this detector alone. May be repeated. Default: all that are installed.",
    ),
]
Clips: TypeAlias = Annotated[
    int, typer.Option(help="Take N clips of each speaker.", metavar="N", min=1)
]
Calls: TypeAlias = Annotated[
    int,
    typer.Option(help="Simulate N calls of each setting; 0 leaves them out.", metavar="N", min=0),
]


RandomWeights: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="full|tiny",
        help="Random weights of the published (full) or of tiny sizes, made on the device, in "
        "place of --codec.",
    ),
]
Part: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="Measure this part alone: decode, recompute, encode, memory; curves (errors of a "
        "shorter memory and of fewer steps) or repairs (how often live codes change in 30 minutes "
        "of speech). May be repeated.",
    ),
]
Replies: TypeAlias = Annotated[
    str, typer.Option(help="How many replies at once, e.g. 1,8,32.", metavar="N,N,...")
]
Hops: TypeAlias = Annotated[
    int, typer.Option(help="Hops of one reply alone; several have 12.", metavar="N", min=2)
]
Streams: TypeAlias = Annotated[
    str, typer.Option(help="How many live streams at once, e.g. 1,64.", metavar="N,N,...")
]
Rounds: TypeAlias = Annotated[
    int, typer.Option(help="Walk through all hops N times.", metavar="N", min=1)
]


@app.command("quality")
def quality(
    model: opt.Model = None,
    codec: opt.Codec = None,
    voice: opt.VoiceName = "default",
    vocoder: opt.Vocoder = "hift",
    vocoder_dir: opt.VocoderDir = None,
    flow_context: opt.FlowContext = None,
    flow_steps: opt.FlowSteps = None,
    codec_dtype: opt.SoundDtype = None,
    sentences: Sentences = None,
    limit: Limit = 40,
    recordings: Recordings = None,
    people: People = None,
    beside: Beside = None,
    seed: opt.Seed = 0,
    device: opt.Device = "auto",
    dtype: opt.ModelDtype = None,
    json: JsonFile = None,
    html: HtmlFile = None,
) -> None:
    """Judge how a checkpoint speaks, resynthesises and writes down speech.

    mosstalk bench quality --model MODEL --codec CODEC --html quality.html

    Word and phoneme error rates and guessed naturalness of text read aloud
    and of recordings resynthesised, beside the teacher's own recordings and
    noise alone; the checkpoint's transcripts by group; codec scores, hops
    against the whole, faults by name, first audio and real-time factor.

    Needs the extra "quality", and festival with its voice slt_hts or
    --recordings. What is missing is named and left out.
    """
    with reported():
        from mosstalk.codec.sound_request import SoundRequest

        sound = SoundRequest(
            flow_context, flow_steps, codec_dtype, vocoder=vocoder, vocoder_folder=vocoder_dir
        )
        from mosstalk.cli.bench_console import Judged, Material, run_quality
        from mosstalk.cli.measured_output import Outputs
        from mosstalk.cli.opening import ModelRequest

        run_quality(
            Judged(ModelRequest(model, codec, device, dtype, sound), voice, seed),
            Material(sentences, limit, recordings, people, tuple(beside or ())),
            Outputs(json, html),
        )


@app.command("judges")
def judges(
    voice: Beside = None,
    sentences: Sentences = None,
    limit: Limit = 40,
    recordings: Recordings = None,
    json: JsonFile = None,
    html: HtmlFile = None,
) -> None:
    """Judge the judges: the teacher's voice, other voices, and noise alone.

    mosstalk bench judges --voice flite-slt --voice flite-rms

    What a good voice and no voice at all score says what a checkpoint's
    figures are worth. No checkpoint is needed.
    """
    with reported():
        from mosstalk.cli.bench_console import Material, run_judges
        from mosstalk.cli.measured_output import Outputs

        run_judges(
            Material(sentences, limit, recordings, None, tuple(voice or ())),
            Outputs(json, html),
        )


@app.command("vad")
def vad(
    detectors: Detectors = None,
    clips: Clips = 12,
    calls: Calls = 6,
    json: JsonFile = None,
) -> None:
    """Measure the detectors of speech: what they find, how soon, at what cost.

    mosstalk bench vad --clips 20 --calls 10

    Speech in noise, sounds without speech, the cost of a frame; and in
    simulated rooms, how often the assistant's own echo interrupts it and how
    soon a user who talks over it is heard. No checkpoint is needed.

    Needs the extra "vad". Recordings and voices that are not at hand are
    named and left out.
    """
    with reported():
        from mosstalk.cli.measured_output import Outputs
        from mosstalk.cli.vad_console import run_vad

        run_vad(tuple(detectors or ()), clips, calls, Outputs(json))


@app.command("codec")
def codec(
    codec: opt.CodecAlone = None,
    random_weights: RandomWeights = None,
    voice: opt.VoiceName = "default",
    part: Part = None,
    replies: Replies = "1,2,4,8",
    hops: Hops = 50,
    streams: Streams = "1,8",
    rounds: Rounds = 3,
    flow_context: opt.FlowContext = None,
    flow_steps: opt.FlowSteps = None,
    memory: opt.CodecMemory = None,
    graphs: opt.Graphs = True,
    device: opt.Device = "auto",
    dtype: opt.SoundDtype = None,
    vocoder: opt.Vocoder = "hift",
    vocoder_dir: opt.VocoderDir = None,
    json: JsonFile = None,
    html: HtmlFile = None,
) -> None:
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
    with reported():
        from mosstalk.cli.codec_console import CodecRequest, Loads, run_codec
        from mosstalk.cli.measured_output import Outputs
        from mosstalk.codec.sound_request import SoundRequest

        run_codec(
            CodecRequest(codec, random_weights, voice, device),
            SoundRequest(flow_context, flow_steps, dtype, memory, graphs, vocoder, vocoder_dir),
            Loads(tuple(part or ()), replies, hops, streams, rounds),
            Outputs(json, html),
        )
