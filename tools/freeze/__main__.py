"""``python -m tools.freeze``: record, check, compare, and the tests that came and went.

    python -m tools.freeze compare               with the commit that differences.toml names
    python -m tools.freeze compare COMMIT --only 'wire/*' --keep /tmp/frozen
    python -m tools.freeze record OUT            what this checkout does
    python -m tools.freeze check OUT             this checkout beside what was recorded in OUT
    python -m tools.freeze tests COMMIT          node ids that are gone, new and moved

Exit code 1: something differs that is not in differences.toml, or could not be recorded.
"""

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from .commands import document_jobs, helps, making_jobs, speech_jobs, write_inputs
from .compare import compare, frozen_commit, read_known, report
from .conversations import recorded_job, replay_jobs, server_jobs
from .jobs import Job, Recorder
from .node_ids import print_tests
from .results import Results
from .subject import ROOT, Subject
from .vocoder import write_vocoder


def record(checkout: Path, out: Path, only: str, made_by: Path | None = None) -> int:
    """Record what a checkout does; with ``made_by`` it reads what another has made.

    Returns how many jobs failed.
    """
    begun_s = time.monotonic()
    subject = Subject(checkout, out / "work")
    subject.prepare((made_by / "work" / "fresh").resolve() if made_by else None)
    write_inputs(subject.work)
    write_vocoder(subject.work / "bigvgan")
    recorder = Recorder(subject, Results(out), only)
    about = {"machine": platform.platform(), "python": sys.version, "torch": torch.__version__}
    (out / "about.json").write_text(json.dumps(about))
    recorder.run([recorded_job(), *making_jobs(), Job("help", helps)])
    # All these read what was made.
    jobs = [*server_jobs(), *speech_jobs(), *document_jobs()]
    if (subject.made / "recordings").exists():
        jobs += replay_jobs(recorder)
    recorder.run(jobs)
    subject.close()
    print(f"recorded in {time.monotonic() - begun_s:.0f} s, {len(recorder.failed)} failed: {out}")
    return len(recorder.failed)


def check(old: Path, only: str) -> int:
    """Record this checkout and compare; the exit code."""
    with tempfile.TemporaryDirectory(prefix="freeze-") as folder:
        return _compared(old, Path(folder) / "new", only)


def compare_commits(commit: str, only: str, keep: Path | None) -> int:
    """Record an old commit, unless it is kept already, and this checkout; the exit code."""
    digest = _git("rev-parse", "--short=12", f"{commit}^{{commit}}")
    with tempfile.TemporaryDirectory(prefix="freeze-") as folder:
        old = (keep or Path(folder)) / f"{digest}-{_file_safe(only)}"
        if (old / "done").exists():
            print(f"{digest} was recorded in {old}")
        else:
            print(f"recording {digest}")
            with _checkout(digest, Path(folder) / "checkout") as checkout:
                if record(checkout, old, only):
                    return 1
            (old / "done").touch()
        return _compared(old, Path(folder) / "new", only)


def _compared(old: Path, new: Path, only: str) -> int:
    print("recording this checkout")
    failed = record(ROOT, new, only, made_by=old)
    mine, its = (json.loads((folder / "about.json").read_text()) for folder in (new, old))
    if mine != its:
        print(f"not alike: {its} and now {mine}; sounds may differ for that alone")
    known = read_known()
    return int(bool(report(compare(old, new, known, only), known)) or bool(failed))


@contextmanager
def _checkout(commit: str, folder: Path) -> Iterator[Path]:
    _git("worktree", "add", "--detach", str(folder), commit)
    try:
        yield folder
    finally:
        _git("worktree", "remove", "--force", str(folder))


def _git(*words: str) -> str:
    words = ("git", "-C", str(ROOT), *words)
    run = subprocess.run(words, capture_output=True, text=True, check=False)
    if run.returncode:
        sys.exit(f"{' '.join(words)}: {run.stderr.strip()}")
    return run.stdout.strip()


def _file_safe(only: str) -> str:
    return "all" if only == "*" else "".join(c if c.isalnum() else "_" for c in only)


def main() -> int:
    parser = argparse.ArgumentParser(
        "python -m tools.freeze", None, __doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    verbs = parser.add_subparsers(dest="verb", required=True)
    only = argparse.ArgumentParser(add_help=False)
    only.add_argument(
        "--only", default="*", help="jobs by name, e.g. help, 'speak/*', 'wire/pocket'"
    )
    for name in ("record", "check"):
        verbs.add_parser(name, parents=[only]).add_argument("out", type=Path)
    commits = verbs.add_parser("compare", parents=[only])
    commits.add_argument("commit", nargs="?", default=frozen_commit())
    commits.add_argument("--keep", type=Path, help="folder to keep what the old commit did")
    verbs.add_parser("tests").add_argument("commit", nargs="?", default=frozen_commit())
    args = parser.parse_args()
    if args.verb == "record":
        return int(bool(record(ROOT, args.out.resolve(), args.only)))
    if args.verb == "check":
        return check(args.out.resolve(), args.only)
    if args.verb == "compare":
        return compare_commits(args.commit, args.only, args.keep and args.keep.resolve())
    with (
        tempfile.TemporaryDirectory(prefix="freeze-") as folder,
        _checkout(args.commit, Path(folder) / "checkout") as checkout,
    ):
        return print_tests(checkout, ROOT)


if __name__ == "__main__":
    sys.exit(main())
