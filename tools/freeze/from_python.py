"""Run by the checkout that is recorded: answers by the documented names of ``mosstalk``.

    python from_python.py MODEL CODEC OUT SCRIPTED

writes OUT/answers.json and one float32 file a sound. Models whose weights are random need a script
("scripted"), which forces the length of replies.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

import mosstalk

Options = mosstalk.SamplingOptions
Make = Callable[[mosstalk.Pipeline, mosstalk.Script | None], mosstalk.Answer]
OPTIONS = {
    "greedy": Options(temperature=0.0),
    "greedy-penalty": Options(temperature=0.0, repetition_penalty=1.4),
    "demo": Options(),
    "seed-1": Options(seed=1),
    "hot": Options(temperature=1.5, top_k=0, top_p=1.0, repetition_penalty=1.0, seed=2),
    "top-k": Options(temperature=1.0, top_k=3, top_p=1.0, seed=3),
    "top-p": Options(temperature=1.0, top_k=0, top_p=0.4, seed=4),
}
SHORT = mosstalk.Limits(max_new_rows=20)
QUESTION, SENTENCE = Path("in/question.flac"), Path("in/librivox.flac")


class Keeper:
    """Keeps answers under names."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.folder, self.answers = folder, dict[str, Any]()

    def keep(self, name: str, answer: mosstalk.Answer, most_hops: int | None = None) -> None:
        """Have an answer made, or its first hops alone, and keep what it was."""
        hops = []
        for samples in answer:
            hops.append(samples)
            if len(hops) == most_hops:
                answer.cancel()
        np.save(self.folder / f"{name}.npy", np.concatenate([np.zeros(0, np.float32), *hops]))
        reply = answer.reply
        self.answers[name] = {
            "rows": [[m.value, *row] for m, row in zip(reply.modes, reply.rows, strict=True)],
            "codes": answer.codes, "text": answer.text, "hops": [len(hop) for hop in hops],
            "finish_reason": reply.finish_reason and reply.finish_reason.value,
            "rows_prefilled": answer.timings.rows_prefilled, "steps": answer.steps,
        }  # fmt: skip


def options(kept: Keeper, pipeline: mosstalk.Pipeline, script: mosstalk.Script | None) -> None:
    """One spoken turn, drawn in all ways."""
    for name, chosen in OPTIONS.items():
        chat = pipeline.chat()
        chat.hear_file(QUESTION)
        kept.keep(name, chat.answer(options=chosen, limits=SHORT, script=script))


def turns(kept: Keeper, pipeline: mosstalk.Pipeline, script: mosstalk.Script | None) -> None:
    """A conversation of typed and spoken turns, answered in speech and text."""
    chat = pipeline.chat(system="Say it again.")
    chat.read("Good morning.")
    kept.keep("turn-1", chat.answer(limits=SHORT, script=script))
    chat.hear_file(SENTENCE)
    kept.keep("turn-2", chat.answer(limits=SHORT, script=script))
    chat.hear(mosstalk.read_audio(QUESTION, 16_000).samples[:24_000])
    chat.read("And this, too.")
    text = script and mosstalk.Script.parse("text:9")
    kept.keep("turn-3-text", chat.answer(speech=False, limits=SHORT, script=text))
    mixed = mosstalk.Script.parse("text:5,speech:9")
    kept.keep("turn-4-mixed", chat.answer(limits=SHORT, script=mixed))
    kept.answers["history"] = [list(row) for row in chat.conversation.rows]


def interrupted(kept: Keeper, pipeline: mosstalk.Pipeline, script: mosstalk.Script | None) -> None:
    """An answer that is cancelled after two hops, and the next turn."""
    chat = pipeline.chat()
    chat.hear_file(SENTENCE)
    kept.keep("cancelled", chat.answer(script=script), most_hops=2)
    chat.read("And now?")
    kept.keep("after-cancelled", chat.answer(limits=SHORT, script=script))


def tasks(kept: Keeper, pipeline: mosstalk.Pipeline, script: mosstalk.Script | None) -> None:
    """Reading aloud and writing down."""
    kept.keep("speak", mosstalk.speak(pipeline, "It is 5 km to the station.", script=script))
    seeded = Options(temperature=0.9, seed=5)
    kept.keep("speak-seed", mosstalk.speak(pipeline, "Good night.", options=seeded, script=script))
    text = script and mosstalk.Script.parse("text:9")
    for path in (QUESTION, SENTENCE):
        samples = mosstalk.read_audio(path, 16_000).samples
        kept.keep(f"transcribe-{path.stem}", mosstalk.transcribe(pipeline, samples, script=text))


def main() -> None:
    model, codec, out, scripted = sys.argv[1:]
    if model == "default":
        model, codec = map(str, mosstalk.default_model())
    pipeline = mosstalk.Pipeline.load(model, codec, device="cpu")
    script = mosstalk.Script.parse("speech:15") if scripted == "scripted" else None
    kept = Keeper(Path(out))
    kept.answers["options"] = {name: asdict(chosen) for name, chosen in OPTIONS.items()}
    for part in (options, turns, interrupted, tasks):
        part(kept, pipeline, script)
    (kept.folder / "answers.json").write_text(json.dumps(kept.answers))


if __name__ == "__main__":
    main()
