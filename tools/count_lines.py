"""Count lines, lines of code and docstrings of src, evals and recipes, now and at commits."""

import argparse
import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path

_FOLDERS = ("src", "evals", "recipes")


def sources(commit: str | None) -> Iterator[tuple[str, str]]:
    """Paths and texts of all Python files, of the working tree without a commit."""
    listing = ["git", "ls-files"] if commit is None else ["git", "ls-tree", "-r", "--name-only"]
    words = [*listing, *([commit] if commit else []), "--", *_FOLDERS]
    for path in _printed(words).split():
        if path.endswith(".py"):
            shown = commit and _printed(["git", "show", f"{commit}:{path}"])
            yield path, Path(path).read_text() if shown is None else shown


def _printed(words: list[str]) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


def counts(text: str) -> tuple[int, int, int, int]:
    """One file: files, lines, lines of code, lines of docstrings."""
    strings = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ]
    said = {n for node in strings for n in range(node.lineno, (node.end_lineno or 0) + 1)}
    lines = text.splitlines()
    code = sum(
        bool(line.strip()) and not line.strip().startswith("#") and number not in said
        for number, line in enumerate(lines, 1)
    )
    return 1, len(lines), code, len(said)


def package_of(path: str) -> str:
    """``src/mosstalk/engine``, ``recipes/pocket``: where a file lives."""
    return "/".join(path.split("/")[: 3 if path.startswith("src/") else 2][: path.count("/")])


def commit_of(name: str) -> str:
    """The name of a commit, once git knows it."""
    known = subprocess.run(
        ["git", "rev-parse", "-q", "--verify", f"{name}^{{commit}}"], stdout=subprocess.DEVNULL
    )
    if known.returncode:
        raise argparse.ArgumentTypeError(
            f"there is no commit {name}; git log shows those there are"
        )
    return name


def main() -> None:
    """Print one table for each commit, and one for the working tree."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "commits",
        metavar="COMMIT",
        nargs="*",
        type=commit_of,
        help="counted before what is there now",
    )
    for commit in (*parser.parse_args().commits, None):
        packages: dict[str, list[int]] = {}
        for path, text in sources(commit):
            for package in (package_of(path), "all"):
                found = packages.setdefault(package, [0] * 4)
                found[:] = [a + b for a, b in zip(found, counts(text), strict=True)]
        print(f"\n{commit or 'working tree':24} {'files':>6} {'lines':>7} {'code':>7} docstrings")
        for package in sorted(packages, key=lambda package: (package == "all", package)):
            files, lines, code, said = packages[package]
            print(f"{package:24} {files:6} {lines:7} {code:7} {said:6} ({said / lines:.1%})")


if __name__ == "__main__":
    main()
