"""Observers of a session, and the server's metrics."""

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.samples import Sample

from mosstalk.conversation import Row
from mosstalk.runtime.busy import BusyPart
from mosstalk.server.ipc import Heartbeat
from mosstalk.server.realtime import server_events
from mosstalk.session import commands, events
from mosstalk.session.commands import SessionSettings

_LOG = logging.getLogger("mosstalk.server.session")
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LATENCY_S = (
    0.02, 0.04, 0.06, 0.08, 0.12, 0.16, 0.24, 0.32, 0.4, 0.6, 0.8, 1.2, 1.6, 2.4, 4.0, 8.0
)  # fmt: skip
_STEP_S = (
    0.001, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.016, 0.025, 0.04, 0.08, 0.16, 0.32, 1.0
)  # fmt: skip
_REAL_TIME = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.85, 1.0, 1.5, 2.0, 4.0)
_BUSY = {
    "busy_seconds": "Time that parts of the worker were at work",
    "busy_cpu_seconds": "Of it, processor time of the part's own thread",
    "card_seconds": "Time that a GPU worked for a part",
    "busy_runs": "Runs that parts of the worker made",
    "busy_items": "What those runs held: rows, replies, streams",
    "busy_waited_seconds": "How long the most urgent item of each run had waited for it",
}
"""As the fields of ``Busy`` lie."""
REFUSALS = (
    "key", "host", "origin", "unknown_url", "per_key", "rate_limit_exceeded", "full",
    "connections", "loading", "draining", "dead", "invalid_resume_token", "store", "settings",
)  # fmt: skip
"""Why connections are refused; a few other words are counted once they were used."""
CLOSES = (
    "client", "vanished", "resumed", "idle", "longest", "slow", "stalled", "too_big", "flood",
    "protocol", "engine", "drain", "error", "fault", "front",
)  # fmt: skip
"""Why sessions end."""
_ENDS = (("completed", "none"), ("failed", "error"))
"""How responses usually end, and how they should not, with the reason."""
_SERVER_ERROR = "server_error"
_MOST_NOTES = 50
"""Lines of a session's log that its client can cause."""


class SessionObserver:
    """Is shown everything about one session, in order; never waits and never raises.

    Metrics, recordings and captions are observers; each overrides what it looks at.
    """

    def on_command(self, command: commands.Command) -> None:
        """The client tells the session something."""

    def on_event(self, event: events.Event) -> None:
        """The session tells something."""

    def on_message(
        self, sender: str, message: str | bytes, event: server_events.Event | None = None
    ) -> None:
        """A message has gone over the wire; ``sender`` is "client" or "server".

        ``event`` is what the server's is of.
        """

    def on_close(self, reason: str, rows: list[Row] | None) -> None:
        """The session and its connection are over; ``rows`` are its, if asked for."""


class Metrics:
    """All metrics of one server. Names begin with ``mosstalk_``."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=registry)

        def counter(name: str, says: str, *labels: str) -> Counter:
            return Counter(f"mosstalk_{name}", says, labels, registry=registry)

        def gauge(name: str, says: str, *labels: str) -> Gauge:
            return Gauge(f"mosstalk_{name}", says, labels, registry=registry)

        self._add_histograms()
        self.sessions = gauge("sessions", "Sessions that are open")
        self.sessions_limit = gauge("sessions_limit", "Sessions that there may be at a time")
        self.sessions_opened = counter("sessions_opened", "Sessions that were opened")
        self.closes = counter("sessions_closed", "Sessions that have ended, by why", "reason")
        self.refusals = counter("refusals", "Connections that were refused, by why", "reason")
        self.responses = counter(
            "responses", "Responses that have ended, by how and why", "status", "reason"
        )
        self.rows = counter("rows", "Rows of ended responses, by what they hold", "kind")
        self.errors = counter("errors", "Errors that clients were told, by code", "code")
        self.audio_in = counter("audio_in_seconds", "Sound that came in")
        self.audio_out = counter("audio_out_seconds", "Sound that was made")
        self.underruns = counter("underruns", "Times that a reply's sound came later than due")
        self.underrun_time = counter("underrun_seconds", "How much later in all")
        self.messages = counter("messages", "Messages over WebSockets", "direction")
        self.unsent = gauge("unsent_audio_seconds", "Sound that waits for clients, all together")
        self.throttled = counter("throttled", "Times a client was read more slowly than it sent")
        self.recordings_cut = counter("recordings_cut", "Recordings that ended before the session")
        self.recorder_up = gauge("recorder_up", "1 while recordings can be written, 0 else")
        self.resumed = counter("conversations_resumed", "Conversations that were taken up again")
        self.store_failures = counter(
            "store_failures", "Times that the store of conversations did not answer", "operation"
        )
        self.kept = gauge("conversations_kept", "Conversations kept in the front's memory")
        self.store_up = gauge("store_up", "1 while the store of conversations answers, 0 else")
        self.busy = [counter(name, says, "part") for name, says in _BUSY.items()]
        says = "Replies begun before their turn had ended, by whether they were wanted"
        self.early = gauge("replies_begun_early", says, "outcome")
        self.replies = gauge("replies_running", "Replies that the engine is making")
        self.waiting = gauge("replies_waiting", "Replies in line for the engine")
        self.blocks = gauge("kv_blocks", "Blocks of K and V, by state", "state")
        self.worker_up = gauge("worker_up", "1 once the worker is ready, 0 else")
        self.worker_memory = gauge("worker_memory_bytes", "Resident memory of the worker")
        self.engine_silent = gauge("engine_silent_seconds", "Since when the engine owes an answer")
        self.front_processes = gauge("front_processes", "Front processes that take connections")
        self.draining = gauge("draining", "1 while nobody is let in any more")
        self._add_first_values()

    def _add_histograms(self) -> None:
        def seconds(name: str, says: str, buckets: tuple[float, ...] = _LATENCY_S) -> Histogram:
            return Histogram(f"mosstalk_{name}", says, buckets=buckets, registry=self.registry)

        self.commit_to_first_audio = seconds(
            "commit_to_first_audio_seconds", "From the end of a user's turn to the first sound"
        )
        self.speech_to_first_audio = seconds(
            "speech_to_first_audio_seconds",
            "From the last sample of speech to the first sound, the detector's wait included",
        )
        self.vad_wait = seconds("vad_wait_seconds", "Silence before a turn was said to be over")
        self.commit_to_first_text = seconds(
            "commit_to_first_text_seconds", "From the end of a user's turn to the first text"
        )
        self.real_time_factor = seconds(
            "response_real_time_factor", "Time a response took over the time it plays", _REAL_TIME
        )
        self.store_time = seconds(
            "store_seconds", "How long the store of conversations took to answer"
        )
        self.step = seconds("engine_step_seconds", "Each step of the engine", _STEP_S)

    def _add_first_values(self) -> None:
        """Let what can be asked for be there before it has happened.

        The rate of a counter that is not there at 0 misses the first time it counts.
        """
        for reason in REFUSALS:
            self.refusals.labels(reason)
        for reason in CLOSES:
            self.closes.labels(reason)
        for ends in _ENDS:
            self.responses.labels(*ends)
        self.errors.labels(_SERVER_ERROR)
        for outcome in ("used", "dropped"):
            self.early.labels(outcome)
        named = ((self.messages, ("in", "out")), (self.store_failures, ("take", "write")))
        for counter, name in ((counter, name) for counter, names in named for name in names):
            counter.labels(name)
        for state in ("used", "free"):
            self.blocks.labels(state).set(0)
        for kind in events.Usage.__dataclass_fields__:
            self.rows.labels(kind)
        for part in BusyPart:
            for total in self.busy:
                total.labels(part)

    def totals(self) -> list[Metric]:
        """What only grows: counters and histograms."""
        return [each for each in self.registry.collect() if each.type in ("counter", "histogram")]

    def text(self, more: Iterable[Metric] = ()) -> bytes:
        """Everything, as Prometheus reads it, with ``totals`` of other processes added."""
        families = {each.name: each for each in self.registry.collect()}
        for each in more:
            _add(families[each.name], each)
        return generate_latest(cast(CollectorRegistry, _Families(families.values())))

    def on_heartbeat(self, heartbeat: Heartbeat) -> None:
        """Take what the worker says of itself."""
        self.sessions.set(heartbeat.sessions)
        self.replies.set(heartbeat.replies)
        self.early.labels("used").set(heartbeat.early_used)
        self.early.labels("dropped").set(heartbeat.early_dropped)
        self.waiting.set(heartbeat.waiting)
        self.blocks.labels("used").set(heartbeat.blocks_in_use)
        self.blocks.labels("free").set(heartbeat.blocks - heartbeat.blocks_in_use)
        self.worker_memory.set(heartbeat.memory_bytes)
        self.engine_silent.set(heartbeat.engine_silent_s)
        for step_s in heartbeat.steps_s:
            self.step.observe(step_s)
        for part, busy in heartbeat.busy.items():
            for total, spent in zip(self.busy, busy, strict=True):
                total.labels(part).inc(spent)

    def on_response(self, done: events.ResponseDone) -> None:
        """Take what a response says of itself."""
        self.responses.labels(done.status, done.reason or "none").inc()
        timings = done.timings
        for histogram, ms in (
            (self.commit_to_first_audio, timings.commit_to_first_audio_ms),
            (self.speech_to_first_audio, timings.speech_to_first_audio_ms),
            (self.vad_wait, timings.vad_wait_ms),
            (self.commit_to_first_text, timings.commit_to_first_text_ms),
        ):
            # What is made beside a conversation waits for those, and would raise the alert.
            if ms is not None and done.in_conversation:
                histogram.observe(ms / 1000)
        if timings.real_time_factor is not None:
            self.real_time_factor.observe(timings.real_time_factor)
        for kind, rows in vars(done.usage).items():
            self.rows.labels(kind).inc(rows)


@dataclass
class _Families:
    """What ``generate_latest`` asks of a registry."""

    families: Iterable[Metric]

    def collect(self) -> Iterable[Metric]:
        return self.families


def _add(total: Metric, more: Metric) -> None:
    """Add the samples of one family to those of the same one."""
    places = {_key(sample): place for place, sample in enumerate(total.samples)}
    for sample in more.samples:
        place = places.get(_key(sample))
        if place is None:
            total.samples.append(sample)
        elif not sample.name.endswith("_created"):
            value = total.samples[place].value + sample.value
            total.samples[place] = sample._replace(value=value)


def _key(sample: Sample) -> tuple[str, tuple[tuple[str, str], ...]]:
    return sample.name, tuple(sorted(sample.labels.items()))


class SessionMetrics(SessionObserver):
    """What is noted of one session: metrics and log lines; neither sound nor words."""

    def __init__(self, metrics: Metrics, settings: SessionSettings, client: str) -> None:
        self.session_id = ""
        self.answering: str | None = None
        """The conversation's response that is being made."""
        self._metrics, self._rate, self._client = metrics, settings.input_rate, client
        self._begun_s = time.monotonic()
        self._totals = {"in_s": 0.0, "out_s": 0.0, "responses": 0, "errors": 0}
        self._received = metrics.messages.labels("in")
        self._playing: dict[str, _Playing] = {}
        self._notes = 0

    def on_command(self, command: commands.Command) -> None:
        """Count sound."""
        if isinstance(command, commands.Push):
            seconds = command.samples / (command.rate or self._rate)
            self._totals["in_s"] += seconds
            self._metrics.audio_in.inc(seconds)

    def on_event(self, event: events.Event) -> None:
        """Count and log what is made."""
        match event:
            case events.AudioDelta():
                self._on_sound(event)
            case events.SettingsUpdated():
                self._rate = event.settings.input_rate
            case events.SessionOpened():
                self.session_id = event.session_id
                self._metrics.sessions_opened.inc()
                self._log("session opened", client=self._client)
            case events.ResponseStarted():
                if event.in_conversation:
                    self.answering = event.response_id
                self._log("response started", response=event.response_id)
            case events.ResponseDone():
                self._on_response(event)
            case events.ContextDropped():
                figures = {"items": len(event.item_ids), "rows": event.rows}
                self._log("context dropped", figures=figures)

    def on_message(
        self, sender: str, message: str | bytes, event: server_events.Event | None = None
    ) -> None:
        """Count messages of the client, and errors that it is told."""
        del message  # no words of anyone are kept here
        if sender == "client":
            self._received.inc()
        code = _error_code(event)
        if code is not None:
            self._totals["errors"] += 1
            self._metrics.errors.labels(code).inc()
            self.note("error told", code=code)

    def on_close(self, reason: str, rows: list[Row] | None) -> None:
        """Log what it was in all."""
        del rows
        self._metrics.closes.labels(reason).inc()
        figures = {"s": time.monotonic() - self._begun_s} | self._totals
        self._log("session closed", reason=reason, figures=figures)

    def note(self, message: str, **fields: Any) -> None:
        """A log line that a client can cause as often as it likes: after many there are no more."""
        self._notes += 1
        if self._notes <= _MOST_NOTES:
            self._log(message, **fields)
        elif self._notes == _MOST_NOTES + 1:
            self._log("no more is logged of what this client does wrong")

    def _log(self, message: str, **fields: Any) -> None:
        _LOG.info(message, extra={"session": self.session_id} | fields)

    def _on_sound(self, delta: events.AudioDelta) -> None:
        playing = self._playing.setdefault(delta.response_id, _Playing())
        late_s = playing.add(delta.audio_ms / 1000, time.monotonic())
        self._totals["out_s"] += delta.audio_ms / 1000
        self._metrics.audio_out.inc(delta.audio_ms / 1000)
        if late_s > 0:
            self._metrics.underruns.inc()
            self._metrics.underrun_time.inc(late_s)

    def _on_response(self, done: events.ResponseDone) -> None:
        if self.answering == done.response_id:
            self.answering = None
        playing = self._playing.pop(done.response_id, _Playing())
        self._totals["responses"] += 1
        self._metrics.on_response(done)
        figures = {name: value for name, value in vars(done.timings).items() if value is not None}
        self._log(
            "response done",
            response=done.response_id,
            status=done.status,
            reason=done.reason,
            figures=figures | {"underruns": playing.underruns},
        )


@dataclass
class _Playing:
    """A response as its listener hears it: played from the first sound on, without a pause."""

    underruns: int = 0
    ends_s: float | None = None

    def add(self, seconds: float, now_s: float) -> float:
        """More sound has come; by how many seconds too late, 0 if in time."""
        late_s = 0.0 if self.ends_s is None else max(0.0, now_s - self.ends_s)
        self.underruns += late_s > 0
        self.ends_s = (now_s if self.ends_s is None else self.ends_s + late_s) + seconds
        return late_s


def _error_code(event: server_events.Event | None) -> str | None:
    """The code of an error that a client is told, as such or as a response that failed."""
    match event:
        case server_events.Error(error=error):
            return error.code
        case server_events.Transcribed(error=dict(fault)):
            return fault["code"]
        case server_events.ResponseEvent(type="response.done", response=response):
            details = response.status_details
            return details.error["code"] if details and details.error else None
    return None
