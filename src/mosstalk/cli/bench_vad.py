"""``mosstalk bench vad``: what detectors of speech find, how soon, at what cost."""

from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from mosstalk.cli.command import WritesDocument


@dataclass(frozen=True, eq=False, repr=False)
class BenchVad(WritesDocument):
    """Measure the detectors of speech: what they find, how soon, at what cost.

    mosstalk bench vad --clips 20 --calls 10

    Speech in noise, sounds without speech, the cost of a frame; and in
    simulated rooms, how often the assistant's own echo interrupts it and how
    soon a user who talks over it is heard. No checkpoint is needed.

    Needs the extra "vad". Recordings and voices that are not at hand are
    named and left out.
    """

    detectors: Annotated[
        list[str] | None,
        typer.Option(
            "--detector",
            metavar="silero|webrtc",
            help="Measure this detector alone. May be repeated. Default: all that are installed.",
        ),
    ] = None
    clips: Annotated[
        int, typer.Option(help="Take N clips of each speaker.", metavar="N", min=1)
    ] = 12
    calls: Annotated[
        int,
        typer.Option(
            help="Simulate N calls of each setting; 0 leaves them out.", metavar="N", min=0
        ),
    ] = 6

    def run(self) -> None:
        """Measure detectors; print tables, and write the document.

        Raises:
            DetectorError: a detector that was asked for, or every one, is not installed.
        """
        from mosstalk.bench.vad_results import FORMAT, measure_detectors
        from mosstalk.cli.measured_output import print_found
        from mosstalk.progress import progress_bar

        with self.printing():
            with progress_bar() as tell:
                results = measure_detectors(self.detectors or (), self.clips, self.calls, tell)
            print_found(results.settings, results.tables(), results.skipped, width=12)
        self.deliver({"format": FORMAT, **asdict(results)})
