"""``mosstalk bench start``: what is printed."""

from pathlib import Path

from mosstalk.bench.machine import machine_facts
from mosstalk.bench.starts import measure_starts
from mosstalk.build.folder import BuiltEngine
from mosstalk.device import pick_device
from mosstalk.documents import STANDARD_OUTPUT, deliver, human_text_on_stderr, require_target
from mosstalk.progress import progress_bar

FORMAT = "mosstalk-starts-1"


def run_starts(folder: Path, device: str, runs: int, json: str | None) -> None:
    """Measure, print a table, write the document.

    Raises:
        CheckpointError: the folder is none that ``mosstalk build`` made.
        BenchError: a start failed.
    """
    if json and json != STANDARD_OUTPUT:
        require_target(Path(json))
    engine = BuiltEngine.read(folder)
    settings = machine_facts(pick_device(device), str(engine.values["weights"]))
    settings |= {"precision": str(engine.values["precision"])}
    with human_text_on_stderr(json == STANDARD_OUTPUT):
        with progress_bar() as tell:
            found = measure_starts(engine, device, runs, tell)
        for name, value in settings.items():
            print(f"{name:<10} {value}")
        print(f"\n{found.table().as_text()}")
    document = {
        "format": FORMAT,
        "settings": settings,
        "weights": settings["weights"],
        "weight_bytes": found.weight_bytes,
        "disk": vars(found.disk) | {"gb_s": found.disk.gb_s},
        "starts": [start.as_values() for start in found.starts],
    }
    deliver(document, json)
