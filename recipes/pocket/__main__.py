"""``python -m recipes.pocket``: the recipe's stages, one command each."""

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from safetensors.torch import load_file

from mosstalk.config import LanguageModelConfig
from mosstalk.constants import INPUT_RATE, INPUT_SAMPLES_PER_CODE
from mosstalk.conversation import SpecialIds
from mosstalk.models.features import whisper_log_mel
from mosstalk.models.text_tokenizer import TextTokenizer
from recipes.pocket.curves import LOGS
from recipes.pocket.data import Recordings, load_recordings
from recipes.pocket.sizes import POCKET_SIZES, SMOKE_SIZES
from recipes.pocket.training import Budget, Run
from recipes.stages import NO_LIMIT, Minutes, Seed, Steps, Work, pick_device, run_stages, stages

_HELP = """Make mosstalk-pocket, stage by stage, in one folder WORK.

\b
stage            needs                            leaves in WORK
1 data           flite, festival, espeak-ng,      data/, beside the teacher's clips, which
                 WordNet (bring-voices.sh)        python -m recipes.listener shards writes
2 tokenizer      data/                            tokenizer.safetensors,
                                                  tokenizer-training.safetensors
3 vocoder        data/ (beside 2, 4 or 5)         vocoder.safetensors,
                                                  vocoder_critics.safetensors,
                                                  vocoder_samples/
4 encode         data/, tokenizer.safetensors     codes/
5 flow           data/, codes/                    flow.safetensors
6 language-model data/, codes/                    language_model.safetensors, text/
                 (beside 5)
7 predict        data/, codes/, flow.safetensors  mels-PARTS.npy, for 3 once more with
                                                  --mels and --resume
8 package        all of these                     nothing: fills src/mosstalk/pocket;
                                                  unpack makes trainable weights of it again
9 curves         the stages' STAGE.jsonl          nothing: fills docs/img
10 keep          data/, codes/                    nothing: writes both without sound to a file
11 unkeep        that file                        data/ without sound, codes/: enough for 6
12 whole         what recipes.listener's shards   package/, and what all stages leave: runs shards
                 needs, a tokenizer, dialogues    and 4 to 8 on all cards, ended by the clock

Stages 2 to 7 use the first GPU where there is one and --smoke makes them small enough for
a CPU. Parts of the data may be encoded one by one, as they are made, with the same number of
--hearings. What each stage took is in recipes/pocket/README.md.
"""
ROOT = Path(__file__).parents[2]
SHIPPED = ROOT / "src" / "mosstalk" / "pocket"
app = stages(_HELP)
Parts = Annotated[str, typer.Option(help="Parts of the data, e.g. 0 or 0,1,2.")]
Smoke = Annotated[bool, typer.Option("--smoke", help="Tiny sizes, to see that it runs.")]
Resume = Annotated[
    Path | None,
    typer.Option(help="Weights of an earlier run to go on from; the optimiser starts anew."),
]
Plain = Annotated[
    bool, typer.Option("--plain", help="Record no steps as CUDA graphs: slower, needs less memory.")
]
_HELD_OUT_SHARE = 0.01
_TEXTS = 40_000
"""Texts of clips, and dialogues, that the vocabulary is learned from."""


def _load(work: Path, parts: str, *sound: str) -> Recordings:
    data = load_recordings(work / "data", pick_device(), map(int, parts.split(",")), sound=sound)
    hours = _hours(int(data.codes.sum()))
    print(f"loaded {len(data.codes)} clips, {hours:.1f} h, {data.teacher_clips} of the teacher's")
    return data


def _hours(codes: int) -> float:
    return codes * INPUT_SAMPLES_PER_CODE / INPUT_RATE / 3600


@app.command()
def data(
    work: Work,
    speech_root: Annotated[Path, typer.Option(help="Root that holds the programs.")] = Path("/"),
    part: Annotated[int, typer.Option(help="Which part; each has texts of its own.")] = 0,
    texts: Annotated[int, typer.Option(help="How many texts, each read once.")] = 12_000,
    workers: Annotated[int, typer.Option(help="Processes.")] = 14,
) -> None:
    """Stage 1: let all voices but Kokoro's read; again makes only what is missing."""
    from recipes.pocket.data import make_data

    wordnet = speech_root / "usr/share/wordnet"
    make_data(work / "data", wordnet, speech_root, part=part, count=texts, workers=workers)


@app.command()
def tokenizer(
    work: Work, parts: Parts = "0", minutes: Minutes = 8, steps: Steps = NO_LIMIT,
    seed: Seed = 0, resume: Resume = None, smoke: Smoke = False,
    hold: Annotated[
        bool, typer.Option("--hold", help="Keep what the codes of --resume mean, for more voices.")
    ] = False,
    whisper: Annotated[
        Path | None,
        typer.Option(help="The listener's whisper.safetensors: tells --hold of other voices."),
    ] = None,
) -> None:  # fmt: skip
    """Stage 2: train the speech tokenizer and its codebook.

    To resume, name tokenizer-training.safetensors, which has the readers too, or
    tokenizer.safetensors: then new readers learn first.
    """
    from recipes.pocket import tokenizer as stage

    if hold and resume is None:
        raise typer.BadParameter("--hold needs a tokenizer to --resume")
    run = Run("tokenizer", work, Budget(steps, minutes), 300, smoke, seed, resume)
    features = _whisper(whisper) if hold and whisper else None
    stage.train(_load(work, parts, "heard"), run, hold=hold, features=features)


def _whisper(path: Path) -> Callable[[torch.Tensor], torch.Tensor]:
    """Whisper's own features (B, 1500, C) of sound (B, 480000)."""
    from recipes.listener.whisper import load_whisper, unpack

    teacher = load_whisper(unpack(load_file(path)))[0].to(pick_device())
    return lambda sound: teacher(whisper_log_mel(sound, 80))


@app.command()
def vocoder(
    work: Work, parts: Parts = "0", minutes: Minutes = 8, steps: Steps = NO_LIMIT,
    seed: Seed = 0, resume: Resume = None, smoke: Smoke = False,
    plain: Plain = False,
    mels: Annotated[bool, typer.Option("--mels", help="Hear predict's mels too.")] = False,
) -> None:  # fmt: skip
    """Stage 3: train HiFT on the teacher's sound; needs no other stage.

    To resume, name vocoder.safetensors; the critics beside it are used if they are there.
    """
    from recipes.pocket import vocoder as stage

    run = Run("vocoder", work, Budget(steps, minutes), 200, smoke, seed, resume, plain)
    data = _load(work, parts, "spoken").spoken_clips()
    predicted = torch.from_numpy(np.load(_mels_file(work, parts))) if mels else None
    stage.train(data, run, None if predicted is None else predicted.to(data.waves.device))


@app.command()
def encode(
    work: Work,
    parts: Parts = "0",
    hearings: Annotated[int, typer.Option(help="Times that each clip is heard.")] = 3,
    seed: Seed = 0,
    smoke: Smoke = False,
) -> None:
    """Stage 4: codes of every clip, once clean. In the other hearings the teacher begins 20, 40
    and 60 ms later, and all others have other throats, in rooms and noise.
    """
    from recipes.pocket.tokenizer import encode_all, load_tokenizer, write_codes

    data = _load(work, parts, "heard")
    listener = load_tokenizer(work / "tokenizer.safetensors", data.heard.device, smoke=smoke)
    started = time.monotonic()
    found = [
        encode_all(listener, data, hearing=number, seed=seed + number) for number in range(hearings)
    ]
    write_codes(work / "codes", data, found)
    same = float(np.mean(found[0] == found[-1]))
    took = f"{hearings} times in {time.monotonic() - started:.0f} s"
    print(f"encoded {len(found[0])} codes {took}; clean and last agree in {same:.1%}")


def _hearings(work: Path, data: Recordings) -> list[np.ndarray[Any, np.dtype[np.int16]]]:
    from recipes.pocket.tokenizer import read_codes

    return read_codes(work / "codes", data)


@app.command()
def flow(
    work: Work, parts: Parts = "0", minutes: Minutes = 8, steps: Steps = NO_LIMIT,
    seed: Seed = 0, resume: Resume = None, smoke: Smoke = False, plain: Plain = False,
) -> None:  # fmt: skip
    """Stage 5: train the flow decoder on the teacher's codes, heard clean: replies are of such."""
    from recipes.pocket import flow as stage

    run = Run("flow", work, Budget(steps, minutes), 300, smoke, seed, resume, plain)
    data = _load(work, parts, "spoken")
    stage.train(data, _hearings(work, data)[0], run)


@app.command()
def language_model(
    work: Work, parts: Parts = "0", minutes: Minutes = 8, steps: Steps = NO_LIMIT,
    seed: Seed = 0, resume: Resume = None, smoke: Smoke = False,
    plain: Plain = False,
    rate: Annotated[float, typer.Option(help="Peak learning rate.")] = 2e-3,
    listening: Annotated[float, typer.Option(help="Weight of the phones heard and said.")] = 0.3,
    dialogues: Annotated[
        list[Path] | None,
        typer.Option(help="A file of recipes.answers; each time it is named it is built anew."),
    ] = None,
    passes: Annotated[int, typer.Option(help="Examples of each clip.")] = 1,
    speaking_alone: Annotated[
        bool,
        typer.Option(
            "--speaking-alone",
            help="Train the audio block of --resume alone: what it writes stays as it is.",
        ),
    ] = False,
) -> None:  # fmt: skip
    """Stage 6: train both heads to read aloud, write down and answer; keeps the best weights."""
    from recipes.pocket import language_model as stage
    from recipes.pocket.examples import Maker, build, read_dialogues, split_by_text

    if speaking_alone and resume is None:
        raise typer.BadParameter("--speaking-alone needs a language model to --resume")
    warm_up = min(400, max(1, steps // 5))
    run = Run("language_model", work, Budget(steps, minutes), warm_up, smoke, seed, resume, plain)
    data, device = _load(work, parts), pick_device()
    sizes = SMOKE_SIZES if smoke else POCKET_SIZES
    config = LanguageModelConfig.from_dict(sizes.model)
    talks = [each for path in dialogues or [] for each in read_dialogues(path)]
    asked = (turn.asked for each in talks[:_TEXTS] for turn in each)
    text = _text_tokenizer(work, [*data.texts[:_TEXTS], *asked], sizes.model)
    maker = Maker(data, _hearings(work, data), text, SpecialIds.of(config, text.special))
    split = split_by_text(data.texts, _HELD_OUT_SHARE, seed)
    different = list(dict.fromkeys(map(tuple, talks)))
    kept = set(random.Random(seed).sample(different, round(len(different) * _HELD_OUT_SHARE)))
    examples = build(
        maker, np.tile(split.learned, passes), device, seed=seed, workers=1 if smoke else 20,
        dialogues=[each for each in talks if tuple(each) not in kept],
    )  # fmt: skip
    held_out = {"held_out": build(maker, split.held_out, device, seed=seed - 1)}
    if kept:
        none, asked_anew = split.held_out[:0], list(map(list, sorted(kept)))
        answers = build(maker, none, device, seed=seed - 1, dialogues=asked_anew)
        held_out["held_out_answers"] = answers
    print(f"{len(examples.lengths)} examples, {int(examples.lengths.sum())} rows")
    stage.train(examples, held_out, config, run, rate, listening, speaking_alone=speaking_alone)


def _text_tokenizer(work: Path, texts: list[str], model: dict[str, Any]) -> TextTokenizer:
    """The vocabulary in ``work/text``, learned from the first texts where there is none yet."""
    from recipes.pocket.examples import train_text_tokenizer

    folder = work / "text"
    if (folder / "tokenizer.json").exists():
        return TextTokenizer.from_folder(folder, model["vocab_size"])
    return train_text_tokenizer(texts, folder, model)


@app.command()
def predict(work: Work, parts: Parts = "0", smoke: Smoke = False) -> None:
    """Stage 7: the teacher's mels as the flow makes them, to train the vocoder further on."""
    from recipes.pocket import flow as stage

    data = _load(work, parts, "spoken")
    device = data.spoken.device
    flow = stage.load_flow(work / "flow.safetensors", SMOKE_SIZES if smoke else POCKET_SIZES)
    codes = torch.from_numpy(_hearings(work, data)[0][: data.teacher_codes].astype(np.int64))
    mels = stage.predict_mels(flow.to(device), data, codes.to(device))
    np.save(_mels_file(work, parts), mels.cpu().numpy())
    print(f"{mels.shape[0]} frames, {stage.mean_distance(mels, data):.3f} from the teacher's own")


def _mels_file(work: Path, parts: str) -> Path:
    return work / f"mels-{parts.replace(',', '-')}.npy"


@app.command()
def package(
    work: Work,
    out: Annotated[Path, typer.Option(help="Folder that gets model/ and codec/.")] = SHIPPED,
    smoke: Smoke = False,
    kept_codec: Annotated[
        Path | None, typer.Option(help="A package's codec/ to ship as it is; no stage makes one.")
    ] = None,
) -> None:
    """Stage 8: write the weights as they ship; refuses more than 40,000,000 bytes."""
    from recipes.pocket.package import package as write

    if smoke and out.resolve() == SHIPPED:
        raise typer.BadParameter("a toy must not take the place of what ships: name --out")
    total = write(work, out, SMOKE_SIZES if smoke else POCKET_SIZES, kept_codec=kept_codec)
    print(f"{out}: {total:,} bytes")


@app.command()
def unpack(
    out: Annotated[Path, typer.Argument(help="Folder that gets the weights, for --resume.")],
    packed: Annotated[Path, typer.Option(help="Folder with model/ and codec/.")] = SHIPPED,
) -> None:
    """Stage 8 backwards: what a package was made of, as weights that --resume takes."""
    from recipes.pocket.package import unpack as write

    write(packed, out)
    print(f"wrote {', '.join(sorted(path.name for path in out.iterdir()))}")


@app.command()
def curves(
    work: Annotated[
        Path | None, typer.Option(help="Take the logs of this folder first, thinned.")
    ] = None,
    logs: Annotated[Path, typer.Option(help="Folder of logs, which are kept.")] = LOGS,
    out: Annotated[Path, typer.Option(help="Folder for the drawings.")] = ROOT / "docs" / "img",
) -> None:
    """Stage 9: draw the stages' losses and held-out figures; needs the extra "recipe"."""
    from recipes.pocket.curves import draw, keep_logs

    if work:
        keep_logs(work, logs)
    for path in draw(logs, out):
        print(path)


@app.command()
def keep(
    work: Work,
    out: Annotated[Path, typer.Option(help="The file to write, e.g. kept.xz.")],
    parts: Parts = "0",
    hearings: Annotated[
        int | None, typer.Option(min=1, help="Keep the first so many; else all.")
    ] = None,
) -> None:
    """Stage 10: codes, labels and texts of encoded parts as one small file, without sound."""
    from recipes.pocket.keep import keep as write_kept

    size = write_kept(work, map(int, parts.split(",")), out, hearings)
    print(f"{out}: {size:,} bytes")


@app.command()
def unkeep(
    work: Work, kept: Annotated[Path, typer.Argument(help="A file that keep wrote.")]
) -> None:
    """Stage 11: the same codes, labels and texts in a folder again, to the bit."""
    from recipes.pocket.keep import unkeep as write_shards

    shards = write_shards(work, kept)
    print(f"wrote {len(shards)} shards, {_hours(sum(shards.values())):.1f} h")


@app.command()
def whole(
    work: Work,
    kept: Annotated[
        Path, typer.Option(help="A tokenizer of recipes.listener, or the one that ships.")
    ],
    dialogues: Annotated[
        list[Path], typer.Option(help="A file of recipes.answers; may be named again.")
    ],
    minutes: Annotated[float, typer.Option(help="All of it ends after so long.")] = 28,
    cards: Annotated[int, typer.Option(help="GPUs to use.")] = max(1, torch.cuda.device_count()),
    resume: Annotated[
        Path | None, typer.Option(help="Folder of earlier weights to go on from.")
    ] = None,
    smoke: Smoke = False,
    speech_root: Annotated[
        Path | None,
        typer.Option(help="Root of other programs, whose voices the tokenizer is to hear as well."),
    ] = None,
    whisper: Annotated[
        Path | None,
        typer.Option(help="The listener's whisper.safetensors, which --speech-root needs."),
    ] = None,
    model_alone: Annotated[
        bool,
        typer.Option(
            "--model-alone",
            help="Train the language model alone; the codec that --kept lies in stays as it is.",
        ),
    ] = False,
    speaking_alone: Annotated[
        bool,
        typer.Option(
            "--speaking-alone", help="Of that, train the audio block alone, of the one in --resume."
        ),
    ] = False,
) -> None:
    """Stage 12: all stages at once. A second call leaves out what has ended well."""
    from recipes.pocket.whole import OtherVoices, Runner, Whole

    if (speech_root is None) != (whisper is None):
        raise typer.BadParameter("--speech-root and --whisper go together: name both or neither")
    if model_alone and not (kept.parent / "flow").is_dir():
        raise typer.BadParameter(f"--model-alone ships the codec of --kept, and {kept} is in none")
    if speaking_alone and not (model_alone and resume):
        raise typer.BadParameter("--speaking-alone needs --model-alone, and weights to --resume")
    others = OtherVoices(speech_root, whisper) if speech_root and whisper else None
    training = Whole(
        work, kept, dialogues, cards, resume, smoke, others, model_alone, speaking_alone
    )
    Runner(training, minutes).run()


def main() -> None:
    """Run the command line."""
    from recipes.pocket.keep import KeptError
    from recipes.pocket.package import PackageError
    from recipes.pocket.voices import ProgramError
    from recipes.pocket.whole import WholeError

    run_stages(app, KeptError, PackageError, ProgramError, WholeError)


if __name__ == "__main__":
    main()
