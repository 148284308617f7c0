"""What the commands print and write: help, refusals, plans, sound, checkpoints, built folders."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

from .jobs import Job, Recorder
from .results import hashes, masked
from .subject import HERE, ROOT, Run

_SIZE = "tiny,num_shared_layers=32,num_modality_layers=4,hidden_size=64,intermediate_size=128"
"""As many layers as the published model has, and next to no width."""
DEEP = ("--model", "made/deep/model", "--codec", "made/deep/codec")
BIGVGAN = ("--vocoder", "bigvgan", "--vocoder-dir", "bigvgan")

SPEECH: dict[str, tuple[str, ...]] = {
    "speak/plain": ("speak", "Good morning. The train is late."),
    "speak/file": ("speak", "--file", "in/text.txt", "--out", "out.flac", "--seed", "7",
                   "--temperature", "0.8"),
    "speak/stdin": ("speak", "-", "--out", "out.ogg", "--voice", "made/ada.safetensors"),
    "speak/bigvgan": ("speak", "Twenty-one boats are on the lake.", *BIGVGAN),
    "speak/deep": ("speak", "Good morning.", *DEEP, "--script", "speech:30"),
    "speak/built": ("speak", "Good morning.", "--model", "made/built"),
    "speak/built-fp8": ("speak", "Good morning.", "--model", "made/built-fp8"),
    "chat/spoken": ("chat", "--speech", "in/question.flac", "--show-rows"),
    "chat/turns": ("chat", "--text", "Good morning.", "--speech", "in/librivox.flac", "--text",
                   "And?", "--seed", "3", "--top-k", "5", "--system", "", "--max-rows", "25"),
    "chat/text": ("chat", "--speech", "in/question.flac", "--reply", "text", "--show-rows"),
    "chat/bigvgan": ("chat", "--text", "It is late.", *BIGVGAN, "--max-rows", "30"),
    "chat/deep": ("chat", "--speech", "in/stereo.wav", "--channel", "2", *DEEP, "--show-rows",
                  "--script", "text:8,speech:20", "--seed", "9"),
    "chat/deep-converted": ("chat", "--text", "Hello.", "--model", "made/converted/model",
                            "--codec", "made/converted/codec", "--script", "speech:15"),
    "chat/deep-fp8": ("chat", "--text", "Hello.", "--model", "made/fp8/model", "--codec",
                      "made/fp8/codec", "--script", "speech:15"),
    "transcribe/several": ("transcribe", "in/question.flac", "in/long.wav", "in/stereo.wav"),
    "transcribe/deep": ("transcribe", "in/question.flac", *DEEP, "--script", "text:12"),
}  # fmt: skip
"""Commands that hear or make sound, each run with --json and, the first of a kind, without."""
_TEXT = (
    "On May 3rd, 2024, Dr. Smith paid $3.50 for 5 km. \N{GRINNING FACE}\n\nWas it worth it? Yes!\n"
)

DOCUMENTS: dict[str, tuple[str, ...]] = {
    "plan/json": ("plan", "--gpu-memory", "80GB", "--json"),
    "plan/24gb": ("plan", "--gpu-memory", "24GiB", "--precision", "fp8"),
    "plan/small": ("plan", "--gpu-memory", "16GiB", "--max-sessions", "9"),
    "plan/cards": ("plan", "--gpu", "all"),
    "serve/config": ("serve", "--vad", "none", "--temperature", "0", "--print-config"),
    "voice/list": ("voice", "list", "--json"),
    "voice/inspect": ("voice", "inspect", "made/ada.safetensors", "--json"),
    "voice/inspect-text": ("voice", "inspect", "default"),
    "checkpoint/inspect-deep": ("checkpoint", "inspect", "made/deep"),
    "checkpoint/inspect-converted": ("checkpoint", "inspect", "made/converted", "--json"),
    "checkpoint/inspect-fp8": ("checkpoint", "inspect", "made/fp8", "--json"),
    "engine/inspect": ("engine", "inspect", "made/built", "--hashes"),
    "engine/inspect-json": ("engine", "inspect", "made/built-fp8", "--json"),
    "verify/reference": ("verify", "goldens/lm-square", "goldens/hift", "--json"),
    "verify/fast": ("verify", "goldens/lm-wide-heads", "--path", "fast", "--json"),
}
_CALCULATED = ("plan/json", "serve/config")
"""Documents in which nothing was measured."""

REFUSALS: dict[str, tuple[str, ...]] = {
    "no-turn": ("chat",),
    "no-file": ("chat", "--speech", "in/nothing.wav"),
    "no-sound": ("transcribe", "in/text.txt"),
    "no-text": ("speak", ""),
    "other-script": ("speak", "\N{CJK UNIFIED IDEOGRAPH-4F60}\N{CJK UNIFIED IDEOGRAPH-597D}"),
    "no-voice": ("speak", "Hello.", "--voice", "nobody"),
    "no-vocoder": ("speak", "Hello.", "--vocoder", "bigvgan"),
    "no-model": ("chat", "--text", "hello", "--model", "nowhere", "--codec", "nowhere"),
    "one-folder": ("chat", "--text", "hello", "--codec", "made/deep/codec"),
    "temperature": ("chat", "--text", "hello", "--temperature", "-1"),
    "script": ("chat", "--text", "hello", "--script", "song:5"),
    "rows": ("chat", "--text", "hello", "--max-rows", "0"),
    "dtype": ("chat", "--text", "hello", "--dtype", "int8"),
    "channel": ("transcribe", "in/stereo.wav", "--channel", "3"),
    "ending": ("speak", "Hello.", "--out", "out.xyz"),
    "option": ("speak", "Hello.", "--loud"),
    "limit": ("serve", "--limit", "patience=1"),
    "empty-key": ("serve", "--api-key", ""),
    "recording": ("replay", "in"),
    "checkpoint": ("checkpoint", "inspect", "in"),
    "size": ("checkpoint", "synthesize", "out", "--size", "tiny,depth=3"),
    "there-already": ("checkpoint", "synthesize", "made/deep"),
    "engine": ("engine", "inspect", "in"),
    "voice": ("voice", "inspect", "in/text.txt"),
    "built-already": ("build", "pocket", "made/built"),
    "gpu": ("plan", "--gpu", "abacus"),
}


def write_inputs(work: Path) -> None:
    """Text and sounds of other shapes than those in assets."""
    (work / "in" / "text.txt").write_text(_TEXT)
    question, rate = soundfile.read(work / "in" / "question.flac", dtype="float32")
    sentence, _ = soundfile.read(work / "in" / "librivox.flac", dtype="float32")
    shorter = min(len(question), len(sentence))
    stereo = np.stack([question[:shorter], sentence[:shorter]], axis=1)
    soundfile.write(work / "in" / "stereo.wav", stereo, 44_100)
    pause = np.zeros(rate, np.float32)
    long = np.concatenate([part for _ in range(5) for part in (question, pause, sentence, pause)])
    soundfile.write(work / "in" / "long.wav", long, rate)
    shutil.copytree(ROOT / "tests" / "goldens", work / "goldens")


def helps(recorder: Recorder) -> None:
    """The help of every command and sub-command that the help of the one above it names."""
    waiting: list[tuple[str, ...]] = [()]
    while waiting:
        words = waiting.pop()
        run = recorder.subject.mosstalk(*words, "--help")
        plain, (text, boxes) = recorder.subject.plain, boxes_of(run.out)
        value = printed(recorder, Run(run.code, text, run.err))
        for title, entries in boxes.items():
            value[title] = {name: plain(each)[0] for name, each in entries.items()}
        recorder.add("/".join(("help", *words)) if words else "help/mosstalk", value)
        waiting += [(*words, name) for name in boxes.get("Commands", {})]


def boxes_of(text: str) -> tuple[str, dict[str, dict[str, str]]]:
    """A help without its boxes, and each box by title: what stands beside each name in it.

    Where lines break and how wide columns are depends on the other names in the box, so an entry is
    one line with single blanks. A short name such as ``-h`` is an entry that says the long one.
    """
    outside = list[str]()
    boxes: dict[str, dict[str, str]] = {}
    box, name = dict[str, str](), ""
    for line in text.splitlines():
        if title := re.match("╭─ (.+?) ─", line):
            box = boxes[title[1]] = {}
        elif entry := re.match(r"│ (?:\* | {0,5}(?=\S)) *(\S+)(?: +(-\w)(?= ))? +(.*?) *│$", line):
            name, short, box[name] = entry[1], entry[2], " ".join(entry[3].split())
            box |= {short: name} if short else {}
        elif line.startswith("│"):
            box[name] += " " + " ".join(line.strip("│").split())
        elif not line.startswith("╰"):
            outside.append(line)
    return "\n".join(outside), boxes


def printed(recorder: Recorder, run: Run) -> dict[str, Any]:
    """A command's exit code and lines, without what was measured."""
    plain = recorder.subject.plain
    return {"code": run.code, "out": plain(run.out), "err": plain(run.err)}


_MADE: dict[str, dict[str, tuple[str, ...]]] = {
    "deep": {
        "deep": ("checkpoint", "synthesize", "fresh/deep", "--size", _SIZE, "--seed", "3"),
        "converted": ("checkpoint", "convert", "fresh/deep", "fresh/converted", "--dtype", "fp32"),
        "fp8": ("checkpoint", "quantize", "fresh/deep", "fresh/fp8"),
    },
    "voice": {
        "ada.safetensors": ("voice", "create", "ada", "in/librivox.flac", "--codec", "pocket",
                            "--out", "fresh/ada.safetensors"),
    },
    "built": {"built": ("build", "pocket", "fresh/built")},
    "built-fp8": {"built-fp8": ("build", "pocket", "fresh/built-fp8", "--precision", "fp8",
                                "--max-sessions", "4")},
}  # fmt: skip
"""What a subject makes in its folder ``fresh``, for itself or for another to read: each group's
commands in this order."""


def making_jobs() -> Iterator[Job]:
    """One job for each group of what is made."""
    for name in _MADE:
        yield Job(f"made/{name}", _make, (name,))


def _make(recorder: Recorder, group: str) -> None:
    for name, words in _MADE[group].items():
        value = printed(recorder, recorder.subject.mosstalk(*words))
        out = recorder.subject.fresh / name
        files = hashes(out)
        for document in ("engine.json", "model/mosstalk.json", "mosstalk.json"):  # times in them
            if document in files:
                kept = masked(json.loads((out / document).read_text()))
                kept.pop("built", None)  # when
                kept.get("machine", {}).pop("commit", None)
                files[document] = kept
        recorder.add(f"made/{name}", value | {"files": files})


def speech_jobs() -> Iterator[Job]:
    """Commands that make sound or text, and the answers that Python gets."""
    shown = set[str]()
    for name, words in SPEECH.items():
        for as_json in (True, False) if words[0] not in shown else (True,):
            yield Job(f"{name}{'' if as_json else '-text'}", _speech, (name, words, as_json))
        shown.add(words[0])
    yield Job("python/pocket", _from_python, ("pocket", "default", "-", "free"))
    yield Job(
        "python/deep", _from_python, ("deep", "made/deep/model", "made/deep/codec", "scripted")
    )


def document_jobs() -> Iterator[Job]:
    """Commands that print a text or a document, and those that are refused."""
    for name, words in DOCUMENTS.items():
        yield Job(name, _printed, (name, words))
    for name, words in REFUSALS.items():
        yield Job(f"refused/{name}", _printed, (f"refused/{name}", words))


def _printed(recorder: Recorder, name: str, words: tuple[str, ...]) -> None:
    run = recorder.subject.mosstalk(*words)
    value = printed(recorder, run)
    if "--json" in words or "--print-config" in words:
        document = recorder.subject.document(run.out)
        value["out"] = document if name in _CALCULATED else masked(document)
    recorder.add(name, value)


def _speech(recorder: Recorder, name: str, words: tuple[str, ...], as_json: bool) -> None:
    """Run in a folder of the job's own, where what it writes is kept."""
    subject, folder = recorder.subject, name.replace("/", "-") + ("" if as_json else "-text")
    place = subject.work / folder
    place.mkdir()
    for each in ("in", "made", "bigvgan"):
        (place / each).symlink_to(subject.work / each)
    run = subject.mosstalk(
        *words, *(("--json",) if as_json else ()), stdin="The sun is warm today.", folder=folder
    )
    value = printed(recorder, run) | {"sounds": {}}
    if as_json:
        value["out"] = masked(subject.document(run.out))
    for path in sorted(place.glob("*.*")):
        samples, rate = soundfile.read(path, dtype="int16")
        value["sounds"][path.name] = recorder.results.sound(samples, rate)
    recorder.add(name if as_json else f"{name}-text", value)


def _from_python(recorder: Recorder, name: str, *words: str) -> None:
    model, codec, scripted = words
    subject, out = recorder.subject, recorder.subject.work / f"python-{name}"
    run = subject.python(str(HERE / "from_python.py"), model, codec, out.name, scripted)
    if run.code:
        raise RuntimeError(run.err)
    for each, answer in json.loads((out / "answers.json").read_text()).items():
        if (out / f"{each}.npy").exists():
            answer["sound"] = recorder.results.sound(np.load(out / f"{each}.npy"), 24_000)
        recorder.add(f"python/{name}/{each}", answer)
