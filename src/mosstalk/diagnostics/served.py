"""A look at a running server from outside: what is wrong with it, and what to do.

Only what the server tells anybody, and with a key its metrics, is looked at; no session is opened.
"""

import json
import re
import socket
import ssl
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from email.utils import parsedate_to_datetime
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from importlib.metadata import version
from itertools import pairwise
from typing import Any
from urllib.parse import SplitResult, urlsplit

from mosstalk.environment import api_keys
from mosstalk.errors import OptionError

_PATIENCE_S = 10.0
_CLOCKS_S = 5.0
"""How far clocks may be apart; a ``Date`` is told in whole seconds."""
_RENEWAL_DAYS = 14
_SILENT_S = 5.0
_FIRST_AUDIO_S = 0.8
_UNDERRUNS, _FAILED = 0.02, 0.01
"""Of replies; as in deploy/alerts.yml, and so are the two bounds before."""
_DAY_S = 86_400.0
_SAMPLE = re.compile(r"^mosstalk_(\w+?)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_LE = re.compile(r'le="([^"]+)"')


@dataclass(frozen=True)
class Check:
    """One thing: ``state`` is ok, look (it may be as wanted) or wrong; ``do`` says what to do."""

    name: str
    state: str
    detail: str
    do: str = ""


@dataclass(frozen=True)
class ServerDiagnosis:
    """All that was looked at."""

    url: str
    checks: list[Check] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """0 where nothing is wrong, else 1."""
        return 1 if any(check.state == "wrong" for check in self.checks) else 0

    def as_dict(self) -> dict[str, Any]:
        """Everything as json values."""
        return asdict(self) | {"exit_code": self.exit_code}


@dataclass(frozen=True)
class _Answer:
    status: int
    body: str
    date: str | None
    expires: str | None
    """Of the certificate, as ``ssl`` says it."""

    def json(self) -> dict[str, Any]:
        """The body, {} where it is no object."""
        try:
            value = json.loads(self.body)
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}


def look_at(url: str) -> ServerDiagnosis:
    """Ask a server how it is, with the first key of ``MOSSTALK_API_KEY`` if there is one.

    Raises:
        OptionError: the url is none of a server.
    """
    if (parts := server_parts(url, "http", "https")) is None:
        raise OptionError(f"--url {url}: give where the server is, as http://localhost:8000")
    base = f"{parts.scheme}://{parts.netloc}"
    try:
        asked_s = time.time()
        health = _ask(base, "/health")
        checks = [*_certificate(health, asked_s), *_health(health)]
        # What another program says under these paths is no word on mosstalk.
        if _is_mosstalk(health):
            checks += _clock(health, asked_s)
            checks += [*_ready(_ask(base, "/ready")), *_metrics(_ask(base, "/metrics"))]
    except (OSError, HTTPException) as error:
        checks = [_unreachable(base, error)]
    return ServerDiagnosis(base, checks)


def server_parts(url: str, *schemes: str) -> SplitResult | None:
    """Scheme, host and port of a server's url, or None if it is no url of one of the schemes."""
    try:
        parts = urlsplit(url)
        return parts if parts.scheme in schemes and parts.hostname and parts.port != 0 else None
    except ValueError:  # a port that is no number, or half an IPv6 address
        return None


def printed(diagnosis: ServerDiagnosis) -> str:
    """The diagnosis as people read it."""
    lines = []
    for check in diagnosis.checks:
        lines.append(f"{check.state:<6} {check.name:<12} {check.detail}")
        if check.do:
            lines.append(f"{'':<6} {'':<12} do: {check.do}")
    wrong = [check.name for check in diagnosis.checks if check.state == "wrong"]
    last = f"Wrong: {', '.join(wrong)}" if wrong else "Nothing is wrong"
    return "\n".join([*lines, "", f"{last} with {diagnosis.url}"]) + "\n"


def _ask(base: str, path: str) -> _Answer:
    parts = urlsplit(base)
    kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=_PATIENCE_S)
    keys = api_keys() or []
    headers = {"Authorization": f"Bearer {keys[0]}"} if keys else {}
    try:
        connection.request("GET", path, headers=headers)
        expires = None
        if isinstance(connection.sock, ssl.SSLSocket):
            expires = str((connection.sock.getpeercert() or {}).get("notAfter", ""))
        answer = connection.getresponse()
        body = answer.read().decode(errors="replace")
        return _Answer(answer.status, body, answer.headers["Date"], expires)
    finally:
        connection.close()


def _unreachable(base: str, error: Exception) -> Check:
    """What it means that nothing answers."""
    do = "see whether it runs, and listens where this machine can reach it (--host)"
    if isinstance(error, ssl.SSLCertVerificationError):
        do = (
            "have SSL_CERT_FILE name the certificate if it signed itself (tls/certificate.pem in "
            "the server's cache), use a name that is in it, or renew it"
        )
    elif isinstance(error, socket.gaierror):
        do = "look at the name"
    elif isinstance(error, ssl.SSLError | HTTPException | ConnectionResetError):
        do = "try http in place of https, or the other way round"
    why = " ".join(str(error).split()) or type(error).__name__
    return Check("connection", "wrong", f"{base}: {why}", do)


def _certificate(answer: _Answer, now_s: float) -> Iterator[Check]:
    if answer.expires is None:
        return
    days = (ssl.cert_time_to_seconds(answer.expires) - now_s) / _DAY_S
    detail = f"valid for {days:.0f} more days, until {answer.expires}"
    if days < _RENEWAL_DAYS:
        yield Check("certificate", "look", detail, "renew it and start the server again")
    else:
        yield Check("certificate", "ok", detail)


def _is_mosstalk(health: _Answer) -> bool:
    return "worker" in health.json()


def _health(answer: _Answer) -> Iterator[Check]:
    told = answer.json()
    if not _is_mosstalk(answer):
        said = answer.body.strip()[:200]
        do = "look whether this is a mosstalk server, and its --allowed-host has this name"
        yield Check("health", "wrong", f"status {answer.status}: {said}", do)
        return
    if answer.status != 200:
        do = "read the log's last lines of level error; a supervisor should start it again"
        yield Check("health", "wrong", str(told.get("failure")), do)
    else:
        yield Check("health", "ok", f"the worker is {told['worker']}")
    here, there = version("mosstalk"), str(told.get("version", "unknown"))
    if here == there:
        yield Check("version", "ok", there)
    else:
        yield Check("version", "look", f"{there}; here it is {here}", "install one of the two")


def _clock(answer: _Answer, asked_s: float) -> Iterator[Check]:
    if answer.date is None:
        return
    apart_s = parsedate_to_datetime(answer.date).timestamp() - asked_s
    detail = f"{apart_s:+.0f} s from this machine's"
    if abs(apart_s) > _CLOCKS_S:
        do = "set both by NTP: certificates, ephemeral keys and log lines go by them"
        yield Check("clock", "look", detail, do)
    else:
        yield Check("clock", "ok", detail)


def _ready(answer: _Answer) -> Iterator[Check]:
    told = answer.json()
    if answer.status != 200:
        error = told.get("error") or {}
        why = error.get("message") or f"status {answer.status}"
        do = "MosstalkNotReady in docs/operate.md"
        yield Check("ready", "wrong", f"nobody is let in: {why}", do)
        return
    worker = told["worker"]
    facts = f"{worker['weights_kind']} weights, {worker['device']}, {worker['dtype']}"
    yield Check("ready", "ok", f"{told['model']} ({facts}, {worker['context_rows']} rows)")
    if worker["detector"] is None:
        do = "install the extra vad, or leave out --vad none, if they shall not"
        yield Check("turns", "look", "clients must say themselves where turns end", do)


def _metrics(answer: _Answer) -> Iterator[Check]:
    if answer.status != 200:
        do = "set MOSSTALK_API_KEY to one of its keys" if answer.status == 401 else ""
        yield Check("metrics", "look", f"not shown: status {answer.status}", do)
        return
    values = {(name, labels): float(value) for name, labels, value in _SAMPLE.findall(answer.body)}
    yield from _places(values)
    silent_s = values.get(("engine_silent_seconds", ""), 0.0)
    if silent_s > _SILENT_S:
        do = "MosstalkEngineSilent in docs/operate.md"
        yield Check("engine", "wrong", f"owes an answer for {silent_s:.0f} s", do)
    yield from _replies(values)
    for name, title in (("commit_to", "first audio"), ("speech_to", "hands-free")):
        yield from _first_audio(values, f"{name}_first_audio_seconds_bucket", title)


_Values = Mapping[tuple[str, str], float]


def _places(values: _Values) -> Iterator[Check]:
    taken, limit = values["sessions", ""], values.get(("sessions_limit", ""), 0.0)
    detail = f"{taken:.0f} of {limit:.0f} taken"
    refused = {
        labels.split('"')[1]: value
        for (name, labels), value in values.items()
        if name == "refusals_total" and value
    }
    if refused:
        told = ", ".join(f"{reason} {count:.0f}" for reason, count in refused.items())
        detail += f"; refused since its start: {told}"
    if limit and taken >= limit:
        yield Check("places", "look", detail, "MosstalkFull in docs/operate.md")
    else:
        yield Check("places", "ok", detail)


def _replies(values: _Values) -> Iterator[Check]:
    ended = {labels: n for (name, labels), n in values.items() if name == "responses_total"}
    replies, underruns = sum(ended.values()), values["underruns_total", ""]
    failed = sum(n for labels, n in ended.items() if 'status="failed"' in labels)
    detail = f"{replies:.0f} since its start, {failed:.0f} failed, {underruns:.0f} underruns"
    if failed > _FAILED * replies:
        yield Check("replies", "look", detail, "MosstalkRepliesFail in docs/operate.md")
    elif underruns > _UNDERRUNS * replies:
        yield Check("replies", "look", detail, "MosstalkUnderruns in docs/operate.md")
    else:
        yield Check("replies", "ok", detail)


def _first_audio(values: _Values, bucket: str, title: str) -> Iterator[Check]:
    counts = sorted(
        (float(_LE.findall(labels)[0]), n) for (name, labels), n in values.items() if name == bucket
    )
    if not counts or not counts[-1][1]:
        return
    middle_s, late_s = quantile(counts, 0.5), quantile(counts, 0.95)
    detail = f"p50 {1000 * middle_s:.0f} ms, p95 {1000 * late_s:.0f} ms since its start"
    if bucket.startswith("commit") and late_s > _FIRST_AUDIO_S:
        yield Check(title, "look", detail, "MosstalkFirstAudioSlow in docs/operate.md")
    else:
        yield Check(title, "ok", detail)


def quantile(counts: list[tuple[float, float]], share: float) -> float:
    """A quantile of a histogram, as Prometheus' ``histogram_quantile`` estimates it.

    ``counts``: upper bounds that grow to infinity, and how much lies at or below each. Beyond the
    last finite bound that bound is told.
    """
    wanted = share * counts[-1][1]
    for (low, below), (high, upto) in pairwise([(0.0, 0.0), *counts]):
        if upto >= wanted and upto > below:
            if high == float("inf"):
                return low
            return low + (high - low) * (wanted - below) / (upto - below)
    return counts[-2][0]
