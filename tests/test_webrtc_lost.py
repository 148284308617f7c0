"""Calls by WebRTC over a line that loses packets, both ways: what each side hears of the other."""

import asyncio
import json
from pathlib import Path

import av
import numpy as np
import numpy.typing as npt
import pytest
import soundfile
import soxr
from aiortc.rtp import RtpPacket
from conftest import require_package, run
from server_rig import QUICK, RATE, question, serving, silence, typed
from webrtc_rig import WIRE_RATE, Caller, Sound, place_of

PACKET = WIRE_RATE // 50
PIECE = 10 * PACKET
LOSS = 0.02
ROUND_S = 30.0
"""How often the server is asked for a reply."""
BETWEEN_S = 1.0
"""What the two sides' clocks, and sound and events, may lie apart on a busy machine."""
LATE_S = 5.0
"""By how much an event may come after its sound: one that was lost is sent again, twice if need be,
after 1 s and 2 s."""


@pytest.fixture(scope="module", autouse=True)
def _needs() -> None:
    require_package("aiortc", "webrtc")


def unwrapped(values: list[int], bits: int) -> npt.NDArray[np.int64]:
    """Numbers that begin at 0 again after so many bits, as if they did not; the first is 0."""
    half = 1 << (bits - 1)
    steps = np.mod(np.diff(np.array(values, np.int64)) + half, 2 * half) - half
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(steps)])


def is_sound(packet: bytes) -> bool:
    """Whether a packet is one of RTP, and not of RTCP, STUN or DTLS (RFC 7983, RFC 5761)."""
    return 128 <= packet[0] < 192 and not 192 <= packet[1] < 224


async def talk(caller: Caller, seconds: float) -> int:
    """Ask at the beginning and at the end of so long; how many replies were played meanwhile."""
    words = question()
    pause = seconds - 2 * len(words) / 2 / RATE
    caller.microphone.push(words + silence(pause) + words + silence(0.5))
    saying = asyncio.create_task(caller.microphone.said())
    rounds = 0
    while not saying.done():
        caller.send({"type": "input_audio_buffer.clear"})  # turns by hand have an end
        await caller.wait("input_audio_buffer.cleared")
        caller.send(typed("Still there?"), {"type": "response.create"})
        await caller.wait("output_audio_buffer.stopped")
        rounds += 1
        await asyncio.wait((saying,), timeout=ROUND_S)
    return rounds


@pytest.mark.timeout(420)
@pytest.mark.parametrize(
    "seconds",
    [pytest.param(12, marks=pytest.mark.alone), pytest.param(300, marks=pytest.mark.faults)],
)
def test_lost_packets_are_silence_of_their_length_both_ways(
    seconds: int, cache_folder: Path, tmp_path: Path
) -> None:
    # 300 is not for every day: sound comes at its own pace.
    rounds = 0
    with serving(*QUICK, "--record", str(tmp_path), cache=cache_folder) as server:
        caller = Caller(server, relayed=True)

        async def main() -> None:
            nonlocal rounds
            async with caller:
                caller.relay.loss = LOSS
                rounds = await talk(caller, seconds)

        run(main(), seconds + 90)
        server.await_nothing_held()
        made_late_s = server.metrics()["mosstalk_underrun_seconds_total"]
        kept = server.await_folder(tmp_path)[-1]
        assert not server.faults()
    lost = caller.relay.lost
    for way in ("up", "down"):
        spared = sum(map(is_sound, lost[way]))
        assert spared > 2, lost
        print(f"{way}: {spared} packets of sound lost, {len(lost[way]) - spared} others")
    _the_server_has_heard_it_all(kept, seconds, sum(map(is_sound, lost["up"])))
    _no_event_was_lost(caller, rounds)
    _the_client_has_heard_it_all(caller, kept, made_late_s)


def _the_server_has_heard_it_all(kept: Path, seconds: float, lost: int) -> None:
    """The question stands where it was said, at the beginning and at the end."""
    words = question()
    heard, rate = soundfile.read(kept / "input-16000.wav", dtype="float32")
    asked = soxr.resample(np.frombuffer(words, "<i2").astype(np.float32) / 32768, RATE, rate)
    pause = seconds - 2 * len(words) / 2 / RATE
    early = round((len(words) / 2 / RATE + pause / 2) * rate)
    first = place_of(asked, heard[:early])
    second = early + place_of(asked, heard[early:])
    drift = second - first - round((len(words) / 2 / RATE + pause) * rate)
    print(f"to the server, {seconds} s: drift {drift} samples at 16 kHz")
    assert abs(drift) <= rate // 1000, "nothing has drifted"
    spoken = heard[first : first + len(asked)], heard[second : second + len(asked)]
    gaps = 0
    for each in spoken:
        assert np.corrcoef(each, asked)[0, 1] > 0.7
        frames = each[: len(each) // 80 * 80].reshape(-1, 80)
        gaps += int((np.abs(frames).max(axis=1) == 0).sum())
    assert gaps * 5 <= 20 * lost, "silence is no longer than what was lost"


def _no_event_was_lost(caller: Caller, rounds: int) -> None:
    """SCTP has sent again what was lost: every reply's words are whole, and in order."""
    assert "error" not in caller.kinds()
    assert caller.kinds().count("input_audio_buffer.cleared") == rounds
    written = dict[str, str]()
    for event in caller.events:
        if event["type"] == "response.output_audio_transcript.delta":
            told = event["response_id"]
            written[told] = written.get(told, "") + event["delta"]
    done = [event["response"] for event in caller.events if event["type"] == "response.done"]
    assert len(done) == rounds
    for response in done:
        assert response["status"] == "completed"
        assert response["output"][0]["content"][0]["transcript"] == written[response["id"]]


def _the_client_has_heard_it_all(caller: Caller, kept: Path, made_late_s: float) -> None:
    """All packets came but for those that were lost, and each reply's sound is where it was."""
    came_s = np.array([at_s for at_s, _ in caller.packets])
    packets = [packet for _, packet in caller.packets]
    numbers = unwrapped([packet.sequence_number for packet in packets], 16)
    stamps = unwrapped([packet.timestamp for packet in packets], 32)
    assert np.all(np.diff(numbers) > 0)
    begun = packets[0].sequence_number
    gone = set(range(int(numbers[-1]))) - set(map(int, numbers))
    dropped = [RtpPacket.parse(raw) for raw in caller.relay.lost["down"] if is_sound(raw)]
    assert gone <= {(each.sequence_number - begun) % 65_536 for each in dropped}
    assert len(gone) > 2
    # A sender that is late on a busy machine leaves out what it should have sent.
    left_out = stamps - PACKET * numbers
    assert np.all(np.diff(left_out) >= 0)
    assert not np.any(left_out % PACKET)
    astray_s = stamps / WIRE_RATE - (came_s - came_s[0])
    assert abs(np.median(astray_s[-50:]) - np.median(astray_s[:50])) < BETWEEN_S, (
        "the sender's clock is right"
    )
    heard = _decoded(packets, numbers)
    for response_id, said in _replies(kept).items():
        ends_s = [
            next(
                at_s
                for at_s, event in zip(caller.times_s, caller.events, strict=True)
                if event["type"] == f"output_audio_buffer.{change}"
                and event["response_id"] == response_id
            )
            for change in ("started", "stopped")
        ]
        span = (came_s > ends_s[0] - LATE_S) & (came_s < ends_s[1] + BETWEEN_S)
        inside = numbers[span]
        part = heard[inside[0] * PACKET : (inside[-1] + 1) * PACKET]
        _is_heard(said, part, made_late_s)


def _is_heard(said: Sound, part: Sound, made_late_s: float) -> None:
    """A reply's words stand where they should, and sound as they should.

    A server that makes its sound too slowly, on a busy machine, is silent for some packets in the
    middle: what follows is later by so many. Two pieces that follow each other tell by how many,
    and all together are no later than the server itself says that it was (``made_late_s``).
    """
    begin = place_of(said[:WIRE_RATE], part[: round((LATE_S + BETWEEN_S + 1) * WIRE_RATE)])
    late, breaks, found = 0, 0, list[bool]()
    for place in range(0, len(said) - 2 * PIECE, PIECE):
        piece, both = said[place : place + PIECE], said[place : place + 2 * PIECE]
        if np.abs(piece).max() < 0.01:
            continue
        rest, steps = part[begin + place :], range(late, late + 3 * WIRE_RATE, PACKET)
        found.append(_is_alike(piece, rest[late:]))
        if not found[-1]:
            before = late
            late = next((step for step in steps if _is_alike(both, rest[step:])), late)
            breaks += late > before
    print(
        f"to the client, {len(said) / WIRE_RATE:.1f} s: {sum(found)} of {len(found)} pieces at "
        f"their place, {breaks} behind a break, at the end {late / WIRE_RATE:.2f} s late, "
        f"made {made_late_s:.2f} s late"
    )
    assert len(found) > 5
    assert sum(found) + breaks > 0.6 * len(found), "its sound is where it should be"
    assert late / WIRE_RATE < made_late_s + BETWEEN_S, "and no later than it was made"


def _is_alike(said: Sound, heard: Sound) -> bool:
    """Whether it is what was said that begins there, but for what was lost."""
    size = min(len(said), len(heard))
    if size < len(said) or not heard[:size].any():
        return False
    return bool(np.corrcoef(said, heard[:size])[0, 1] > 0.7)


def _decoded(packets: list[RtpPacket], numbers: npt.NDArray[np.int64]) -> Sound:
    """What packets hold, each at its place; nothing where one is lost."""
    decoder = av.CodecContext.create("libopus", "r")
    decoder.layout, decoder.format = "mono", "s16"
    sound = np.zeros((numbers[-1] + 1) * PACKET, np.float32)
    for number, packet in zip(numbers, packets, strict=True):
        (frame,) = decoder.decode(av.Packet(packet.payload))
        samples = frame.to_ndarray()[0]
        sound[number * PACKET :][: len(samples)] = samples / 32768
    return sound


def _replies(kept: Path) -> dict[str, Sound]:
    """What each response has said, at 48 kHz, by its id."""
    sound, rate = soundfile.read(kept / "output-24000.wav", dtype="float32")
    pieces = dict[str, list[Sound]]()
    for line in (kept / "session.jsonl").read_text().splitlines():
        event = json.loads(line).get("event", {})
        if event.get("type") == "AudioDelta":
            piece = sound[event["at"] : event["at"] + event["samples"]]
            pieces.setdefault(event["response_id"], []).append(piece)
    return {
        response_id: soxr.resample(np.concatenate(parts), rate, WIRE_RATE)
        for response_id, parts in pieces.items()
    }
