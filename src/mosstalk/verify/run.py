"""Running golden cases and printing each tensor's error beside its bound."""

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from mosstalk.errors import CaseError, MosstalkError
from mosstalk.verify.case import Case, read_case
from mosstalk.verify.codec import (
    check_flow,
    check_hift,
    check_prompt_mel,
    check_speech_tokenizer,
)
from mosstalk.verify.compare import Check, Comparer
from mosstalk.verify.language_model import check_language_model

COMPONENTS: dict[str, Callable[[Case, torch.device, Comparer], Iterator[Check]]] = {
    "language_model": check_language_model,
    "speech_tokenizer": check_speech_tokenizer,
    "flow": check_flow,
    "hift": check_hift,
    "prompt_mel": check_prompt_mel,
}

_UNFIT = (LookupError, TypeError, ValueError, AttributeError, RuntimeError, AssertionError)
"""What Python and torch raise where settings and tensors of a case do not fit each other."""


def run_cases(folders: Sequence[Path], device: torch.device, dtype: torch.dtype) -> int:
    """Run every case and print it; return 0, 1 (out of bounds) or 2 (a folder is unreadable)."""
    unreadable, checks = 0, list[Check]()
    files = [path for path in folders if path.is_file()]
    folders = [path for path in folders if path not in files]
    for path in files:
        print(f"{path.name}: a file, not a case folder; skipped")
    if not folders:
        raise CaseError("no case folders among what was given; a case holds a case.json")
    for folder in folders:
        try:
            found = run_case(folder, device, dtype)
        except MosstalkError as error:
            unreadable += 1
            print(f"{folder.resolve().name}: cannot be read: {error}", flush=True)
        else:
            checks += found
    _print_total(len(folders) - unreadable, checks, device, dtype)
    if unreadable:
        print(f"{unreadable} of {len(folders)} folders could not be read")
        return 2
    return 0 if all(check.passed for check in checks) else 1


def run_case(folder: Path, device: torch.device, dtype: torch.dtype) -> list[Check]:
    """Run one case, printing every comparison as it is made."""
    case = read_case(folder)
    if case.component not in COMPONENTS:
        raise CaseError(
            f"{folder}/case.json: component {case.component!r} is none of {', '.join(COMPONENTS)}"
        )
    print(f"{folder.resolve().name}: {case.component} on {device}, {_short(dtype)}", flush=True)
    checks = []
    try:
        for check in COMPONENTS[case.component](case, device, Comparer(dtype)):
            print(_line(check), flush=True)
            checks.append(check)
    except _UNFIT as error:
        reason = (str(error).strip().splitlines() or [""])[0][:120]
        raise CaseError(f"{folder}: malformed case ({type(error).__name__}: {reason})") from None
    if not checks:
        raise CaseError(f"{folder}: nothing to compare")
    for name in case.unused:
        print(f"  {name:<44} not compared: this version does not know it")
    return checks


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _line(check: Check) -> str:
    verdict = "ok" if check.passed else "OUT OF BOUNDS"
    if not check.judged:
        verdict = "not judged"
    figures = f"{check.error:9.2e} of {check.bound:8.2e}" if check.bound else f"{check.error:9g}"
    return f"  {check.name:<44} {figures:<24} {verdict}{'  ' + check.note if check.note else ''}"


def _print_total(cases: int, checks: list[Check], device: torch.device, dtype: torch.dtype) -> None:
    failed = [check for check in checks if not check.passed]
    bounded = [check for check in checks if check.bound and math.isfinite(check.error)]
    worst = max(bounded, key=lambda check: check.error / check.bound, default=None)
    share = (
        f"; largest error {worst.error / worst.bound:.1%} of its bound ({worst.name})"
        if worst
        else ""
    )
    print(
        f"{cases} cases, {len(checks)} comparisons on {device} in {_short(dtype)}: "
        f"{len(checks) - len(failed)} within bounds, {len(failed)} out{share}"
    )
