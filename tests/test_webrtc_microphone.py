"""A call's microphone that stops: turns end by the clock, and the clock stays right."""

import time
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import soundfile
import soxr
from conftest import require_package, run
from server_rig import RATE, question, serving, silence
from webrtc_rig import WIRE_RATE, Caller, Sound, place_of

PACKET = WIRE_RATE // 50
HEARD_RATE = 16_000
WORDS = ("--temperature", "0", "--seed", "0", "--script", "speech:12")
"""Short answers: only the turns matter."""


@pytest.fixture(scope="module", autouse=True)
def _needs() -> None:
    require_package("aiortc", "webrtc")
    require_package("silero_vad", "vad")


@pytest.mark.parametrize("stamps_go_on", [True, False])
def test_a_turn_ends_though_the_microphone_sends_nothing_more(
    stamps_go_on: bool, cache_folder: Path, tmp_path: Path
) -> None:
    words, said_s = question(), list[float]()
    with serving(*WORDS, "--record", str(tmp_path), cache=cache_folder) as server:
        caller = Caller(server)

        async def main() -> None:
            async with caller:
                for _ in range(2):
                    caller.microphone.push(words)
                    said_s.append(time.monotonic())
                    await caller.microphone.said()
                    caller.microphone.stop_sending(stamps_go_on=stamps_go_on)
                    await caller.wait("input_audio_buffer.speech_stopped")
                    await caller.wait("output_audio_buffer.stopped")
                    caller.microphone.send_again()
                caller.microphone.push(silence(1.0))  # what comes after the pause is heard as well
                await caller.microphone.said()

        run(main())
        server.await_nothing_held()
        kept = server.await_folder(tmp_path)[-1]
        assert not server.faults()
    heard, rate = soundfile.read(kept / "input-16000.wav", dtype="float32")
    asked = soxr.resample(np.frombuffer(words, "<i2").astype(np.float32) / 32768, RATE, rate)
    first = place_of(asked, heard[: 2 * len(asked)])
    second = first + len(asked) + place_of(asked, heard[first + len(asked) :])
    apart_s = said_s[1] - said_s[0]
    pause_s = apart_s - len(words) / 2 / RATE
    print(f"a pause of {pause_s:.2f} s is {(second - first) / rate - apart_s:+.3f} s longer")
    assert pause_s > 1.0
    assert abs((second - first) / rate - apart_s) < pause_s / 2, "it is heard, and once"
    starts = [
        event["audio_start_ms"]
        for event in caller.events
        if event["type"] == "input_audio_buffer.speech_started"
    ]
    assert len(starts) == 2
    assert abs((starts[1] - starts[0]) / 1000 - apart_s) < pause_s / 2


# Without a connection: packets come when a test says so.


class Line:
    """Packets of one microphone on their way to a ``Microphone``, and what it has heard."""

    def __init__(self) -> None:
        import av

        from mosstalk.server.call_sound import Microphone

        self.microphone, self.heard = Microphone(), bytearray()
        self.now_s = self._begun_s = time.monotonic()
        self._number = self.stamp = 0
        self._encoder = av.CodecContext.create("libopus", "w")
        self._encoder.sample_rate, self._encoder.layout = WIRE_RATE, "mono"
        self._encoder.format, self._encoder.options = "s16", {"frame_duration": "20"}

    def arrive(self, sound: Sound) -> None:
        """A packet comes now."""
        import av
        from aiortc.rtp import RtpPacket

        samples = (sound * 32767).astype(np.int16)[None]
        frame = av.AudioFrame.from_ndarray(samples, format="s16", layout="mono")
        frame.sample_rate, frame.time_base = WIRE_RATE, Fraction(1, WIRE_RATE)
        (encoded,) = self._encoder.encode(frame)
        packet = RtpPacket(sequence_number=self._number & 0xFFFF, timestamp=self.stamp, ssrc=1)
        packet.payload = bytes(encoded)
        self._number += 1
        self.stamp += PACKET
        self.heard += self.microphone.push(packet, self.now_s)

    def pass_time(self, seconds: float) -> None:
        """Nothing comes for so long, and that is noticed as in a call."""
        for _ in range(round(seconds * 50)):
            self.now_s += 0.02
            self.heard += self.microphone.silence(self.now_s)

    def say(self, sound: Sound) -> None:
        """Packets come at the pace of time."""
        for packet in packets(sound):
            self.pass_time(0.02)
            self.arrive(packet)

    @property
    def ahead_s(self) -> float:
        """By how much what was heard is longer than the time that has passed."""
        return len(self.heard) / 2 / HEARD_RATE - (self.now_s - self._begun_s)


def packets(sound: Sound) -> Iterator[Sound]:
    """Pieces of 20 ms."""
    yield from sound[: len(sound) // PACKET * PACKET].reshape(-1, PACKET)


def tone(seconds: float) -> Sound:
    """Something loud."""
    return 0.3 * np.sin(np.arange(int(seconds * WIRE_RATE)) / 20).astype(np.float32)


def quiet(seconds: float) -> Sound:
    """A quiet room."""
    noise = np.random.default_rng(0).standard_normal(int(seconds * WIRE_RATE))
    return (noise * 1e-3).astype(np.float32)


def loud_s(heard: bytes | bytearray) -> float:
    """How long it was loud."""
    frames = np.frombuffer(heard, "<i2").astype(float)
    frames = np.abs(frames[: len(frames) // 320 * 320].reshape(-1, 320)).max(axis=1)
    return float((frames > 3000).sum() * 0.02)


@pytest.mark.parametrize("seconds", [0.5, 3.0, 600.0])
@pytest.mark.parametrize("stamps", ["go on", "go on later", "stand still"])
def test_a_pause_is_heard_once_however_the_timestamps_go(seconds: float, stamps: str) -> None:
    line = Line()
    line.say(tone(1.0))
    line.pass_time(seconds)
    paused_s = len(line.heard) / 2 / HEARD_RATE
    assert paused_s == pytest.approx(1.0 if seconds < 1.0 else 1.0 + seconds, abs=0.1)
    if stamps == "go on later":  # an encoder may have had half a packet left
        line.say(tone(0.02))
    if stamps != "stand still":
        line.stamp += round(seconds * 50) * PACKET
    line.say(tone(2.0))
    assert loud_s(line.heard) == pytest.approx(3.0, abs=0.15), "words after a pause are heard"
    missed_s = seconds if seconds < 1.0 and stamps == "stand still" else 0.0
    assert line.ahead_s == pytest.approx(-missed_s, abs=0.1)


def test_what_comes_late_is_heard_and_the_quiet_after_it_is_shortened() -> None:
    line = Line()
    line.say(tone(1.0))
    line.pass_time(2.0)
    for packet in packets(tone(2.0)):  # they were held up on their way
        line.arrive(packet)
    assert loud_s(line.heard) == pytest.approx(3.0, abs=0.15)
    assert line.ahead_s == pytest.approx(2.0, abs=0.15)
    line.say(tone(1.0))
    assert line.ahead_s == pytest.approx(2.0, abs=0.15), "words are not shortened"
    line.say(quiet(4.0))
    assert line.ahead_s == pytest.approx(0.0, abs=0.2), "the clock is right again"
    assert loud_s(line.heard) == pytest.approx(4.0, abs=0.15)


def test_a_pause_by_hand_is_heard_at_its_end_and_what_follows_is_heard_too() -> None:
    line = Line()
    line.say(tone(1.0))
    line.now_s += 20.0  # nobody asks for silence
    line.stamp += 20 * WIRE_RATE
    line.say(tone(3.0))
    assert loud_s(line.heard) == pytest.approx(4.0, abs=0.15)
    assert line.ahead_s == pytest.approx(0.0, abs=0.1)


def test_timestamps_alone_make_no_silence() -> None:
    line = Line()
    for packet in packets(tone(4.0)):
        line.pass_time(0.02)
        line.stamp += WIRE_RATE  # as if a second were lost before each
        line.arrive(packet)
    assert line.ahead_s < 1.2
