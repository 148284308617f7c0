"""``mosstalk bench start``: from nothing to the first sound."""

from dataclasses import dataclass
from pathlib import Path

from mosstalk.cli import options as opt
from mosstalk.cli.command import WritesDocument
from mosstalk.cli.options import argument, option

FORMAT = "mosstalk-starts-1"


@dataclass(frozen=True, eq=False, repr=False)
class BenchStart(WritesDocument):
    """Measure how long a built folder takes from nothing to the first sound.

    mosstalk bench start engine

    Each start is a process of its own that does what serve does, then asks
    once. Before the first one the system is asked to forget the files, and
    how much of them it holds nevertheless is printed, with the rate at which
    the disk gave them.
    """

    folder: Path = argument("A folder that mosstalk build made.", metavar="DIR")
    runs: int = option(2, "Start N times.", metavar="N", min=1)
    device: opt.Device = "auto"

    def run(self) -> None:
        """Measure, print a table, write the document.

        Raises:
            CheckpointError: the folder is none that ``mosstalk build`` made.
            BenchError: a start failed.
        """
        from mosstalk.bench.start import measure_starts
        from mosstalk.cli.measured_output import measured_document, print_found
        from mosstalk.prepared.folder import BuiltEngine
        from mosstalk.prepared.machine import machine_facts
        from mosstalk.progress import progress_bar
        from mosstalk.runtime.device import pick_device

        with self.printing():
            engine = BuiltEngine.read(self.folder)
            settings = machine_facts(pick_device(self.device), str(engine.values["weights"]))
            settings |= {"precision": str(engine.values["precision"])}
            with progress_bar() as tell:
                found = measure_starts(engine, self.device, self.runs, tell)
            print_found(settings, [found.table()], width=10)
        self.deliver(
            measured_document(
                FORMAT,
                settings,
                weight_bytes=found.weight_bytes,
                disk=vars(found.disk) | {"gb_s": found.disk.gb_s},
                starts=found.starts,
            )
        )
