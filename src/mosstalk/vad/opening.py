"""The best detector that is installed, or the one asked for."""

import logging
from typing import Literal, TypeAlias, get_args

from mosstalk.errors import DetectorError
from mosstalk.vad.frames import Detector
from mosstalk.vad.silero import SileroDetector
from mosstalk.vad.webrtc import WebRtcDetector

DetectorKind: TypeAlias = Literal["auto", "silero", "webrtc"]
_log = logging.getLogger(__name__)


def open_detector(kind: str = "auto") -> Detector:
    """Open ``silero``, ``webrtc``, or with ``auto`` the first of them that is installed.

    Says in one log line which; ``Detector.description`` has the same words.

    Raises:
        DetectorError: what is asked for is not installed, or there is no such detector; the
            message says what to install or choose.
    """
    if kind not in get_args(DetectorKind):
        known = ", ".join(get_args(DetectorKind))
        raise DetectorError(f"unknown detector {kind!r}; choose from {known}")
    detector = _OPENERS[kind]()
    _log.info("speech is found by %s", detector.description)
    return detector


def _open_best() -> Detector:
    try:
        return SileroDetector()
    except DetectorError as silero:
        try:
            detector = WebRtcDetector()
        except DetectorError as webrtc:
            raise DetectorError(f"{silero}; and {webrtc}") from None
        _log.warning("%s; until then a detector that noise misleads stands in", silero)
        return detector


_OPENERS = {"auto": _open_best, "silero": SileroDetector, "webrtc": WebRtcDetector}
