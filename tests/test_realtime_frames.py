"""What a frame of sound costs between the socket and the session, beside what it must cost."""

import base64
import json
import timeit
from collections.abc import Callable

from realtime_rig import caller

from mosstalk.server.realtime.server_events import Event
from mosstalk.session.commands import ReplyMode
from mosstalk.session.events import AudioDelta, Item, ItemAdded, ResponseStarted

PCM = bytes(range(240)) * 4
"""20 ms at 24 kHz."""
APPEND = json.dumps({"type": "input_audio_buffer.append", "audio": base64.b64encode(PCM).decode()})


def least_us(call: Callable[[], object]) -> float:
    """The least time of a call, in microseconds: what else the machine does only adds to it."""
    return min(timeit.repeat(call, number=100, repeat=60)) / 100 * 1e6


def test_a_frame_costs_little_more_than_its_json_and_base64() -> None:
    protocol = caller().protocol
    protocol.from_session(ResponseStarted("resp_1", ReplyMode.AUDIO, True, clock=0))
    item = Item("item_1", "assistant", response_id="resp_1")
    protocol.from_session(ItemAdded(item, None, clock=0))
    delta = AudioDelta("resp_1", "item_1", 0, PCM, clock=0)

    def read() -> bytes:
        return base64.b64decode(json.loads(APPEND)["audio"], validate=True)

    def write() -> str:
        return json.dumps({"delta": base64.b64encode(PCM).decode()})

    def tell() -> list[str]:
        return [event.to_json() for event in protocol.from_session(delta).events]

    heard_us, told_us = least_us(lambda: protocol.from_client(APPEND)), least_us(tell)
    print(f"a frame of 20 ms: append {heard_us:.1f} us, delta {told_us:.1f} us")
    assert heard_us < 8 * least_us(read)
    assert told_us < 8 * least_us(write)


def test_what_is_written_without_a_detour_is_what_the_models_write() -> None:
    client = caller()
    started = ResponseStarted('resp "1"', ReplyMode.AUDIO, True, clock=0)
    item = Item("item\\é", "assistant", response_id=started.response_id)
    added = ItemAdded(item, None, clock=0)
    client.hear(started, added)
    delta = AudioDelta(started.response_id, item.item_id, 0, PCM, clock=0)
    (event,) = client.protocol.from_session(delta).events
    assert event.to_json() == Event.to_json(event)
    assert json.loads(event.to_json())["item_id"] == item.item_id
