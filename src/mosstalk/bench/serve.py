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
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import numpy as np

from mosstalk.bench import serve_readers
from mosstalk.bench.serve_clients import COMPLETED, RATE, ClientPlan, Pattern, Pcm, Turn, run
from mosstalk.bench.serve_readers import ReadAloud, ReaderPlan
from mosstalk.errors import BenchError
from mosstalk.progress import Progress

QUANTILES = (50, 95, 99)
MEASURED = ("commit_to_audio_ms", "decision_to_audio_ms", "written_ms", "words",
            "first_delta_ms", "gaps_ms", "underruns_ms", "audio_ms", "real_time_factor",
            "input_tokens")  # fmt: skip
"""What of a turn quantiles are taken of."""
_CLIENTS_A_PROCESS = 32
_HEAD_START_S = 0.5
_END_S = 60.0
_LOOK_S = 0.1
_QUIETLY = ("--port", "0", "--log-level", "warning")
_MIB = 1 << 20
_PATH = "/v1/realtime"
_KINDS = ("busy_seconds", "busy_cpu_seconds", "card_seconds", "busy_runs", "busy_items",
          "busy_waited_seconds")  # fmt: skip
_SPENT = re.compile(rf'mosstalk_({"|".join(_KINDS)})_total\{{part="(\w+)"\}}')
_FRAME_S = 0.02
_QUIET_DB = 35.0
_PAUSE_FRAMES, _MOST_PAUSE_FRAMES = 8, 10


@dataclass(frozen=True)
class Bounds:
    """What a crowd must keep within to count as served.

    Attributes:
        first_audio_ms: 95th percentile from the commit, hands-free from the server's decision,
            to first audio.
        underrun_share: turns in which the sound broke off at least once, of all turns.
    """

    first_audio_ms: float = 400.0
    underrun_share: float = 0.001


@dataclass(frozen=True)
class Load:
    """Which crowds talk, and how.

    With ``read_at_once`` each is measured twice: alone, and while the server reads so many of
    ``texts`` at a time aloud.
    """

    crowds: tuple[int, ...]
    pattern: Pattern
    turns: int
    seed: int
    bounds: Bounds = field(default_factory=Bounds)
    read_at_once: int = 0
    texts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Target:
    """A server: its WebSocket, what handshakes carry, and its metrics if it gives any."""

    url: str
    headers: Mapping[str, str]

    def address(self, path: str) -> str:
        """Of something else on this server, by HTTP."""
        where = urlsplit(self.url)
        scheme = {"ws": "http", "wss": "https"}[where.scheme]
        return f"{scheme}://{where.netloc}{path}"

    def metrics(self) -> dict[str, float]:
        """Prometheus' values by name with labels; empty from a server that gives none."""
        found = {}
        for line in (self._get("/metrics") or "").splitlines():
            name, _, value = line.rpartition(" ")
            with suppress(ValueError):  # a comment, or a page of something else
                found[name] = float(value)
        return found

    def await_empty(self) -> None:
        """Wait until the sessions of a crowd before are over, on a server that tells."""
        end_s = time.monotonic() + _END_S
        while self.metrics().get("mosstalk_sessions") and time.monotonic() < end_s:
            time.sleep(_LOOK_S)

    def facts(self) -> dict[str, str]:
        """Model, kind of weights and device, as a mosstalk server tells them; else its URL."""
        try:
            worker = json.loads(self._get("/ready") or "")["worker"]
            names = ("model", "device", "dtype")
            facts = {name: worker[name] for name in names} | {"weights": worker["weights_kind"]}
            if facts["device"] != "cpu":
                facts["device"] = worker.get("device_name") or facts["device"]
            return facts
        except (ValueError, KeyError, TypeError):
            return {"device": f"whatever serves {self.url}", "weights": "unknown"}

    def _get(self, path: str) -> str | None:
        request = Request(self.address(path), headers=dict(self.headers))
        try:
            with urlopen(request, timeout=10) as answer:
                text: str = answer.read().decode()
        except (OSError, UnicodeDecodeError):
            return None
        return text


@dataclass(frozen=True)
class Meanwhile:
    """What a server's metrics say of a time.

    Attributes:
        parts: by part of the worker, how long it was at work and how long its thread's processor
            was, as shares of the time; empty from a server that does not tell.
        card: by part, how long a GPU worked for it by its own clock, as a share of the time; parts
            that need none, and servers without one or that do not tell, are left out.
        runs: by part that made any, its runs a second, how many items a run held, and for how many
            milliseconds its most urgent one had waited; empty from a server that does not tell.
        front: of the process with the sockets, processor time as a share, and in milliseconds for
            each message that it read or wrote; memory of both processes at the end in MiB; and how
            many replies were begun before their turn had ended, by whether they were used.
    """

    parts: dict[str, tuple[float, float]] = field(default_factory=dict)
    front: dict[str, float] = field(default_factory=dict)
    card: dict[str, float] = field(default_factory=dict)
    runs: dict[str, tuple[float, float, float]] = field(default_factory=dict)

    @classmethod
    def between(
        cls, before: Mapping[str, float], after: Mapping[str, float], seconds: float
    ) -> "Meanwhile":
        """Of what ``Target.metrics`` said at the beginning and ``seconds`` later."""
        gone = {name: value - before.get(name, 0.0) for name, value in after.items()}
        told: dict[str, dict[str, float]] = {kind: {} for kind in _KINDS}
        for name, value in gone.items():
            if match := _SPENT.fullmatch(name):
                told[match[1]][match[2]] = value / seconds
        busy, cpu, card, runs, items, waited = told.values()
        parts = {part: (share, cpu.get(part, 0.0)) for part, share in busy.items()}
        card = {part: share for part, share in card.items() if share}
        batches = {
            part: (rate, items.get(part, 0.0) / rate, 1000 * waited.get(part, 0.0) / rate)
            for part, rate in runs.items()
            if rate
        }
        front = {}
        if "process_cpu_seconds_total" in after:
            front["front"] = gone["process_cpu_seconds_total"] / seconds
        counted = (f'mosstalk_messages_total{{direction="{way}"}}' for way in ("in", "out"))
        messages = sum(gone.get(name, 0.0) for name in counted)
        if messages:
            front["front, ms a message"] = 1000 * front.get("front", 0.0) * seconds / messages
        for label, name in (
            ("front, MiB", "process_resident_memory_bytes"),
            ("worker, MiB", "mosstalk_worker_memory_bytes"),
        ):
            if name in after:
                front[label] = after[name] / _MIB
        for outcome in ("used", "dropped"):
            name = f'mosstalk_replies_begun_early{{outcome="{outcome}"}}'
            if name in after:
                front[f"begun early, {outcome}"] = gone[name]
        return cls(parts, front, card, batches)


@dataclass(frozen=True)
class Crowd:
    """What one crowd met.

    Attributes:
        clients: how many talked.
        refusals: why the server did not let some in; nothing was measured unless all were.
        turns: every turn.
        lags_ms: quantiles of how much too late clients themselves sent a frame.
        server: what the server says of itself over that time.
        read: what it read aloud meanwhile; None for a crowd that it served alone.
    """

    clients: int
    refusals: list[str]
    turns: list[Turn]
    lags_ms: list[float] | None
    server: Meanwhile
    read: ReadAloud | None = None

    @property
    def name(self) -> str:
        """How many talked, and how many texts were read meanwhile."""
        return f"{self.clients} + {self.read.count} texts" if self.read else str(self.clients)

    def quantiles(self, name: str) -> list[float] | None:
        """Median, 95th and 99th percentile of one of ``MEASURED``; None without any."""
        return quantiles(np.hstack([getattr(turn, name) or [] for turn in self.turns] or [[]]))

    @property
    def first_audio_ms(self) -> list[float] | None:
        """What the bound is of: quantiles from the commit, or the decision, to first audio."""
        decided = self.quantiles("decision_to_audio_ms")
        return decided or self.quantiles("commit_to_audio_ms")

    @property
    def admitted(self) -> int:
        """How many the server let in."""
        return self.clients - len(self.refusals)

    @property
    def failures(self) -> list[str]:
        """What went wrong in turns whose response did not complete with sound."""
        return [turn.status for turn in self.turns if turn.status != COMPLETED]

    @property
    def broken(self) -> int:
        """Turns in which the sound broke off at least once."""
        return sum(bool(turn.underruns_ms) for turn in self.turns)

    def breaches(self, bounds: Bounds) -> list[str]:
        """Which bounds this crowd broke, in words."""
        if self.refusals:
            return [
                f"{len(self.refusals)} of {self.clients} not let in ({_counted(self.refusals)})"
            ]
        found, failures, turns = [], self.failures, len(self.turns)
        if self.read and (unread := self.read.failures):
            found.append(f"{len(unread)} texts were not read ({_counted(unread)})")
        if failures:
            found.append(f"{len(failures)} of {turns} turns failed ({_counted(failures)})")
        first = self.first_audio_ms
        if first and first[1] > bounds.first_audio_ms:
            found.append(f"p95 to first audio {first[1]:.0f} ms > {bounds.first_audio_ms:g}")
        if self.broken > bounds.underrun_share * turns:
            found.append(f"underruns in {self.broken} of {turns} turns")
        return found

    def as_values(self, bounds: Bounds) -> dict[str, Any]:
        """For documents, where no figure has more than six digits: times vary by far more."""
        values = asdict(self) | {
            "admitted": self.admitted,
            "quantiles": {"of": QUANTILES} | {name: self.quantiles(name) for name in MEASURED},
            "failed": len(self.failures),
            "broken": self.broken,
            "breaches": self.breaches(bounds),
        }
        return {name: _six_digits(value) for name, value in values.items()}


def quantiles(values: "np.typing.NDArray[np.float64]") -> list[float] | None:
    """Median, 95th and 99th percentile; None without any."""
    return np.percentile(values, QUANTILES).tolist() if len(values) else None


def _six_digits(value: Any) -> Any:
    """Lists and dicts of json with every float rounded to six digits that count."""
    if isinstance(value, dict):
        return {name: _six_digits(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_six_digits(each) for each in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _counted(words: Sequence[str]) -> str:
    return ", ".join(f"{n} x {word}" for word, n in Counter(words).items())


def measure(target: Target, load: Load, speech: Pcm, tell: Progress) -> list[Crowd]:
    """Let each crowd talk in turn, in processes of their own.

    Each client's turn is the ``heard_s`` seconds before the end of a sentence in ``speech``, (n,)
    int16 at 24 kHz. Crowds come in the order of ``load``; with texts each twice.

    Raises:
        BenchError: there is too little speech, or a process of clients failed.
    """
    speech, ends = sentences(speech)
    ends = [end for end in ends if end >= load.pattern.heard_s * RATE]
    if not ends:
        raise BenchError(f"the speech is shorter than a turn of {load.pattern.heard_s:g} s")
    found = []
    beside: list[ReaderPlan | None] = [None]
    if load.read_at_once:
        url, headers = target.address(serve_readers.PATH), dict(target.headers)
        beside.append(ReaderPlan(url, headers, load.texts, load.read_at_once))
    asked = [(clients, reading) for clients in load.crowds for reading in beside]
    for number, (clients, reading) in enumerate(asked):
        texts = f" beside {reading.count} texts" if reading else ""
        tell(f"{clients} conversations{texts}", number, len(asked))
        target.await_empty()
        plans = list(_plans(target, load, clients, speech, ends))
        found.append(_crowd(target, clients, plans, reading))
    return found


def _plans(
    target: Target, load: Load, clients: int, speech: Pcm, ends: list[int]
) -> Iterator[ClientPlan]:
    """One plan for each process; phases are uniform over a turn, drawn from the seed."""
    random = np.random.default_rng((load.seed, clients))
    phases = list(enumerate(random.uniform(0, load.pattern.turn_s, clients).tolist()))
    for first in range(0, clients, _CLIENTS_A_PROCESS):
        mine = dict(phases[first : first + _CLIENTS_A_PROCESS])
        given = dict(target.headers), load.pattern, mine, load.turns
        yield ClientPlan(target.url, *given, speech, ends, load.seed)


def _crowd(
    target: Target, clients: int, plans: list[ClientPlan], reading: ReaderPlan | None
) -> Crowd:
    with ExitStack() as stack:
        links = [stack.enter_context(_process(run, plan)) for plan in plans]
        refusals = [why for link in links for why in _received(link)]
        reader = read = None
        if reading and not refusals:
            reader = stack.enter_context(_process(serve_readers.run, reading))
            _received(reader)
        before = target.metrics()
        begin_s = None if refusals else time.monotonic() + _HEAD_START_S
        for link in links:
            link.send(begin_s)
        talked = [_received(link) for link in links]
        seconds = time.monotonic() - (begin_s or 0.0)
        after = {} if refusals else target.metrics()
        if reader:
            reader.send(None)
            read = _received(reader)
    return Crowd(
        clients,
        refusals,
        [turn for turns, _ in talked for turn in turns],
        quantiles(np.concatenate([lags for _, lags in talked])),
        Meanwhile.between(before, after, seconds),
        read,
    )


@contextmanager
def _process(work: Callable[[Any, Connection], None], plan: Any) -> Iterator[Connection]:
    """A process that does ``work`` by a plan: clients, or readers."""
    spawn = get_context("spawn")
    link, end = spawn.Pipe()
    process = spawn.Process(target=work, args=(plan, end), daemon=True)
    process.start()
    end.close()
    try:
        yield link
    finally:
        process.kill()
        process.join()


def _received(link: Connection) -> Any:
    try:
        return link.recv()
    except EOFError:
        raise BenchError("a process of clients ended; what it printed stands above") from None


def sentences(speech: Pcm) -> tuple[Pcm, list[int]]:
    """Speech (n,) int16 at 24 kHz with no pause over 200 ms, and where sentences end in it.

    A pause, after which a sentence has ended, is 160 ms or more that are 35 dB below the loudest
    20 ms. Longer ones would let a server that looks for the end of turns find one within a turn.
    """
    size = int(_FRAME_S * RATE)
    frames = speech[: len(speech) // size * size].reshape(-1, size)
    level = np.sqrt(np.square(frames, dtype=np.float64).mean(axis=1))
    loud = np.flatnonzero(level > level.max(initial=0.0) * 10 ** (-_QUIET_DB / 20))
    if not len(loud):
        return speech[:0], []
    last = loud[np.append(np.diff(loud) > _PAUSE_FRAMES, True)]
    since = (
        np.arange(len(frames)) - loud[np.searchsorted(loud, np.arange(len(frames)), "right") - 1]
    )
    kept = (since >= 0) & (since <= _MOST_PAUSE_FRAMES)
    return frames[kept].ravel(), (np.cumsum(kept)[last] * size).tolist()


@contextmanager
def served(words: Sequence[str], say: Callable[[str], None]) -> Iterator[str]:
    """A ``mosstalk serve`` with these options, on a free port, once it is ready: its WebSocket.

    Raises:
        BenchError: it ended before it was ready.
    """
    command = [sys.executable, "-m", "mosstalk.cli", "serve", *_QUIETLY, *words]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        url = ""
        assert server.stdout
        for line in server.stdout:
            say(line.rstrip())
            if match := re.match(r"listening on (\S+);", line):
                url = match[1].replace("http", "ws", 1) + _PATH
            if line.startswith("ready: "):
                break
        else:
            raise BenchError(f"mosstalk serve ended with code {server.wait()} before it was ready")
        threading.Thread(target=server.stdout.read, daemon=True).start()  # nothing may fill up
        yield url
    finally:
        server.terminate()
        try:
            server.wait(_END_S)
        except subprocess.TimeoutExpired:
            server.kill()
