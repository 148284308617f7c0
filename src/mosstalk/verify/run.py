"""Running golden cases and printing each tensor's error beside its bound."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mosstalk.errors import CaseError, MosstalkError
from mosstalk.verify import ComputePath
from mosstalk.verify.codec import (
    check_flow,
    check_flow_fast,
    check_hift,
    check_hift_fast,
    check_prompt_mel,
    check_speech_tokenizer,
    check_speech_tokenizer_fast,
)
from mosstalk.verify.compare import Case, Check, Comparer, read_case
from mosstalk.verify.language_model import check_language_model, check_language_model_fast

Checker = Callable[[Case, torch.device, Comparer], Iterator[Check]]
COMPONENTS: dict[str, Checker] = {
    "language_model": check_language_model,
    "speech_tokenizer": check_speech_tokenizer,
    "flow": check_flow,
    "hift": check_hift,
    "prompt_mel": check_prompt_mel,
}
FAST: dict[str, Checker] = {
    "language_model": check_language_model_fast,
    "speech_tokenizer": check_speech_tokenizer_fast,
    "flow": check_flow_fast,
    "hift": check_hift_fast,
}
"""What the fast path computes in another way; the rest is the same on either path."""

_UNFIT = (LookupError, TypeError, ValueError, AttributeError, RuntimeError, AssertionError)
"""What Python and torch raise where settings and tensors of a case do not fit each other."""


Say = Callable[[str], None]
"""Takes a line for people."""
say_at_once: Say = partial(print, flush=True)


@dataclass
class CaseResult:
    """What came of one folder; ``error`` says why it could not be read."""

    name: str
    component: str = ""
    checks: list[Check] = field(default_factory=list)
    not_compared: list[str] = field(default_factory=list)
    error: str | None = None


@dataclass(frozen=True)
class Verdict:
    """What came of all folders."""

    results: list[CaseResult]
    device: torch.device
    dtype: torch.dtype
    path: ComputePath = ComputePath.REFERENCE

    @property
    def checks(self) -> list[Check]:
        """Every comparison of every case."""
        return [check for result in self.results for check in result.checks]

    @property
    def unreadable(self) -> int:
        """How many folders could not be read."""
        return sum(result.error is not None for result in self.results)

    @property
    def exit_code(self) -> int:
        """0, 1 (something is out of bounds) or 2 (a folder could not be read)."""
        if self.unreadable:
            return 2
        return 0 if all(check.passed for check in self.checks) else 1

    def as_dict(self) -> dict[str, Any]:
        """Everything as json values; an error or bound that is not finite is null."""
        checks = self.checks
        return {
            "device": str(self.device),
            "dtype": _short(self.dtype),
            "path": str(self.path),
            "cases": [
                vars(result) | {"checks": [_as_dict(check) for check in result.checks]}
                for result in self.results
            ],
            "totals": {
                "cases": len(self.results) - self.unreadable,
                "unreadable": self.unreadable,
                "comparisons": len(checks),
                "within_bounds": sum(check.passed for check in checks),
                "out_of_bounds": sum(not check.passed for check in checks),
            },
            "exit_code": self.exit_code,
        }


def _as_dict(check: Check) -> dict[str, Any]:
    figures = {
        name: value if math.isfinite(value) else None
        for name, value in (("error", check.error), ("bound", check.bound))
    }
    return vars(check) | figures | {"passed": check.passed}


def judge_cases(
    folders: Sequence[Path],
    device: torch.device,
    dtype: torch.dtype,
    weights: Path | None = None,
    say: Say = say_at_once,
    path: ComputePath = ComputePath.REFERENCE,
) -> Verdict:
    """Run every case, saying each comparison as it is made.

    ``weights`` is a folder to read every case's weights from, in place of what it names;
    ``path`` says which way of computing is verified.

    Raises:
        CaseError: there is no folder among ``folders``.
    """
    results = []
    files = [each for each in folders if each.is_file()]
    folders = [each for each in folders if each not in files]
    for file in files:
        say(f"{file.name}: a file, not a case folder; skipped")
    if not folders:
        raise CaseError("no case folders among what was given; a case holds a case.json")
    for folder in folders:
        result = CaseResult(folder.resolve().name)
        results.append(result)
        try:
            _run_into(result, read_case(folder, weights), device, Comparer(dtype), say, path)
        except MosstalkError as error:
            result.checks, result.error = [], str(error)
            say(f"{result.name}: cannot be read: {error}")
    verdict = Verdict(results, device, dtype, path)
    say(_total(verdict))
    if verdict.unreadable:
        say(f"{verdict.unreadable} of {len(folders)} folders could not be read")
    return verdict


def run_case(
    folder: Path,
    device: torch.device,
    dtype: torch.dtype,
    path: ComputePath = ComputePath.REFERENCE,
) -> list[Check]:
    """Run one case, printing every comparison as it is made."""
    result = CaseResult(folder.resolve().name)
    _run_into(result, read_case(folder), device, Comparer(dtype), say_at_once, path)
    return result.checks


def _run_into(
    result: CaseResult,
    case: Case,
    device: torch.device,
    compare: Comparer,
    say: Say,
    path: ComputePath,
) -> None:
    result.component, folder = case.component, case.folder
    if case.component not in COMPONENTS:
        raise CaseError(
            f"{folder}/case.json: component {case.component!r} is none of {', '.join(COMPONENTS)}"
        )
    fast = path is ComputePath.FAST and case.component in FAST
    check_case = (FAST if fast else COMPONENTS)[case.component]
    through = ", by the fast path" if fast else ""
    say(f"{result.name}: {case.component} on {device}, {_short(compare.dtype)}{through}")
    try:
        for check in check_case(case, device, compare):
            say(_line(check))
            result.checks.append(check)
    except torch.OutOfMemoryError:
        raise  # it says nothing of the case
    except _UNFIT as error:
        reason = (str(error).strip().splitlines() or [""])[0][:120]
        raise CaseError(f"{folder}: malformed case ({type(error).__name__}: {reason})") from None
    if not result.checks:
        raise CaseError(f"{folder}: nothing to compare")
    result.not_compared = case.unused
    for name in case.unused:
        say(f"  {name:<44} not compared: this version does not know it")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _line(check: Check) -> str:
    verdict = "ok" if check.passed else "OUT OF BOUNDS"
    if not check.judged:
        verdict = "not judged"
    figures = f"{check.error:9.2e} of {check.bound:8.2e}" if check.bound else f"{check.error:9g}"
    return f"  {check.name:<44} {figures:<24} {verdict}{'  ' + check.note if check.note else ''}"


def _total(verdict: Verdict) -> str:
    checks, cases = verdict.checks, len(verdict.results) - verdict.unreadable
    failed = [check for check in checks if not check.passed]
    bounded = [check for check in checks if check.bound and math.isfinite(check.error)]
    worst = max(bounded, key=lambda check: check.error / check.bound, default=None)
    share = (
        f"; largest error {worst.error / worst.bound:.1%} of its bound ({worst.name})"
        if worst
        else ""
    )
    return (
        f"{cases} cases, {len(checks)} comparisons on {verdict.device} in "
        f"{_short(verdict.dtype)}: "
        f"{len(checks) - len(failed)} within bounds, {len(failed)} out{share}; "
        f"{verdict.path} path"
    )
