"""What is noted of one session while it runs: metrics and log lines; neither sound nor words."""

import logging
import time
from dataclasses import dataclass, field
from typing import Any

from mosstalk.server.metrics import Metrics
from mosstalk.server.realtime import server_events
from mosstalk.session import commands as told
from mosstalk.session import events
from mosstalk.session.settings import SessionSettings

_LOG = logging.getLogger("mosstalk.server.session")
_MOST_REMARKS = 50


class SessionMetrics:
    """Is shown every command and event of a session, in order."""

    def __init__(self, metrics: Metrics, settings: SessionSettings, client: str) -> None:
        self.session_id = ""
        self.answering: str | None = None
        """The conversation's response that is being made."""
        self._metrics, self._rate, self._client = metrics, settings.input_rate, client
        self._begun_s = time.monotonic()
        self._totals = {"in_s": 0.0, "out_s": 0.0, "responses": 0, "errors": 0}
        self._sounding: dict[str, _Sounding] = {}
        self._remarks = 0

    def told(self, command: told.Command) -> None:
        """The client tells the session something."""
        if isinstance(command, told.Push):
            seconds = command.samples / (command.rate or self._rate)
            self._totals["in_s"] += seconds
            self._metrics.audio_in.inc(seconds)

    def heard(self, event: events.Event) -> None:
        """The session tells something."""
        if isinstance(event, events.AudioDelta):
            self._sounded(event)
        elif isinstance(event, events.SettingsUpdated):
            self._rate = event.settings.input_rate
        elif isinstance(event, events.SessionOpened):
            self.session_id = event.session_id
            self._metrics.sessions_opened.inc()
            self.log("session opened", client=self._client)
        elif isinstance(event, events.ResponseStarted):
            if event.in_conversation:
                self.answering = event.response_id
            self.log("response started", response=event.response_id)
        elif isinstance(event, events.ResponseDone):
            self._done(event)
        elif isinstance(event, events.ContextDropped):
            self.log("context dropped", figures={"items": len(event.item_ids), "rows": event.rows})

    def sent(self, event: server_events.Event) -> None:
        """The client is sent an event of its protocol."""
        code = _error_code(event)
        if code is not None:
            self._totals["errors"] += 1
            self._metrics.errors.labels(code).inc()
            self.remark("error told", code=code)

    def remark(self, message: str, **fields: Any) -> None:
        """A log line that a client can cause as often as it likes: after many there are no more."""
        self._remarks += 1
        if self._remarks <= _MOST_REMARKS:
            self.log(message, **fields)
        elif self._remarks == _MOST_REMARKS + 1:
            self.log("no more is logged of what this client does wrong")

    def ended(self, reason: str) -> None:
        """The session and its connection are over."""
        self._metrics.closes.labels(reason).inc()
        figures = {"s": time.monotonic() - self._begun_s} | self._totals
        self.log("session closed", reason=reason, figures=figures)

    def log(self, message: str, **fields: Any) -> None:
        """A log line about this session."""
        _LOG.info(message, extra={"session": self.session_id} | fields)

    def _sounded(self, delta: events.AudioDelta) -> None:
        sounding = self._sounding.setdefault(delta.response_id, _Sounding())
        late_s = sounding.add(delta.audio_ms / 1000, time.monotonic())
        self._totals["out_s"] += delta.audio_ms / 1000
        self._metrics.audio_out.inc(delta.audio_ms / 1000)
        if late_s > 0:
            self._metrics.underruns.inc()
            self._metrics.underrun_time.inc(late_s)

    def _done(self, done: events.ResponseDone) -> None:
        if self.answering == done.response_id:
            self.answering = None
        sounding = self._sounding.pop(done.response_id, _Sounding())
        self._totals["responses"] += 1
        self._metrics.responded(done)
        figures = {name: value for name, value in vars(done.timings).items() if value is not None}
        self.log(
            "response done",
            response=done.response_id,
            status=done.status,
            reason=done.reason,
            figures=figures | {"underruns": sounding.underruns},
        )


@dataclass
class _Sounding:
    """A response as its listener hears it: played from the first sound on, without a pause."""

    underruns: int = 0
    _ends_s: float | None = field(default=None)

    def add(self, seconds: float, now_s: float) -> float:
        """More sound has come; by how many seconds too late, 0 if in time."""
        late_s = 0.0 if self._ends_s is None else max(0.0, now_s - self._ends_s)
        self.underruns += late_s > 0
        self._ends_s = (now_s if self._ends_s is None else self._ends_s + late_s) + seconds
        return late_s


def _error_code(event: server_events.Event) -> str | None:
    """The code of an error that a client is told, as such or as a response that failed."""
    match event:
        case server_events.Error() | server_events.TranscriptionFailed():
            return event.error.code
        case server_events.ResponseEvent(type="response.done", response=response):
            details = response.status_details
            return details.error.code if details and details.error else None
    return None
