"""The code's own rules, as far as a test can see them."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

SOURCES = sorted((ROOT / "src").rglob("*.py"))
BESIDE = [path for folder in ("evals", "recipes") for path in (ROOT / folder).rglob("*.py")]
EVERYWHERE = [*SOURCES, *sorted(BESIDE)]
TALLEST_FUNCTION_LINES = 60
TALLEST_KERNEL_LINES = 120
LONGEST_FILE_LINES, LONGEST_FILE_OF_OPS_LINES = 450, 700
HEAVY = {"torch", "numpy", "safetensors", "tokenizers", "soundfile", "soxr", "rich.console"}


def functions(tree: ast.AST) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [node for node in ast.walk(tree) if isinstance(node, kinds)]


@pytest.mark.parametrize("path", EVERYWHERE, ids=lambda path: path.name)
def test_files_and_functions_stay_small(path: Path) -> None:
    text = path.read_text()
    most = LONGEST_FILE_OF_OPS_LINES if path.parent.name == "ops" else LONGEST_FILE_LINES
    assert text.count("\n") <= most
    for node in functions(ast.parse(text)):
        is_kernel = any("triton.jit" in ast.unparse(mark) for mark in node.decorator_list)
        limit = TALLEST_KERNEL_LINES if is_kernel else TALLEST_FUNCTION_LINES
        lines = _height(node)
        if any(ast.unparse(mark).startswith("op(") for mark in node.decorator_list):
            # It is signature, documentation, checks and launch of an op, written once.
            lines -= _height(node.body[0])
        assert lines <= limit, f"{node.name} is {lines} lines"


def _height(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


@pytest.mark.parametrize("path", EVERYWHERE, ids=lambda path: path.name)
def test_public_things_have_docstrings(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), f"{path} has no docstring"
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    owners: list[ast.Module | ast.ClassDef] = [tree]
    owners += [node for node in tree.body if isinstance(node, ast.ClassDef)]
    for owner in owners:
        private_class = isinstance(owner, ast.ClassDef) and owner.name.startswith("_")
        for node in owner.body:
            if isinstance(node, kinds) and not node.name.startswith("_") and not private_class:
                assert ast.get_docstring(node), f"{path.name}: {node.name} has no docstring"


def test_the_environment_is_read_in_one_file() -> None:
    reading = re.compile(r"os\.environ|getenv")
    readers = [path.name for path in EVERYWHERE if reading.search(path.read_text())]
    assert readers == ["environment.py"]


def test_nothing_below_the_session_knows_about_sockets() -> None:
    for folder in ("audio", "models", "codec", "verify", "synthesis"):
        for path in (ROOT / "src" / "mosstalk" / folder).rglob("*.py"):
            assert not re.search(r"import (socket|websockets|fastapi)", path.read_text()), path


@pytest.mark.parametrize(
    "module", ["audio.sound", "engine.scheduler", "engine.request", "session.commands"]
)
def test_what_plans_and_describes_does_without_torch(module: str) -> None:
    probe = f"import sys, mosstalk.{module}; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


def test_the_command_line_imports_nothing_heavy() -> None:
    probe = f"import sys, mosstalk.cli; print(sorted({HEAVY!r} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
