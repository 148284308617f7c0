"""Ask the model that ships three questions: what `make demo` runs after its set-up.

The questions are recordings, and one conversation.
"""

import argparse
from pathlib import Path

import mosstalk

ROOT = Path(__file__).resolve().parent.parent
QUESTIONS = {
    "assets/capital.flac": "What is the capital of France?",
    "assets/spain.flac": "And of Spain?",
    "assets/sum.flac": "What is seven plus five?",
}
BEGIN = """
The small model that comes with mosstalk hears three questions, one after the other.
It answers each in speech, and writes its answer down."""
TURN = """
{number}. It hears:  {asked}  ({question})
   It says:   {written}  ({answer})"""
END = """
Listen to the answers in {folder}/.

Next: make talk
A page opens in your browser. Press Talk and ask, or type a question."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "folder", type=Path, nargs="?", default="demo-output",
        help="where the spoken answers go, from the project's folder on (%(default)s)",
    )  # fmt: skip
    folder = ROOT / parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    shown = folder.relative_to(ROOT) if folder.is_relative_to(ROOT) else folder
    print(BEGIN, flush=True)
    pipeline = mosstalk.Pipeline.load("pocket")
    chat = pipeline.chat()
    for number, (question, asked) in enumerate(QUESTIONS.items(), 1):
        name = f"answer-{number}.wav"
        chat.hear_file(ROOT / question)
        written = answer(chat, folder / name) or written_down(pipeline, folder / name)
        turn = {"number": number, "asked": asked, "question": question}
        print(TURN.format(**turn, written=written, answer=shown / name), flush=True)
    print(END.format(folder=shown))


def answer(chat: mosstalk.Chat, path: Path) -> str:
    """Have the conversation answered into ``path``; return what the model wrote, if it did."""
    made = chat.answer()
    writer = mosstalk.AudioWriter(path, rate=24_000)
    for samples in made:
        writer.write(samples)
    writer.close()
    return made.text.strip()


def written_down(pipeline: mosstalk.Pipeline, path: Path) -> str:
    """What the model hears in a recording."""
    heard = mosstalk.transcribe(pipeline, mosstalk.read_audio(path, 16_000).samples)
    for _ in heard:
        pass
    return heard.text.strip()


if __name__ == "__main__":
    main()
