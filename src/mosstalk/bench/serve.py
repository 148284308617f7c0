"""How many conversations a server bears: crowds of clients, each larger than the last.

A crowd counts only if all of it was let in. Turns of its clients begin spread evenly over one
turn's length, so that a crowd asks as strangers do and not in step.
"""

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import numpy as np

from mosstalk.bench.serve_clients import RATE, ClientPlan, Pattern, Pcm
from mosstalk.errors import BenchError
from mosstalk.tensors import Progress

QUANTILES = (50, 95, 99)
_CLIENTS_A_PROCESS = 32
_HEAD_START_S = 1.0
_END_S = 60.0
_LOOK_S = 0.1
_QUIETLY = ("--port", "0", "--log-level", "warning")
_MIB = 1 << 20
_PATH = "/v1/realtime"
_FRAME_S = 0.02
_QUIET_DB = 35.0
_PAUSE_FRAMES = 8


@dataclass(frozen=True)
class Bounds:
    """What a crowd must keep within to count as served.

    Attributes:
        first_audio_ms: 95th percentile from the commit (hands-free: from the last word) to the
            first sound.
        underrun_share: turns in which the sound broke off at least once, of all turns.
    """

    first_audio_ms: float = 400.0
    underrun_share: float = 0.001


@dataclass(frozen=True)
class Load:
    """Which crowds talk, and how."""

    crowds: tuple[int, ...]
    pattern: Pattern
    turns: int
    seed: int
    bounds: Bounds = field(default_factory=Bounds)


@dataclass(frozen=True)
class Target:
    """A server: its WebSocket, what handshakes carry, and its metrics if it gives any."""

    url: str
    headers: Mapping[str, str]

    def metrics(self) -> dict[str, float]:
        """Prometheus' values by name with labels; empty from a server that gives none."""
        lines = (self._get("/metrics") or "").splitlines()
        pairs = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, _, value in pairs}

    def await_empty(self) -> None:
        """Wait until the sessions of a crowd before are over, on a server that tells."""
        end_s = time.monotonic() + _END_S
        while self.metrics().get("mosstalk_sessions") and time.monotonic() < end_s:
            time.sleep(_LOOK_S)

    def facts(self) -> dict[str, str]:
        """Model, kind of weights and device, as a mosstalk server tells them; else its URL."""
        try:
            worker = json.loads(self._get("/ready") or "")["worker"]
            kind, device = worker["weights_kind"], worker["device"]
            return {
                "model": worker["model"],
                "device": device,
                "dtype": worker["dtype"],
                "weights": kind,
            }
        except (ValueError, KeyError, TypeError):
            return {"device": f"whatever serves {self.url}", "weights": "unknown"}

    def _get(self, path: str) -> str | None:
        where = urlsplit(self.url)
        scheme = {"ws": "http", "wss": "https"}[where.scheme]
        request = Request(f"{scheme}://{where.netloc}{path}", headers=dict(self.headers))
        try:
            with urlopen(request, timeout=10) as answer:
                text: str = answer.read().decode()
        except (OSError, UnicodeDecodeError):
            return None
        return text


@dataclass(frozen=True)
class Crowd:
    """What one crowd met.

    Attributes:
        clients: how many talked.
        admitted: how many of them the server let in; nothing was measured unless all were.
        refusals: why it refused the others, with how often.
        seconds: how long the crowd talked.
        turns: every turn, as ``serve_clients.Turn`` has it.
        lags_ms: median, 99th percentile and most by which clients sent a frame too late.
        server: what the server says of itself over that time; see ``server_figures``.
    """

    clients: int
    admitted: int
    refusals: dict[str, int]
    seconds: float = 0.0
    turns: list[dict[str, Any]] = field(default_factory=list)
    lags_ms: list[float] = field(default_factory=list)
    server: dict[str, float] = field(default_factory=dict)

    def quantiles(self, name: str) -> list[float] | None:
        """Median, 95th and 99th percentile of one figure of the turns; None without any."""
        values = [turn[name] for turn in self.turns if turn[name] is not None]
        return np.percentile(values, QUANTILES).tolist() if values else None

    @property
    def failed(self) -> int:
        """Turns whose response did not complete, or never came."""
        return sum(turn["status"] != "completed" for turn in self.turns)

    @property
    def underruns_ms(self) -> list[float]:
        """Every silence within an answer."""
        return [each for turn in self.turns for each in turn["underruns_ms"]]

    @property
    def broken(self) -> int:
        """Turns in which the sound broke off at least once."""
        return sum(bool(turn["underruns_ms"]) for turn in self.turns)

    def breaches(self, bounds: Bounds) -> list[str]:
        """Which bounds this crowd broke, in words."""
        if self.admitted < self.clients:
            why = ", ".join(f"{n} x {reason}" for reason, n in self.refusals.items())
            return [f"{self.clients - self.admitted} of {self.clients} not let in ({why})"]
        found = []
        if self.failed:
            found.append(f"{self.failed} of {len(self.turns)} turns failed")
        first = self.quantiles("commit_to_audio_ms")
        if first and first[1] > bounds.first_audio_ms:
            found.append(f"p95 to first audio {first[1]:.0f} ms > {bounds.first_audio_ms:g}")
        if self.broken > bounds.underrun_share * len(self.turns):
            found.append(f"underruns in {self.broken} of {len(self.turns)} turns")
        return found

    def as_values(self, bounds: Bounds) -> dict[str, Any]:
        """For documents."""
        first, decided = map(self.quantiles, ("commit_to_audio_ms", "decision_to_audio_ms"))
        return asdict(self) | {
            "quantiles": QUANTILES,
            "commit_to_audio_ms": first,
            "decision_to_audio_ms": decided,
            "failed": self.failed,
            "broken": self.broken,
            "breaches": self.breaches(bounds),
        }


def measure(
    target: Target, load: Load, speech: Pcm, ends: Sequence[int], tell: Progress
) -> list[Crowd]:
    """Let each crowd talk in turn, in processes of their own.

    ``speech`` is (n,) int16 at 24 kHz, and ``ends`` the places in it where sentences end: each
    client's turn is the ``heard_s`` seconds before one of them.

    Raises:
        BenchError: there is too little speech, or a process of clients failed.
    """
    length = load.pattern.heard_s * RATE
    usable = [end for end in ends if end >= length]
    if not usable:
        raise BenchError(f"the speech is shorter than a turn of {load.pattern.heard_s:g} s")
    found = []
    with TemporaryDirectory() as folder:
        path = Path(folder) / "speech.npy"
        np.save(path, speech)
        for number, clients in enumerate(load.crowds):
            tell(f"{clients} conversations", number, len(load.crowds))
            found.append(_crowd(target, load, clients, str(path), usable))
    return found


def _crowd(target: Target, load: Load, clients: int, speech: str, ends: list[int]) -> Crowd:
    target.await_empty()
    plans = list(_plans(target, load, clients, speech, ends))
    groups = [_Group(plan) for plan in plans]
    try:
        opened = [group.read() for group in groups]
        admitted = sum(each["admitted"] for each in opened)
        refusals = _counted(why for each in opened for why in each["refusals"])
        if admitted < clients:
            for group in groups:
                group.write({"begin_s": None})
            return Crowd(clients, admitted, refusals)
        before = target.metrics()
        begun_s = time.monotonic() + _HEAD_START_S
        for group in groups:
            group.write({"begin_s": begun_s})
        talked = [group.read() for group in groups]
        seconds = time.monotonic() - begun_s
        after = target.metrics()
    finally:
        for group in groups:
            group.end()
    lags = [each["lags_ms"] for each in talked if each["lags_ms"]]
    return Crowd(
        clients,
        admitted,
        refusals,
        seconds,
        [turn for each in talked for turn in each["turns"]],
        np.max(lags, axis=0).tolist() if lags else [],
        server_figures(before, after, seconds),
    )


def _plans(
    target: Target, load: Load, clients: int, speech: str, ends: list[int]
) -> Iterator[ClientPlan]:
    """One plan for each process; phases are uniform over a turn, drawn from the seed."""
    random = np.random.default_rng((load.seed, clients))
    phases = random.uniform(0, load.pattern.turn_s, clients)
    for first in range(0, clients, _CLIENTS_A_PROCESS):
        numbers = list(range(first, min(first + _CLIENTS_A_PROCESS, clients)))
        yield ClientPlan(
            url=target.url,
            headers=dict(target.headers),
            pattern=load.pattern,
            clients=numbers,
            phases_s=phases[numbers].tolist(),
            turns=load.turns,
            speech=speech,
            ends=ends,
            seed=load.seed,
        )


def _counted(words: Iterator[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for word in words:
        found[word] = found.get(word, 0) + 1
    return found


class _Group:
    """A process of clients; lines of json go both ways."""

    def __init__(self, plan: ClientPlan) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "mosstalk.bench.serve_clients"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.write(asdict(plan))

    def write(self, values: dict[str, Any]) -> None:
        assert self._process.stdin
        self._process.stdin.write(json.dumps(values) + "\n")
        self._process.stdin.flush()

    def read(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise BenchError("a process of clients ended; what it printed stands above")
        found: dict[str, Any] = json.loads(line)
        return found

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


def server_figures(
    before: Mapping[str, float], after: Mapping[str, float], seconds: float
) -> dict[str, float]:
    """What the server's metrics say of a time: shares of it (1 is all of it), and memory in MiB.

    ``busy PART`` for each part that the worker counts; ``front`` is processor time of the process
    with the sockets, ``front_ms_a_message`` that over all messages it read and wrote.
    """

    def gone(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    if not after or seconds <= 0:
        return {}
    busy = re.compile(r'mosstalk_busy_seconds_total\{part="(\w+)"\}')
    parts = {match[1]: gone(name) / seconds for name in after if (match := busy.fullmatch(name))}
    found = {f"busy {part}": share for part, share in parts.items()}
    processor_s = gone("process_cpu_seconds_total")
    messages = sum(gone(f'mosstalk_messages_total{{direction="{way}"}}') for way in ("in", "out"))
    found["front"] = processor_s / seconds
    if messages:
        found["front_ms_a_message"] = 1000 * processor_s / messages
    for name, value in (
        ("front_mib", after.get("process_resident_memory_bytes")),
        ("worker_mib", after.get("mosstalk_worker_memory_bytes")),
    ):
        if value:
            found[name] = value / _MIB
    return found


def sentence_ends(speech: Pcm) -> list[int]:
    """Where pauses begin in speech (n,) int16 at 24 kHz, and where the last of it ends.

    A pause is 160 ms or more that are 35 dB below the loudest 20 ms.
    """
    size = int(_FRAME_S * RATE)
    frames = speech[: len(speech) // size * size].reshape(-1, size).astype(np.float64)
    level = np.sqrt(np.square(frames).mean(axis=1))
    loud = level > level.max(initial=0.0) * 10 ** (-_QUIET_DB / 20)
    places = np.flatnonzero(loud)
    if not len(places):
        return []
    last = np.append(np.diff(places) > _PAUSE_FRAMES, True)
    return ((places[last] + 1) * size).tolist()


@contextmanager
def served(words: Sequence[str], say: Callable[[str], None]) -> Iterator[str]:
    """A ``mosstalk serve`` with these options, on a free port, once it is ready: its WebSocket.

    Raises:
        BenchError: it ended before it was ready.
    """
    command = [sys.executable, "-m", "mosstalk.cli", "serve", *_QUIETLY, *words]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        url, ready = "", False
        assert server.stdout
        for line in server.stdout:
            say(line.rstrip())
            if match := re.match(r"listening on (\S+);", line):
                url = match[1].replace("http", "ws", 1) + _PATH
            if line.startswith("ready: "):
                ready = True
                break
        if not ready:
            raise BenchError(f"mosstalk serve ended with code {server.wait()} before it was ready")
        rest = threading.Thread(target=server.stdout.read, daemon=True)  # nothing may fill up
        rest.start()
        yield url
    finally:
        server.terminate()
        try:
            server.wait(_END_S)
        except subprocess.TimeoutExpired:
            server.kill()
