"""Options of the command line, each with the help that ``--help`` prints."""

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from mosstalk.verify import ComputePath

DTYPES_HELP = "float32, bfloat16, float16 or float64"
EMBEDDINGS_HELP = (
    "Where the table of text embeddings is: in the GPU's memory, or in the host's, which saves the "
    "published model 1.16 GiB of the GPU's."
)
_CHECKPOINTS = "Default: the checkpoint's, else the public demo's {}."

Speech: TypeAlias = Annotated[
    list[Path] | None,
    typer.Option(help="A spoken turn: any sound file libsndfile reads. May be repeated."),
]
Text: TypeAlias = Annotated[
    list[str] | None, typer.Option(help="A typed turn. May be repeated and mixed with speech.")
]
ReplyKind: TypeAlias = Annotated[str, typer.Option(help="Kind of the answers: speech or text.")]
Out: TypeAlias = Annotated[
    Path,
    typer.Option(
        "--out",
        "-o",
        help="Where a spoken answer goes: .wav, .flac or .ogg; with several turns OUT-1, OUT-2 ...",
    ),
]
Model: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        help="Folder of the language model, together with --codec; or alone a folder that "
        "mosstalk build made, or one of the names pocket (the small model that ships with "
        "mosstalk) and synthetic (tiny, random weights). "
        "Default: pocket where it is there, else synthetic."
    ),
]
Codec: TypeAlias = Annotated[
    Path | None,
    typer.Option(help="Folder of the codec, together with --model."),
]
CodecAlone: TypeAlias = Annotated[
    Path | None,
    typer.Option(help="Folder of the codec, or pocket or synthetic. Default: the default model's."),
]
ModelAlone: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        help="Folder of the language model, or pocket or synthetic. Default: the default model's."
    ),
]
VoiceName: TypeAlias = Annotated[
    str, typer.Option(help="A voice of the codec's folder by name, or a voice file.")
]
System: TypeAlias = Annotated[
    str | None, typer.Option(help="System prompt; '' for none. Default: the public demo's.")
]
TaskSystem: TypeAlias = Annotated[
    str | None, typer.Option(help="System prompt; '' for none. Default: this task's own.")
]
Temperature: TypeAlias = Annotated[
    float | None, typer.Option(help=f"0 takes the likeliest id. {_CHECKPOINTS.format('0.6')}")
]
TopK: TypeAlias = Annotated[
    int | None,
    typer.Option(help=f"Draw among the K likeliest ids; 0 is off. {_CHECKPOINTS.format('20')}"),
]
TopP: TypeAlias = Annotated[
    float | None,
    typer.Option(
        help="Nucleus sampling: draw among the likeliest ids that hold mass P; 1 is off. "
        f"{_CHECKPOINTS.format('0.95')}"
    ),
]
RepetitionPenalty: TypeAlias = Annotated[
    float | None, typer.Option(help=f"1 is off. {_CHECKPOINTS.format('1.1')}")
]
Seed: TypeAlias = Annotated[int, typer.Option(help="Same seed, same answers.")]
MaxRows: TypeAlias = Annotated[
    int | None,
    typer.Option(
        help="Longest reply in rows; a row of speech is 80 ms. Default: the checkpoint's, else "
        "1024."
    ),
]
ReplyScript: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="Force mode changes and length, e.g. speech:75 or text:8,speech:20: random weights "
        "never end by themselves. All other draws stay real."
    ),
]
ShowRows: TypeAlias = Annotated[
    bool, typer.Option("--show-rows", help="Print step, mode, text id and audio id of every row.")
]
Channel: TypeAlias = Annotated[
    int | None, typer.Option(help="Which channel to hear, from 1. Default: mix up to two.")
]
Device: TypeAlias = Annotated[
    str, typer.Option(help="auto, cpu, cuda, cuda:1 ... auto takes a GPU where there is one.")
]
ModelDtype: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help=f"Of the language model: {DTYPES_HELP}. Default: float32 on a CPU, as stored on a GPU."
    ),
]
CaseFolders: TypeAlias = Annotated[
    list[Path], typer.Argument(metavar="DIR...", help="Folders that hold a case.json.")
]
CaseDtype: TypeAlias = Annotated[str, typer.Option(help=f"Compute in {DTYPES_HELP}.")]
CaseWeights: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--weights",
        help="Read every case's weights from this folder: a model's, a codec's, or one that "
        "holds model/ and codec/. Default: where the case has or names them.",
    ),
]
VerifiedPath: TypeAlias = Annotated[
    ComputePath,
    typer.Option(
        "--path", help="Which way of computing: the plain reference, or the engine that serves."
    ),
]
NewFolder: TypeAlias = Annotated[
    Path, typer.Argument(metavar="OUT", help="A new folder; gets OUT/model and OUT/codec.")
]
Size: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        help="tiny, full, or KEY=VALUE; repeat or join with commas, e.g. "
        "tiny,hidden_size=256,flow.input_size=96. Default: tiny."
    ),
]
WeightsSeed: TypeAlias = Annotated[int, typer.Option(help="Same seed and sizes, same weights.")]
WeightsDtype: TypeAlias = Annotated[
    str, typer.Option(help="Of the language model: bfloat16, float16 or float32.")
]
TokenizerFile: TypeAlias = Annotated[
    Path | None, typer.Option(help="A tokenizer.json to use instead of a byte-level one.")
]
CheckpointFolder: TypeAlias = Annotated[
    Path,
    typer.Argument(
        metavar="DIR", help="A model folder, a codec folder, or one that holds model/ and codec/."
    ),
]
ConvertedFolder: TypeAlias = Annotated[
    Path, typer.Argument(metavar="OUT", help="A new folder for the converted checkpoint.")
]
ConvertDtype: TypeAlias = Annotated[
    str, typer.Option(help="bf16, fp16 or fp32, of the language model; the codec keeps its own.")
]
Hashes: TypeAlias = Annotated[
    bool, typer.Option("--hashes/--no-hashes", help="Read every byte for SHA-256 sums.")
]
AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print one json document.")]
TraceFile: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        help="Write the time of every stage run as a Chrome trace, for ui.perfetto.dev or "
        "chrome://tracing; also after Ctrl-C.",
    ),
]
ReportFile: TypeAlias = Annotated[
    Path, typer.Argument(metavar="OUT.json", help="The file to write.")
]
ReportCases: TypeAlias = Annotated[
    list[Path] | None,
    typer.Option("--cases", help="Golden case folders to verify and report on; may be repeated."),
]
Force: TypeAlias = Annotated[bool, typer.Option("--force", help="Replace a file that exists.")]
ShardGib: TypeAlias = Annotated[
    float, typer.Option(help="Largest file written, in GiB; memory taken grows with it.")
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
        "10.",
    ),
]
SoundDtype: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--codec-dtype",
        metavar="DTYPE",
        help="Precision of flow and vocoder: float32, float16 or bfloat16. Default: float16 on a "
        "GPU, else float32.",
    ),
]
Vocoder: TypeAlias = Annotated[
    str,
    typer.Option(
        metavar="hift|bigvgan",
        help="The vocoder, which makes sound of mels: hift, the checkpoint's own, or bigvgan, "
        "NVIDIA's BigVGAN-v2. That one cannot be given the model's codes: a code is a choice "
        "among thousands of sounds, which the flow turns into a mel in a voice; and its own mels "
        "differ from the flow's, so a fitted linear map stands between, and sound comes 0.5 s "
        "later.",
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
        help="Memory of a GPU for voices and replies of the flow decoder. Default: enough for "
        "all sessions and 40 s of voices; in benchmarks 8192.",
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
JsonFile: TypeAlias = Annotated[
    str | None,
    typer.Option("--json", metavar="FILE|-", help="Write every figure as json; - is stdout."),
]
HtmlFile: TypeAlias = Annotated[
    Path | None,
    typer.Option("--html", metavar="FILE", help="Write one page with tables and sound to play."),
]
BuiltFolder: TypeAlias = Annotated[
    Path, typer.Argument(metavar="DIR", help="A folder that mosstalk build made.")
]
