"""``mosstalk engine inspect``: what is printed."""

from pathlib import Path
from typing import Any

from mosstalk.build.report import Report, report_of
from mosstalk.files import as_text
from mosstalk.prepared.folder import BuiltEngine
from mosstalk.prepared.tiles import describe
from mosstalk.progress import progress_bar

_GIB = 2**30


def run_inspect(folder: Path, *, hashes: bool, as_json: bool) -> int:
    """Print what a built folder is; return 1 when something is wrong with it.

    Raises:
        CheckpointError: it is none, or of another version.
    """
    with progress_bar() as tell:
        report = report_of(BuiltEngine.read(folder), hashes=hashes, tell=tell)
    if as_json:
        print(as_text(_document(report)), end="")
    else:
        for name, value in _lines(report):
            print(f"  {name:<18} {value}" if name else value)
    return 1 if report.problems else 0


def _document(report: Report) -> dict[str, Any]:
    values = {name: value for name, value in report.engine.values.items() if name != "files"}
    return values | {
        "folder": str(report.engine.folder),
        "kernels_now": vars(report.kernels),
        "foreign": report.foreign,
        "problems": report.problems,
    }


def _lines(report: Report) -> list[tuple[str, str]]:
    values = report.engine.values
    sizes, machine, settings = values["architecture"], values["machine"], values["settings"]
    layers = (
        f"{sizes['shared_layers']} shared + {sizes['text_layers']} text + "
        f"{sizes['audio_layers']} audio = {sizes['kv_layers']} KV layers"
    )
    heads = f"{sizes['query_heads']} of queries, {sizes['kv_heads']} of keys and values"
    on = machine["card"] or machine["device"]
    versions = f"torch {machine['torch']}, triton {machine['triton'] or '-'}"
    driver = f", driver {machine['driver']}" if machine["driver"] else ""
    lines = [
        ("", f"{report.engine.folder}: {values['precision']}, {values['weights']} weights"),
        ("layers", layers),
        (
            "sizes",
            f"hidden {sizes['hidden_size']}, MLP {sizes['intermediate_size']}, heads {heads}",
        ),
        ("ids", f"{sizes['text_ids']} text, {sizes['audio_ids']} audio"),
        *((f"{name}", dtype) for name, dtype in values["dtypes"].items()),
        *values["engine"].items(),
        ("built for", f"{settings['max_sessions']} sessions, {settings['max_rows']} rows each"),
        ("text embeddings", f"in the {settings.get('embeddings', 'device')}'s memory"),
        ("plan", _plan_line(values["plan"])),
        ("verified on", f"{on}, {values['checked_in']}, {values['built']}, {versions}{driver}"),
        *((f"  {check['name']}", _check_line(check)) for check in values["checks"]),
        ("kernels", f"{report.kernels.count}, {report.kernels.bytes / 2**20:.1f} MiB"),
        ("tiles", describe(values.get("tiles"))),
    ]
    lines += [("foreign", f"{line}; what is compiled anew is kept") for line in report.foreign]
    lines += [("PROBLEM", line) for line in report.problems]
    return [
        *lines,
        ("", "  sound" if not report.problems else f"  {len(report.problems)} problems"),
    ]


def _plan_line(plan: dict[str, Any]) -> str:
    fits = "" if plan["rows"] is None else f", {plan['rows']:,} rows fit on that card"
    return f"{plan['needed_bytes'] / _GIB:.2f} GiB on a GPU{fits}"


def _check_line(check: dict[str, Any]) -> str:
    verdict = "" if check["passed"] else " FAILED"
    return f"{check['error']:.2e}, at most {check['bound']:.2e} {check['note']}{verdict}"
