"""``mosstalk bench``: every number that the project publishes."""

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from mosstalk.cli import options as opt
from mosstalk.cli.common import reported

app = typer.Typer(help="Measure what the project publishes.", no_args_is_help=True)

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


@app.command("quality")
def quality(
    model: opt.Model = None,
    codec: opt.Codec = None,
    voice: opt.VoiceName = "default",
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
        from mosstalk.cli.bench_console import Judged, Material, Outputs, run_quality
        from mosstalk.cli.opening import ModelRequest

        run_quality(
            Judged(ModelRequest(model, codec, device, dtype), voice, seed),
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
        from mosstalk.cli.bench_console import Material, Outputs, run_judges

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
        from mosstalk.cli.vad_console import run_vad

        run_vad(tuple(detectors or ()), clips, calls, json)
