"""``mosstalk bench start``: what is printed."""

from pathlib import Path

from mosstalk.bench.machine import machine_facts
from mosstalk.bench.starts import measure_starts
from mosstalk.cli.measured_output import Outputs, measured_document, print_found
from mosstalk.prepared.folder import BuiltEngine
from mosstalk.progress import progress_bar
from mosstalk.runtime.device import pick_device

FORMAT = "mosstalk-starts-1"


def run_starts(folder: Path, device: str, runs: int, to: Outputs) -> None:
    """Measure, print a table, write the document.

    Raises:
        CheckpointError: the folder is none that ``mosstalk build`` made.
        BenchError: a start failed.
    """
    to.require()
    engine = BuiltEngine.read(folder)
    settings = machine_facts(pick_device(device), str(engine.values["weights"]))
    settings |= {"precision": str(engine.values["precision"])}
    with to.text_for_people():
        with progress_bar() as tell:
            found = measure_starts(engine, device, runs, tell)
        print_found(settings, [found.table()], width=10)
    to.write(
        measured_document(
            FORMAT,
            settings,
            weight_bytes=found.weight_bytes,
            disk=vars(found.disk) | {"gb_s": found.disk.gb_s},
            starts=[start.as_values() for start in found.starts],
        )
    )
