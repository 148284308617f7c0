"""Options of the command line, each with the help that ``--help`` prints.

``autocompletion`` is what a shell offers in an option's place. Where that is nothing it offers
files. None of it imports torch: a shell waits for it.
"""

from collections.abc import Callable
from dataclasses import MISSING, field
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from mosstalk.errors import MosstalkError

DTYPES = ("float32", "bfloat16", "float16", "float64")
DTYPES_HELP = f"{', '.join(DTYPES[:-1])} or {DTYPES[-1]}"
EMBEDDINGS_HELP = (
    "Where the table of text embeddings is: in the GPU's memory, or in the host's, which saves the "
    "published model 1.16 GiB of the GPU's."
)
INFO = "typer"
"""In a field's metadata: what typer shall know of it."""


def option(default: Any, help: str, *names: str, **more: Any) -> Any:
    """A field of a command: an option, its default, its help, and what else ``typer.Option`` takes.

    Without ``names`` it is called as the field is. One that is False by default is a flag.
    """
    return field(default=default, metadata={INFO: typer.Option(default, *names, help=help, **more)})


def argument(help: str, *, default: Any = MISSING, **more: Any) -> Any:
    """A field of a command: an argument, its help, and what else ``typer.Argument`` takes."""
    given = ... if default is MISSING else default
    return field(default=default, metadata={INFO: typer.Argument(given, help=help, **more)})


def offered(*words: str) -> Callable[[], list[str]]:
    """Words that a shell offers, those of them that begin as what was typed."""
    return lambda: list(words)


def offered_models() -> list[str]:
    """The names that stand for a model's folder."""
    from mosstalk.prepared.default_models import NAMES

    return list(NAMES)


def offered_voices(context: typer.Context) -> list[str]:
    """The voices of the codec that the words before name; of the default one where none do."""
    from mosstalk.prepared.default_models import chosen_codec

    given = context.params
    try:
        codec = chosen_codec(given.get("codec") or given.get("model"))
    except MosstalkError:
        return []
    return sorted(path.stem for path in (codec / "voices").glob("*.safetensors"))


Model: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        autocompletion=offered_models,
        help="Folder of the language model, together with --codec; or alone a folder that "
        "mosstalk build made, pocket (small, ships with mosstalk) or synthetic (tiny, random "
        "weights). Default: pocket.",
    ),
]
Codec: TypeAlias = Annotated[
    Path | None,
    typer.Option(help="Folder of the codec, together with --model."),
]
CodecAlone: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        autocompletion=offered_models,
        help="Folder of the codec, or pocket or synthetic. Default: the default model's.",
    ),
]
VoiceName: TypeAlias = Annotated[
    str,
    typer.Option(
        autocompletion=offered_voices,
        help="A voice of the codec's folder by name, or a voice file.",
    ),
]
Seed: TypeAlias = Annotated[int, typer.Option(help="Of the sampling: same seed, same answers.")]
ReplyScript: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="Force mode changes and length, e.g. speech:75 or text:8,speech:20: random weights "
        "never end a reply."
    ),
]
Channel: TypeAlias = Annotated[
    int | None, typer.Option(help="Which channel to hear, from 1. Default: mix up to two.")
]
Device: TypeAlias = Annotated[
    str,
    typer.Option(
        autocompletion=offered("auto", "cpu", "cuda"),
        help="auto (a GPU where there is one), cpu, cuda or cuda:1.",
    ),
]
ModelDtype: TypeAlias = Annotated[
    str | None,
    typer.Option(
        autocompletion=offered(*DTYPES),
        help=f"Of the language model: {DTYPES_HELP}. "
        "Default: float32 on a CPU, as stored on a GPU.",
    ),
]
Force: TypeAlias = Annotated[bool, typer.Option("--force", help="Replace files that exist.")]
Quiet: TypeAlias = Annotated[
    bool, typer.Option("--quiet", "-q", help="Show no notes, warnings or progress.")
]
FlowContext: TypeAlias = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        help="Seconds of a reply that the flow decoder remembers besides its voice; 0 for "
        "everything, which is exact and takes 119 MB a second in 16 bit at full size. Default: 2.",
    ),
]
FlowSteps: TypeAlias = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        help="Euler steps of the flow decoder: fewer are faster and rougher. Default: the codec's, "
        "10; mosstalk-pocket's, 5.",
    ),
]
SoundDtype: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--codec-dtype",
        metavar="DTYPE",
        autocompletion=offered("float32", "float16", "bfloat16"),
        help="Precision of flow and vocoder: float32, float16 or bfloat16. Default: float16 on a "
        "GPU, else float32.",
    ),
]
Vocoder: TypeAlias = Annotated[
    str,
    typer.Option(
        metavar="hift|bigvgan",
        help="What turns mel spectrograms into sound: hift, the checkpoint's own, or bigvgan, "
        "NVIDIA's BigVGAN-v2, whose sound comes 0.5 s later.",
    ),
]
VocoderDir: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR", help="BigVGAN's folder: config.json and bigvgan_generator.pt as published."
    ),
]
CodecMemory: TypeAlias = Annotated[
    int | None,
    typer.Option(
        metavar="MIB",
        min=1,
        help="Memory of a GPU for voices and replies of the flow decoder. Default: enough for as "
        "many replies as may be made at once (those of all sessions up to 64, of every other one "
        "beyond) and 40 s of voices; in benchmarks 8192.",
    ),
]
RandomWeights: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--random-weights",
        metavar="full|tiny",
        help="Measure with random weights of the published (full) or of tiny sizes, made on the "
        "device, in place of a checkpoint's.",
    ),
]
Graphs: TypeAlias = Annotated[
    bool, typer.Option(help="Replay CUDA graphs, or launch kernel by kernel.")
]
Embeddings: TypeAlias = Annotated[str, typer.Option(metavar="device|host", help=EMBEDDINGS_HELP)]
BatchInvariant: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--batch-invariant/--no-batch-invariant",
        help="Compute every row in the same order of sums whoever shares its step, so that replies "
        "are the same alone and in company in 16 bit too. Slower; in float32 it is always so.",
    ),
]
