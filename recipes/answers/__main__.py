"""``python -m recipes.answers``: what a model that answers learns from, and is asked."""

import json
import random
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from recipes.stages import Seed, run_stages, stages

if TYPE_CHECKING:
    from recipes.answers.kinds import World

app = stages("Write dialogues that a small model learns to answer from, and the bench's questions.")
Wordnet = Annotated[Path, typer.Option(help="WordNet's files (Debian: wordnet-base).")]
Definitions = Annotated[int, typer.Option(help="How many nouns are explained.")]
Out = Annotated[Path, typer.Argument(help="File to write.")]
WORDNET = Path("/usr/share/wordnet")
DEFINITIONS = 2_000
_SPELLED_WORDS = 6_000
"""Of the frequent words, how many may be asked to be spelled."""


@app.command()
def dialogues(
    out: Out,
    count: Annotated[int, typer.Option(help="How many dialogues.")] = 100_000,
    definitions: Definitions = DEFINITIONS,
    wordnet: Wordnet = WORDNET,
    seed: Seed = 0,
) -> None:
    """Draw dialogues of one to five turns, a json line each."""
    from recipes.answers.decks import Dealer, little_words
    from recipes.answers.dialogues import Dialogues

    drawn = _world(definitions, wordnet, seed)
    world = Dealer(drawn, little_words(drawn.tables))
    with out.open("w", encoding="utf-8") as file:
        for turns in islice(Dialogues(world), count):
            file.write(json.dumps({"turns": [asdict(turn) for turn in turns]}) + "\n")
    print(f"{out}: {count} dialogues")


@app.command()
def questions(
    out: Out,
    definitions: Definitions = DEFINITIONS,
    wordnet: Wordnet = WORDNET,
    seed: Seed = 0,
) -> None:
    """Draw the questions of `mosstalk bench quality --part answers`, in held-out wordings."""
    from recipes.answers.questions import write_questions

    count = write_questions(_world(definitions, wordnet, seed), out, seed)
    print(f"{out}: {count} questions")


def _world(definitions: int, wordnet: Path, seed: int) -> "World":
    """All facts; its texts and draws are those of ``seed``."""
    from recipes.answers.facts import load_tables
    from recipes.answers.glosses import load_glosses
    from recipes.answers.kinds import World
    from recipes.pocket.corpus import load_sources, texts

    sources = load_sources(wordnet)
    frequent = sources.words[:_SPELLED_WORDS]
    words = tuple(word for word in frequent if 3 <= len(word) <= 9 and word.isalpha())
    return World(
        load_tables(), load_glosses(definitions, wordnet), texts(sources, seed + 1),
        random.Random(seed), words,
    )  # fmt: skip


if __name__ == "__main__":
    run_stages(app)
