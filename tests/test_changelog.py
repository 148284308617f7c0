"""CHANGELOG.md: whatever could be typed at commit 697507c can be, or it says what became of it."""

import json
import re
from collections.abc import Iterator

import typer
from conftest import ROOT
from typer.core import TyperGroup

from mosstalk.cli import app

TEXT = (ROOT / "CHANGELOG.md").read_text()
THEN: dict[str, list[str]] = json.loads(
    (ROOT / "tests" / "recordings" / "options-697507c.json").read_text()
)
MOVED = dict(re.findall(r"^\| `mosstalk ([^`]+)` \| `mosstalk ([^`]+)` \|$", TEXT, re.MULTILINE))


def commands(group: TyperGroup, *path: str) -> Iterator[tuple[str, set[str]]]:
    """Each command with its options; those that only say where they went are none."""
    for name, command in group.commands.items():
        if isinstance(command, TyperGroup):
            yield from commands(command, *path, name)
        elif not command.hidden:
            options = (each for one in command.params for each in (*one.opts, *one.secondary_opts))
            yield " ".join((*path, name)), {each for each in options if each.startswith("-")}


def test_each_command_and_option_has_its_place_or_its_reason() -> None:
    now = dict(commands(typer.main.get_group(app)))
    gone = [name for name in THEN if name not in now]
    assert sorted(gone) == sorted(MOVED)
    for name, options in THEN.items():
        command, *needed = re.split(r" (?=--)", MOVED.get(name, name).removesuffix(" FILE"))
        assert set(needed) <= now[command]
        for option in set(options) - now[command]:
            assert f"`{name} {option}`" in TEXT, f"{name} {option}: gone, and nobody says why"
