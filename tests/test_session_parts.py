"""The parts of a session by themselves."""

import asyncio
import pickle
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import fields, is_dataclass
from random import Random

import numpy as np
import pytest
import soxr
from conftest import run
from engine_rig import engine_core, wild_model
from session_rig import QUESTION, SENTENCE, pocket, speech

from mosstalk.audio.sound import Resampler
from mosstalk.conversation import Conversation, Mode, Reply, Row, SpeechSegment, common_rows
from mosstalk.engine.async_engine import AsyncEngine
from mosstalk.errors import EngineStoppedError, OptionError, SessionError
from mosstalk.runtime.sharing import BatchWorker
from mosstalk.session import commands, events
from mosstalk.session.commands import (
    ROOT,
    Context,
    CreateResponse,
    Durations,
    Pcm,
    Push,
    ReplyLimits,
    SessionSettings,
)
from mosstalk.session.events import AudioDelta, ErrorCode, SpeechStarted
from mosstalk.session.history import (
    EngineConversation,
    Entry,
    History,
    PromptBuilder,
)
from mosstalk.session.response import LONGEST_PERIOD, Detokenizer, RepetitionDetector
from mosstalk.session.session import Timeouts
from mosstalk.session.sound import PlaybackClock, pcm_of, samples_of


def test_what_crosses_processes_needs_no_torch() -> None:
    probe = (
        "import sys, mosstalk.session.commands, mosstalk.session.commands, "
        "mosstalk.session.events; print('torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


@pytest.mark.parametrize("home", [commands, events], ids=["commands", "events"])
def test_every_command_and_event_is_a_frozen_value_with_its_common_field(home: object) -> None:
    base = getattr(home, "Command", None) or events.Event
    common = "command_id" if home is commands else "clock"
    kinds = [k for k in vars(home).values() if isinstance(k, type) and issubclass(k, base)]
    assert len(kinds) > 10
    for kind in kinds:
        assert is_dataclass(kind)
        assert kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
        assert common in {field.name for field in fields(kind)}


def test_values_survive_the_way_to_another_process() -> None:
    for value in (
        SessionSettings(input_rate=8000),
        CreateResponse(metadata={"a": "b"}, command_id="c"),
        SpeechStarted("item_1", 320, clock=4800),
        AudioDelta("resp_1", "item_1", 0, b"\1\0\2\0", clock=3),
    ):
        assert pickle.loads(pickle.dumps(value)) == value
    pushed = pickle.loads(pickle.dumps(Push(np.arange(3, dtype=np.int16))))
    assert pushed.pcm.tolist() == [0, 1, 2]


def test_positions_can_be_read_in_milliseconds() -> None:
    started = SpeechStarted("item_1", 320, clock=4800)
    assert (started.start_ms, started.clock_ms) == (20, 300)
    delta = AudioDelta("resp_1", "item_1", 0, bytes(4800), clock=0)
    assert (delta.samples, delta.audio_ms) == (2400, 100.0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: SessionSettings(input_rate=44_100),
        lambda: ReplyLimits(longest_s=0),
        lambda: ReplyLimits(rows=-1),
        lambda: Durations(idle_s=float("inf")),
        lambda: Context(keep=0.8, full=0.7),
        lambda: Context(full=1.0),
    ],
)
def test_settings_that_mean_nothing_are_refused(make: object) -> None:
    assert callable(make)
    with pytest.raises(OptionError):
        make()


@pytest.mark.parametrize(
    "pcm",
    [
        np.array([0, 16384, -32768], np.int16).tobytes(),
        np.array([0, 16384, -32768], np.int16),
        np.array([0, 0.5, -1], np.float32),
    ],
    ids=["bytes", "int16", "float32"],
)
def test_sound_may_come_as_bytes_or_numbers(pcm: Pcm) -> None:
    samples = samples_of(pcm)
    assert samples.dtype == np.float32
    assert samples.tolist() == [0.0, 0.5, -1.0]


def test_sound_goes_as_int16_clipped() -> None:
    pcm = pcm_of(np.array([0, 1, -1, 7, -7, 1 / 65536], np.float32))
    assert np.frombuffer(pcm, "<i2").tolist() == [0, 32767, -32767, 32767, -32768, 0]


@pytest.mark.parametrize("rate", [8_000, 16_000, 24_000])
def test_a_stream_is_resampled_as_the_whole_is_however_it_is_cut(rate: int) -> None:
    random, sound = Random(rate), speech(QUESTION)
    expected = soxr.resample(sound, rate, 16_000, quality="HQ") if rate != 16_000 else sound
    resampler = Resampler(rate)
    for _ in range(2):  # and again after a flush
        pieces, start = [], 0
        while start < len(sound):
            size = random.choice([1, 7, 160, 4000])
            pieces.append(resampler.push(sound[start : start + size]))
            start += size
        whole = np.concatenate([*pieces, resampler.flush()])
        assert np.array_equal(whole, expected)


def test_no_speech_and_no_pause_is_taken_for_a_runaway_reply() -> None:
    encode = pocket().codec.tokenizer.encode
    import torch

    for path in (QUESTION, SENTENCE):
        pause = np.zeros(24_000, np.float32)  # a second and a half of digital silence
        sound = np.concatenate([speech(path), pause, speech(path)])
        repetition = RepetitionDetector(25)
        assert not any(repetition.add(code) for code in encode(torch.from_numpy(sound)))


@pytest.mark.parametrize("period", range(1, LONGEST_PERIOD + 1))
def test_a_cycle_is_found_once_it_has_lasted(period: int) -> None:
    repetition, random = RepetitionDetector(25), Random(period)
    for _ in range(40):
        assert not repetition.add(random.randrange(1000))
    cycle = [1000 + place for place in range(period)]
    found = [repetition.add(cycle[place % period]) for place in range(period + 25)]
    assert found == [False] * (period + 24) + [True]
    never = RepetitionDetector(None)
    assert not any(never.add(7) for _ in range(100))


def test_text_comes_in_whole_characters_and_is_the_text_of_all_ids() -> None:
    tokenizer = pocket().tokenizer
    text = "Grüße, 你好 🙂! Ωμέγα é."
    ids = list(tokenizer.encode(text))
    stream = Detokenizer(tokenizer)
    pieces = [stream.push(token) for token in ids]
    assert "".join([*pieces, stream.finish()]) == tokenizer.decode(ids) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert "" in pieces  # some characters are several ids
    broken = [next(t for t in ids if tokenizer.decode([t]) == "\ufffd")] * 20
    stream = Detokenizer(tokenizer)
    pieces = [stream.push(token) for token in broken]
    assert "".join([*pieces, stream.finish()]) == "\ufffd" * 20
    assert any(pieces)  # what will never be a character is not waited for


def test_what_was_heard_follows_the_clock_that_is_ahead() -> None:
    samples_s, wall_s = [0.0], [0.0]
    playback = PlaybackClock(lambda: samples_s[0], lambda: wall_s[0])
    playback.sent("a", 1.0)
    playback.sent("a", 0.5)
    playback.sent("b", 1.0)
    assert playback.audible
    samples_s[0], wall_s[0] = 0.7, 0.2
    assert playback.heard_s("a") == pytest.approx(0.7)
    wall_s[0] = 2.0
    assert playback.heard_s("a") == pytest.approx(1.5)
    assert playback.heard_s("b") == pytest.approx(0.5)
    wall_s[0] = 3.0
    assert not playback.audible
    playback.sent("b", 1.0)  # after a gap: it begins now
    wall_s[0] = 3.25
    assert playback.heard_s("b") == pytest.approx(1.25)
    playback.stop()
    wall_s[0] = 9.0
    assert playback.heard_s("b") == pytest.approx(1.25)
    assert not playback.audible
    assert playback.heard_s("nothing") == 0


def test_a_microphone_that_stalls_keeps_its_place_and_one_that_pauses_does_not() -> None:
    samples_s, wall_s = [0.0], [100.0]
    playback = PlaybackClock(lambda: samples_s[0], lambda: wall_s[0])
    assert playback.sent("a", 10.0) == 0.0
    wall_s[0] += 3.0  # nothing comes
    assert playback.pause_s == 0.0
    assert playback.sent("a", 1.0) == 10.0
    samples_s[0] = 3.0  # all of it comes in a burst
    wall_s[0] += 4.0
    assert playback.pause_s == 4.0
    assert playback.audible
    playback.skip(playback.pause_s)
    assert playback.pause_s == 0.0
    assert playback.heard_s("a") == 7.0
    assert playback.sent("a", 1.0) == 7.0  # when 7 s of samples will have come
    wall_s[0] += 6.0
    assert not playback.audible
    assert playback.audible_to_microphone
    assert playback.pause_s == 6.0
    playback.skip(playback.pause_s)
    assert not playback.audible_to_microphone
    assert playback.sent("b", 1.0) == 3.0  # nothing is played: it begins with the next sample


def test_timeouts_are_measured_on_both_clocks() -> None:
    heard_s, wall_s = [0.0], [0.0]
    timeouts = Timeouts(Durations(idle_s=5, longest_s=20), lambda: heard_s[0], lambda: wall_s[0])
    assert timeouts.remaining_s == 5
    heard_s[0] = 4.0
    assert (timeouts.expired(), timeouts.remaining_s) == (None, 1.0)
    wall_s[0] = 5.0
    assert timeouts.expired() == "idle"
    timeouts.touch()
    assert timeouts.expired() is None
    heard_s[0] = 20.0
    assert timeouts.expired() == "longest"
    assert timeouts.remaining_s == 0


def entry(name: str, rows: int, role: str = "user") -> Entry:
    return Entry(name, role, [(len(name), place) for place in range(rows)])


def test_items_keep_their_order() -> None:
    history = History()
    history.insert(entry("b", 1))
    history.insert(entry("d", 1))
    history.insert(entry("a", 1), ROOT)
    history.insert(entry("c", 1), "b")
    assert [each.item_id for each in history] == ["a", "b", "c", "d"]
    assert history.last_id == "d"
    assert history.before(history.find("a")) is None
    assert history.before(history.find("c")) == "b"
    history.remove(history.find("b"))
    for item_id, previous, code in (
        ("a", None, ErrorCode.DUPLICATE_ITEM),
        ("e", "b", ErrorCode.UNKNOWN_ITEM),
    ):
        with pytest.raises(SessionError) as refused:
            history.insert(entry(item_id, 1), previous)
        assert refused.value.code == code


def test_dropping_begins_with_the_oldest_turn_and_leaves_whole_turns() -> None:
    history = History()
    for name, role in (("s", "system"), ("u", "user"), ("a", "assistant"), ("v", "user")):
        history.insert(entry(name, 10, role))
    history.insert(entry("b", 10, "assistant"))
    assert history.drop_oldest(50) == []
    # 45 rows would be left without "u", but then a reply would come first.
    assert [each.item_id for each in history.drop_oldest(45)] == ["u", "a"]
    assert [each.item_id for each in history] == ["s", "v", "b"]
    assert [each.item_id for each in history.drop_oldest(0)] == ["v"]


def test_the_engine_is_told_of_what_changed_alone() -> None:
    random, history = Random(1), History()
    ids, encode = pocket().ids, pocket().tokenizer.encode
    conversation = EngineConversation(AsyncEngine(engine_core(wild_model())), ids, encode)
    known: list[Row] = []
    system: list[Row] = [(1, 1)] * 4
    for number in range(300):
        items, made = list(history), [(random.randrange(3), number) for _ in range(5)]
        before = list(known)
        match random.randrange(6):
            case 0 | 1:
                history.insert(Entry(str(number), "user", made))
            case 2 if items:
                history.insert(Entry(str(number), "user", made), random.choice(items).item_id)
            case 3 if items:
                history.remove(random.choice(items))
            case 4 if items:
                cut = random.choice(items)
                history.rewrite(cut, cut.rows[: random.randrange(6)])
            case 5 if number % 10 == 5:
                system = [(1, 1)] * random.randrange(6)
        assert history.rows == [row for each in history for row in each.rows]
        live = made[: random.randrange(5)]
        edit = conversation._edit(system, history, live)
        if edit:
            known[edit.start :] = edit.rows
        assert known == system + history.rows + live
        # K and V are kept of all that is the same, but where rows that went had come again.
        assert common_rows(before, known) - (edit.start if edit else len(known)) <= 5


def test_turns_are_written_as_conversations_write_them() -> None:
    ids, encode = pocket().ids, pocket().tokenizer.encode
    prompts = PromptBuilder(ids, encode)
    conversation = Conversation(ids, encode)
    conversation.add_text("system", "Be brief.")
    conversation.add_speech("user", [5, 6, 7])
    rows = prompts.text("system", "Be brief.")
    whole = rows + prompts.turn("user", SpeechSegment((5, 6, 7)))
    assert whole == conversation.rows
    live = rows + prompts.open_turn([5, 6, 7])
    assert live == whole[: len(live)]
    assert live[-1] == (ids.modality_pad, 7)
    made: list[Row] = [(ids.modality_pad, code) for code in (1, 2, 3)]
    reply = Reply(made, [Mode.AUDIO] * 3)
    conversation.open_reply(speech=True)
    assert len(conversation.rows) - len(whole) == prompts.prefix_rows
    conversation.close_reply(reply, 2)
    assert whole + prompts.reply(reply, speech=True, heard_codes=2) == conversation.rows


def test_common_rows_are_counted_at_any_length() -> None:
    random = Random(0)
    for _ in range(50):
        some = [(random.randrange(9), 0) for _ in range(random.randrange(700))]
        same = random.randrange(len(some) + 1)
        others = some[:same] + [(-1, 0)] * random.randrange(300)
        expected = min(same, len(some))
        assert common_rows(some, others) == common_rows(others, some) == expected


def held(
    batcher: "BatchWorker[float, float]",
) -> tuple[Callable[[], Awaitable[None]], asyncio.Event]:
    """Something that keeps the thread busy until the event is set."""
    loop, begun, release = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()

    def hold() -> None:
        loop.call_soon_threadsafe(begun.set)
        asyncio.run_coroutine_threadsafe(release.wait(), loop).result(30)

    async def start() -> None:
        batcher.post(hold)
        await begun.wait()

    return start, release


@pytest.mark.parametrize(("most", "expected"), [(1, [[1], [2], [3]]), (2, [[1, 2], [3]])])
def test_batches_take_the_most_urgent_together_and_drop_what_nobody_waits_for(
    most: int, expected: list[list[float]]
) -> None:
    runs = list[list[float]]()

    def work(given: list[float]) -> list[float | Exception]:
        runs.append(given)
        return [ZeroDivisionError() if each == 2 else -each for each in given]

    async def main() -> None:
        batcher = BatchWorker("test", work, most)
        start, release = held(batcher)
        await start()
        jobs = [batcher.put(due_s, due_s) for due_s in (3.0, 1.0, 2.0, 0.5)]
        jobs[3].cancel()
        await asyncio.gather(jobs[3], return_exceptions=True)
        release.set()
        assert list(await asyncio.gather(jobs[0], jobs[1])) == [-3.0, -1.0]
        with pytest.raises(ZeroDivisionError):  # its own error, and nobody else's
            await jobs[2]
        assert runs == expected
        assert await batcher.run(lambda: 1) == 1
        with pytest.raises(ZeroDivisionError):
            await batcher.run(lambda: 1 // 0)
        await asyncio.to_thread(batcher.stop)
        with pytest.raises(EngineStoppedError):
            await batcher.put(1.0, 1.0)

    run(main())


def test_what_is_posted_is_done_by_itself_and_before_what_waits() -> None:
    order = list[object]()

    def work(given: list[float]) -> list[float]:
        order.append(given)
        return given

    async def main() -> None:
        batcher = BatchWorker("test", work, 8)
        start, release = held(batcher)
        await start()
        jobs = [batcher.put(due_s, due_s) for due_s in (1.0, 2.0)]
        batcher.post(lambda: order.append("posted"))
        release.set()
        await asyncio.gather(*jobs)
        assert order == ["posted", [1.0, 2.0]]
        await asyncio.to_thread(batcher.stop)

    run(main())


def test_gathered_calls_are_done_together_and_each_gets_its_own() -> None:
    runs = list[list[int]]()

    def work(given: list[int]) -> list[int]:
        runs.append(given)
        if -1 in given:
            raise ValueError("one of these")
        return [10 * each for each in given]

    async def main() -> None:
        batcher = BatchWorker[int, int]("test", work)
        found = await asyncio.gather(*(batcher.put(number) for number in range(20)))
        assert found == [10 * number for number in range(20)]
        assert [number for given in runs for number in given] == list(range(20))
        with pytest.raises(ValueError, match="one of these"):
            await batcher.put(-1)
        assert await batcher.put(7) == 70
        await asyncio.to_thread(batcher.stop)
        with pytest.raises(EngineStoppedError):
            await batcher.put(1)

    run(main())


def test_calls_that_can_wait_go_with_the_next_run_and_begin_none_for_a_while() -> None:
    runs, begun_s = list[list[int]](), list[float]()

    def work(given: list[int]) -> list[int]:
        runs.append(given)
        begun_s.append(time.monotonic())
        return given

    async def main() -> None:
        soon = BatchWorker[int, int]("test", work, batch_delay_s=0.25)
        assert await soon.put(1) == 1  # nothing was done before: nobody is waited for
        assert list(await asyncio.gather(soon.put(2), soon.put(3))) == [2, 3]
        assert begun_s[1] - begun_s[0] >= 0.25
        await asyncio.to_thread(soon.stop)

        never = BatchWorker[int, int]("test", work, batch_delay_s=3600.0)
        assert await never.put(4) == 4
        waiting = [never.put(5), never.put(6)]
        assert await never.run(lambda: "a job") == "a job"
        assert not any(each.done() for each in waiting)
        assert await never.put(7, 0.0) == 7
        assert [await each for each in waiting] == [5, 6]
        late = never.put(8)
        await asyncio.to_thread(never.stop)
        with pytest.raises(EngineStoppedError):
            await late
        assert runs == [[1], [2, 3], [4], [7, 5, 6]]

    run(main())


def test_a_call_is_taken_back_unless_it_has_begun() -> None:
    async def main() -> None:
        batcher = BatchWorker[float, float]("test", lambda given: given)
        start, release = held(batcher)
        await start()
        first, second = batcher.put(1.0), batcher.put(2.0)
        assert batcher.take_back(first)
        assert first.cancelled()
        assert not batcher.take_back(first)
        release.set()
        assert await second == 2.0
        assert not batcher.take_back(second)
        await asyncio.to_thread(batcher.stop)

    run(main())
