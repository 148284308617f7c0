"""Every metric of the server, in Prometheus' terms. Names begin with ``mosstalk_``."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

from mosstalk.runtime.busy import BusyPart
from mosstalk.server.ipc import Heartbeat
from mosstalk.session.events import ResponseDone, Timings, Usage

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LATENCY_S = (
    0.02, 0.04, 0.06, 0.08, 0.12, 0.16, 0.24, 0.32, 0.4, 0.6, 0.8, 1.2, 1.6, 2.4, 4.0, 8.0
)  # fmt: skip
_STEP_S = (
    0.001, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.016, 0.025, 0.04, 0.08, 0.16, 0.32, 1.0
)  # fmt: skip
_REAL_TIME = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.85, 1.0, 1.5, 2.0, 4.0)
_PART_TIMES = {
    "busy": "Time that parts of the worker were at work",
    "busy_cpu": "Of it, processor time of the part's own thread",
    "card": "Time that a GPU worked for a part",
}


class Metrics:
    """All metrics of one server."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        GCCollector(registry=registry)

        def counter(name: str, says: str, *labels: str) -> Counter:
            return Counter(f"mosstalk_{name}", says, labels, registry=registry)

        def gauge(name: str, says: str, *labels: str) -> Gauge:
            return Gauge(f"mosstalk_{name}", says, labels, registry=registry)

        def seconds(name: str, says: str, buckets: tuple[float, ...] = _LATENCY_S) -> Histogram:
            return Histogram(f"mosstalk_{name}", says, buckets=buckets, registry=registry)

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
        self.step = seconds("engine_step_seconds", "Each step of the engine", _STEP_S)
        self.sessions = gauge("sessions", "Sessions that are open")
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
        self.busy, self.busy_cpu, self.card = (
            counter(f"{name}_seconds", says, "part") for name, says in _PART_TIMES.items()
        )
        self.replies = gauge("replies_running", "Replies that the engine is making")
        self.waiting = gauge("replies_waiting", "Replies in line for the engine")
        self.blocks = gauge("kv_blocks", "Blocks of K and V, by state", "state")
        self.worker_up = gauge("worker_up", "1 once the worker is ready, 0 else")
        self.worker_memory = gauge("worker_memory_bytes", "Resident memory of the worker")
        self.engine_silent = gauge("engine_silent_seconds", "Since when the engine owes an answer")
        self.draining = gauge("draining", "1 while nobody is let in any more")
        self._first_values()

    def text(self) -> bytes:
        """Everything, as Prometheus reads it."""
        return generate_latest(self.registry)

    def on_heartbeat(self, heartbeat: Heartbeat) -> None:
        """Take what the worker says of itself."""
        self.sessions.set(heartbeat.sessions)
        self.replies.set(heartbeat.replies)
        self.waiting.set(heartbeat.waiting)
        self.blocks.labels("used").set(heartbeat.blocks_in_use)
        self.blocks.labels("free").set(heartbeat.blocks - heartbeat.blocks_in_use)
        self.worker_memory.set(heartbeat.memory_bytes)
        self.engine_silent.set(heartbeat.engine_silent_s)
        for step_s in heartbeat.steps_s:
            self.step.observe(step_s)
        for part, busy in heartbeat.busy.items():
            self.busy.labels(part).inc(busy.wall_s)
            self.busy_cpu.labels(part).inc(busy.cpu_s)
            self.card.labels(part).inc(busy.card_s)

    def responded(self, done: ResponseDone) -> None:
        """Take what a response says of itself."""
        self.responses.labels(done.status, done.reason or "none").inc()
        self._took(done.timings)
        self._read(done.usage)

    def _took(self, timings: Timings) -> None:
        for histogram, ms in (
            (self.commit_to_first_audio, timings.commit_to_first_audio_ms),
            (self.speech_to_first_audio, timings.speech_to_first_audio_ms),
            (self.vad_wait, timings.vad_wait_ms),
            (self.commit_to_first_text, timings.commit_to_first_text_ms),
        ):
            if ms is not None:
                histogram.observe(ms / 1000)
        if timings.real_time_factor is not None:
            self.real_time_factor.observe(timings.real_time_factor)

    def _read(self, usage: Usage) -> None:
        for kind, rows in vars(usage).items():
            self.rows.labels(kind).inc(rows)

    def _first_values(self) -> None:
        """Let what can be asked for be there before it has happened."""
        for direction in ("in", "out"):
            self.messages.labels(direction)
        for state in ("used", "free"):
            self.blocks.labels(state).set(0)
        for kind in Usage.__dataclass_fields__:
            self.rows.labels(kind)
        for part in BusyPart:
            self.busy.labels(part)
            self.busy_cpu.labels(part)
            self.card.labels(part)
