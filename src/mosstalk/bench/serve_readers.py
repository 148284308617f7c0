"""Readers: clients that have texts read aloud beside the crowds of ``mosstalk bench serve``.

Each asks ``POST /v1/audio/speech`` for one text after the other, in threads of a process of their
own. Nothing here imports torch or the server.
"""

import json
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from http.client import HTTPException
from itertools import cycle, islice
from multiprocessing.connection import Connection
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from mosstalk.bench.serve_clients import RATE

PATH = "/v1/audio/speech"
_WAIT_S = 60.0
_AGAIN_S = 1.0
_BYTES = 4096
_VOICE = "alloy"
"""One of OpenAI's: a mosstalk server that has none of the name reads with its own default voice."""


@dataclass(frozen=True)
class ReaderPlan:
    """What is read: ``texts`` in turn, ``count`` at a time, by the server at ``url`` (http)."""

    url: str
    headers: dict[str, str]
    texts: Sequence[str]
    count: int


@dataclass
class ReadAloud:
    """What was read until the end, when the texts under way are given up.

    Attributes:
        count: how many texts at a time.
        first_ms: of each text from the request to the first piece of its sound.
        audio_s: length of all sound.
        failures: why texts were not read.
    """

    count: int
    first_ms: list[float] = field(default_factory=list)
    audio_s: float = 0.0
    failures: list[str] = field(default_factory=list)


class Reader(threading.Thread):
    """Has one text after the other read; ``begun`` once the first sounds, or is refused."""

    def __init__(self, plan: ReaderPlan, number: int, over: threading.Event) -> None:
        super().__init__(daemon=True)
        self.begun = threading.Event()
        self.read = ReadAloud(1)
        self._plan, self._number, self._over = plan, number, over

    def run(self) -> None:
        """Have texts read until all is over; a while after each that was not."""
        for text in islice(cycle(self._plan.texts), self._number, None):
            why = ""
            try:
                self._read(text)
            except HTTPError as error:
                why = str(error.code)
            except (OSError, HTTPException) as error:  # the latter: it broke off while it answered
                why = type(error).__name__
            if why:
                self.read.failures.append(why)
                self.begun.set()
            if self._over.wait(_AGAIN_S if why else 0.0):
                return

    def _read(self, text: str) -> None:
        """Have a text read, or no more than its beginning if all is over meanwhile."""
        body = {"model": "mosstalk", "input": text, "voice": _VOICE, "response_format": "pcm"}
        headers = {**self._plan.headers, "Content-Type": "application/json"}
        asked_s = time.monotonic()
        request = Request(self._plan.url, json.dumps(body).encode(), headers)
        with urlopen(request, timeout=_WAIT_S) as answer:
            sound = answer.read1(_BYTES)
            self.read.first_ms.append(1000 * (time.monotonic() - asked_s))
            self.begun.set()
            while sound and not self._over.is_set():
                self.read.audio_s += len(sound) / 2 / RATE
                sound = answer.read1(_BYTES)


def run(plan: ReaderPlan, end: Connection) -> None:
    """The process: say when all are at it, wait to be told to stop, and send ``ReadAloud``."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started this ends it
    over = threading.Event()
    readers = [Reader(plan, number, over) for number in range(plan.count)]
    for each in readers:
        each.start()
    for each in readers:
        each.begun.wait()
    end.send(None)
    end.recv()
    over.set()
    for each in readers:
        each.join()
    found = [each.read for each in readers]
    end.send(
        ReadAloud(
            plan.count,
            [ms for each in found for ms in each.first_ms],
            sum(each.audio_s for each in found),
            [why for each in found for why in each.failures],
        )
    )
