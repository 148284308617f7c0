"""The page in a real browser: it speaks to a real server, hears the answer, and interrupts it.

The browser's microphone plays a recording of a person; what the page plays is taken from its
audio thread and held against what the server sent.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import soxr
from browser_rig import (
    RATE,
    SENTENCE,
    Pcm,
    Sound,
    Visit,
    browsing,
    levels,
    ratio_db,
    rounded,
    said,
    speech,
    visit,
)
from conftest import QUESTION
from server_rig import Server, serving

from mosstalk.audio.sound import Samples

pytestmark = [pytest.mark.system, pytest.mark.alone, pytest.mark.timeout(240)]

KEY = "a-key-for-tests"
LONG_CODES = 75
"""Six seconds of answer: so long that it can be interrupted on a busy machine too."""
LAG_MS = 10
"""Sound between the audio thread's queue and its output, at most."""
CODE_MS = 80
BROWSER_MS = 600
"""What transport, jitter buffer and sound output may add on a busy machine."""


@pytest.fixture(scope="module")
def server(cache_folder: Path) -> Iterator[Server]:
    """A server whose answers are long, and made fast enough to be heard without a gap."""
    words = ("--script", f"speech:{LONG_CODES}", "--seed", "1", "--flow-steps", "2")
    with serving(*words, cache=cache_folder) as running:
        yield running


@pytest.fixture(scope="module")
def with_a_key(cache_folder: Path) -> Iterator[Server]:
    """A server with a key, for one at a time, that finds no ends of turns."""
    words = ("--api-key", KEY, "--max-sessions", "1", "--vad", "none", "--seed", "1")
    with serving(*words, "--allow-origin", "*", cache=cache_folder) as running:
        running.headers = {"Authorization": f"Bearer {KEY}"}
        yield running


@pytest.fixture
def private(with_a_key: Server) -> Server:
    """That server, once the visitor before is gone: a browser closes without waiting for it."""
    with_a_key.await_nothing_held()
    return with_a_key


# Hands-free.


def test_an_answer_is_heard_as_it_was_sent_and_speech_interrupts_it(server: Server) -> None:
    spoken = said(1.0, speech(QUESTION), 3.6, speech(SENTENCE), 60.0)
    with browsing(spoken) as browser:
        visitor = start_hands_free(visit(browser, server.url))
        first = visitor.told("started")["item"]
        cut = visitor.event("conversation.item.truncate", what="sent")
        second = visitor.told("started", 2)["item"]
        visitor.told("ended")

        assert cut["item_id"] == first
        truncated = visitor.event("conversation.item.truncated")
        assert truncated["audio_end_ms"] == cut["audio_end_ms"]
        assert truncated["mosstalk"] == {
            "codes": math.ceil(cut["audio_end_ms"] / CODE_MS),
            "by_server": False,
        }
        check_played(visitor, first, cut["audio_end_ms"], second)
        check_figures(visitor, turns=(1, 2))
        assert visitor.replies(".note") == [
            f"stopped after {cut['audio_end_ms'] / 1000:.1f} s",
            "sound, 6.0 s",
        ]
        heard = [e["item"]["role"] for e in visitor.events("conversation.item.done")]
        assert heard == ["user", "assistant", "user", "assistant"]
        check_microphone(visitor.sent_pcm(), speech(QUESTION))
        visitor.require_no_complaints()


def start_hands_free(visitor: Visit) -> Visit:
    visitor.page.get_by_role("button", name="Talk", exact=True).click()
    visitor.status("waiting")
    return visitor


def check_played(visitor: Visit, first: str, cut_ms: int, second: str) -> None:
    """All samples of the second answer, and of the first those that were heard, exactly."""
    played, answer = visitor.played_pcm(), visitor.received_pcm(second)
    assert len(answer) == LONG_CODES * CODE_MS * RATE // 1000
    assert np.array_equal(played[-len(answer) :], answer)
    begun = played[: -len(answer)]
    assert np.array_equal(begun, visitor.received_pcm(first)[: len(begun)])
    assert 0 <= 1000 * len(begun) / RATE - cut_ms <= LAG_MS
    (ended,) = visitor.all("ended")
    assert ended["samples"] == len(answer)
    check_resampled(visitor, answer)


def check_resampled(visitor: Visit, answer: Pcm) -> None:
    """What left the audio thread is the answer at the context's rate, and it ends with it."""
    sound, first_frame = visitor.heard()
    rate = visitor.page.evaluate("new AudioContext().sampleRate")
    started = visitor.told("started", 2)["frame"] - first_frame
    if visitor.all("dry"):
        return  # the machine was too slow: there are gaps in it
    wanted = soxr.resample(answer / np.float32(32768), RATE, rate)
    heard = sound[max(started - 200, 0) :]
    assert ratio_db(passed(wanted, rate)[: 3 * rate], passed(heard, rate)) > 30


def passed(sound: Sound, rate: int) -> Sound:
    """What the page's filter lets through whole: it begins to fall at 9.8 kHz."""
    spectrum = np.fft.rfft(sound)
    spectrum[np.fft.rfftfreq(len(sound), 1 / rate) > 9000] = 0
    return np.fft.irfft(spectrum, len(sound))


def check_figures(visitor: Visit, turns: tuple[int, ...]) -> None:
    """The browser's own measurement is the server's, and what comes after it."""
    for number in turns:
        turn = visitor.turn(number)
        server = turn["server"]
        inside_ms = server["speech_to_first_audio_ms"] or server["commit_to_first_audio_ms"]
        assert inside_ms < turn["answerMs"] < inside_ms + BROWSER_MS
        cells = visitor.cells(number)
        assert cells[1] == rounded(turn["answerMs"])
        assert cells[3] == rounded(server["commit_to_first_audio_ms"])
        # Rounded, four parts are at most two off their sum.
        parts = sum(int(cell) for cell in cells[2:] if cell.isdigit())
        assert abs(parts - turn["answerMs"]) <= 2
        if turn["kind"] == "hands-free":
            assert 500 <= turn["waitMs"] == server["vad_wait_ms"] <= 600
    assert visitor.page.locator("#latest").inner_text() == f"{visitor.cells(turns[-1])[1]} ms"


def check_microphone(sent: Pcm, spoken: Samples) -> None:
    """The recording arrived: browsers clean it, so its loudness is compared, 20 ms by 20 ms."""
    sent_levels, spoken_levels = (levels(each) for each in (sent / 32768, spoken))
    matches = [
        np.corrcoef(sent_levels[place : place + len(spoken_levels)], spoken_levels)[0, 1]
        for place in range(100)
    ]
    assert max(matches) > 0.9


def test_an_answer_that_the_microphone_hears_does_not_interrupt_itself(server: Server) -> None:
    with browsing(said(1.0, speech(QUESTION), 60.0)) as browser:
        visitor = start_hands_free(visit(browser, server.url, debug="tap,loop"))
        item = visitor.told("started")["item"]
        visitor.wait("kept.all.some((e) => e.what === 'ended' || e.event?.audio_end_ms >= 0 && "
                     "e.event.type === 'conversation.item.truncate')")  # fmt: skip
        if visitor.all("dry"):
            pytest.skip(
                "answers are made more slowly than they are heard here: no echo is like that"
            )
        # What came back 120 ms later is heard and judged by then.
        visitor.wait("kept.all.filter((e) => e.what === 'sent').length > value", sent_by(visitor))
        check_echo(visitor, item)
        assert len(visitor.events("input_audio_buffer.speech_started")) == 1
        assert not visitor.events("conversation.item.truncate", "sent")
        assert len(visitor.events("response.done")) == 1
        visitor.status("waiting")
        visitor.require_no_complaints()


def sent_by(visitor: Visit) -> int:
    """How many events will have been sent a second from now."""
    return len(visitor.all("sent")) + 50


def check_echo(visitor: Visit, item: str) -> None:
    """The server did hear its answer come back, 10 dB quieter."""
    answer, sent = (each / 32768 for each in (visitor.received_pcm(item), visitor.sent_pcm()))
    loud = passed(answer, RATE)[: 2 * RATE]
    assert ratio_db(loud, passed(sent, RATE)) > 20
    echo = np.abs(sent[-len(answer) :]).max() / np.abs(answer).max()
    assert -13 < 20 * np.log10(echo) < -7


def test_a_user_interrupts_an_answer_that_the_microphone_hears(server: Server) -> None:
    with browsing(said(1.0, speech(QUESTION), 3.6, speech(SENTENCE), 60.0)) as browser:
        visitor = start_hands_free(visit(browser, server.url, debug="tap,loop"))
        item = visitor.told("started")["item"]
        assert visitor.event("conversation.item.truncate", what="sent")["item_id"] == item
        visitor.told("started", 2)


# Press to talk.


def test_keys_hold_a_turn_and_escape_stops_the_answer(server: Server) -> None:
    with browsing(said(0.3, speech(QUESTION), 60.0)) as browser:
        visitor = start(visit(browser, server.url))
        visitor.page.keyboard.down("Space")
        visitor.status("hearing")
        visitor.wait("kept.all.filter((e) => e.what === 'sent').length > 170")
        visitor.page.keyboard.up("Space")
        item = visitor.told("started")["item"]
        visitor.wait("document.getElementById('interrupt').disabled === false")
        visitor.page.keyboard.press("Escape")
        cut = visitor.event("conversation.item.truncate", what="sent")
        visitor.event("conversation.item.truncated")
        visitor.event("response.done")
        visitor.status("waiting")
        heard_ms = 1000 * len(visitor.played_pcm()) / RATE
        assert (cut["item_id"], cut["content_index"]) == (item, 0)
        assert 0 <= heard_ms - cut["audio_end_ms"] <= LAG_MS
        check_figures(visitor, turns=(1,))
        assert visitor.turn(1)["kind"] == "held"
        visitor.require_no_complaints()


HELD_BACK = """
const devices = navigator.mediaDevices;
const open = devices.getUserMedia.bind(devices);
const allowed = new Promise((allow) => (window.allow = allow));
devices.getUserMedia = async (wanted) => (await allowed, open(wanted));
"""
"""The browser asks for the microphone until the test calls ``allow``."""


def test_until_there_is_a_microphone_the_page_asks_for_it(server: Server) -> None:
    with browsing(said(0.3, speech(QUESTION), 60.0)) as browser:
        browser.add_init_script(HELD_BACK)
        visitor = visit(browser, server.url)
        talk = visitor.page.locator("#press")
        visitor.page.get_by_label("Hold to talk").check()
        talk.click()
        visitor.status("asking")
        assert talk.is_disabled()
        assert "asks for the microphone" in visitor.page.locator("#status").inner_text()
        visitor.page.evaluate("window.allow()")
        visitor.status("waiting")
        visitor.page.keyboard.down("Space")
        visitor.status("hearing")
        visitor.require_no_complaints()


def start(visitor: Visit) -> Visit:
    visitor.page.get_by_label("Hold to talk").check()
    visitor.page.get_by_role("button", name="Talk", exact=True).click()
    visitor.status("waiting")
    return visitor


def test_on_a_phone_one_tap_begins_a_turn_and_another_sends_it(server: Server) -> None:
    phone = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True}
    with browsing(said(0.3, speech(QUESTION), 60.0), **phone) as browser:
        visitor = visit(browser, server.url)
        visitor.page.get_by_text("Hold to talk").tap()
        visitor.page.get_by_role("button", name="Talk", exact=True).tap()
        visitor.status("waiting")
        talk = visitor.page.locator("#press")
        talk.tap()
        visitor.status("hearing")
        visitor.wait("kept.all.filter((e) => e.what === 'sent').length > 20")
        talk.tap()
        visitor.status("speaking")
        talk.tap()  # interrupts, and listens
        visitor.event("conversation.item.truncate", what="sent")
        visitor.status("hearing")
        visitor.page.keyboard.press("Escape")
        visitor.status("waiting")
        talk.evaluate("(button) => button.click()")  # as screen readers do
        visitor.status("hearing")
        assert not visitor.events("error")
        across = visitor.page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert across[0] <= across[1]
        assert min(visitor.page.evaluate(BUTTON_HEIGHTS)) >= 44
        visitor.require_no_complaints()


BUTTON_HEIGHTS = """[...document.querySelectorAll("button")]
    .map((button) => button.getBoundingClientRect().height).filter((height) => height)"""


# In writing, with a key, and when something is not as it should be.


def test_a_key_is_asked_for_and_a_typed_turn_is_answered_in_text(private: Server) -> None:
    with browsing(None) as browser:
        visitor = visit(browser, private.url)
        page = visitor.page
        choose_text(visitor)
        write(visitor, "Good morning.")
        visitor.status("key")
        give_key(visitor, "a wrong one")
        page.get_by_text("does not know this key").wait_for()
        refused = [text for text in visitor.complaints if "401" in text]
        assert visitor.complaints == refused
        visitor.complaints.clear()
        give_key(visitor, KEY)
        done = visitor.event("response.done")["response"]
        text = done["output"][0]["content"][0]["text"]
        visitor.status("waiting")
        assert page.locator("#log li[data-who=you]").inner_text().endswith("Good morning.")
        assert text
        assert page.locator("#log li[data-who=reply] .text").inner_text() == text.strip()
        assert page.locator("#read-out").inner_text() == text.strip()
        turn = visitor.turn(1)
        assert done["mosstalk"]["timings"]["commit_to_first_text_ms"] < turn["answerMs"]
        stored = "JSON.stringify([Object.values(sessionStorage), localStorage.length])"
        assert json.loads(page.evaluate(stored)) == [[KEY], 0]
        visitor.require_no_complaints()


def choose_text(visitor: Visit) -> None:
    visitor.page.get_by_text("Settings:").click()
    visitor.page.get_by_label("Reply as").select_option("text")


def write(visitor: Visit, text: str) -> None:
    visitor.page.get_by_role("textbox", name="A turn in writing").fill(text)
    visitor.page.keyboard.press("Enter")


def give_key(visitor: Visit, key: str) -> None:
    visitor.page.get_by_label("API key").fill(key)
    visitor.page.keyboard.press("Enter")


def test_choices_reach_the_session(private: Server) -> None:
    with browsing(None) as browser:
        visitor = visit(browser, private.url)
        visitor.page.get_by_text("Settings:").click()
        visitor.page.get_by_label("Temperature").fill("0.5")
        visitor.page.get_by_label("Seed").fill("7")
        visitor.page.get_by_label("Instructions").fill("Be brief.")
        write(visitor, "Hello.")
        give_key(visitor, KEY)
        visitor.event("session.updated")
        visitor.page.get_by_role("combobox", name="Voice").select_option("default")
        session = visitor.event("session.updated", 2)["session"]
        assert session["instructions"] == "Be brief."
        assert session["audio"]["output"]["voice"] == "default"
        assert session["audio"]["input"]["turn_detection"] is None
        sampling = session["mosstalk"]["sampling"]
        assert (sampling["temperature"], sampling["seed"], sampling["top_p"]) == (0.5, 7, None)
        visitor.told("started")


def test_who_finds_the_server_full_is_told_and_gets_in_later(private: Server) -> None:
    with browsing(None) as browser:
        first, second = (visit(browser, private.url) for _ in range(2))
        for visitor in (first, second):
            write(visitor, "Hello.")
        give_key(first, KEY)
        first.told("started")
        give_key(second, KEY)
        second.status("waiting")
        notice = second.page.get_by_role("alert")
        assert "takes no new session" in notice.inner_text()
        assert "Trying again in" in notice.inner_text()
        first.page.close()
        second.told("started")
        assert not notice.is_visible()


def test_a_microphone_that_is_missing_is_told_with_what_to_do(private: Server) -> None:
    with browsing(None) as browser:
        visitor = visit(browser, private.url)
        visitor.page.get_by_role("button", name="Talk", exact=True).click()
        visitor.page.get_by_text("No microphone was found. Connect one").wait_for()
        give_key(visitor, KEY)
        visitor.status("waiting")
        status = visitor.page.locator("#status").inner_text()
        assert status == "No microphone was found. You can write."
        assert visitor.page.get_by_role("button", name="Talk", exact=True).is_enabled()
        assert not visitor.page.locator("#hint").is_visible()


def test_over_plain_http_the_page_says_why_and_writes(private: Server) -> None:
    port = private.url.rpartition(":")[2]
    with browsing(None, "--host-resolver-rules=MAP talk.test 127.0.0.1") as browser:
        visitor = visit(browser, f"http://talk.test:{port}")
        visitor.page.get_by_text(f"ssh -L 8000:localhost:{port} talk.test").wait_for()
        assert "--tls-self-signed" in visitor.page.get_by_role("alert").inner_text()
        assert "The microphone is withheld" in visitor.page.locator("#status").inner_text()
        write(visitor, "Hello.")
        give_key(visitor, KEY)
        response = visitor.event("response.done")["response"]
        assert response["output_modalities"] == ["text"]
        assert response["status"] == "completed"


def test_by_https_a_page_from_another_machine_has_the_microphone(cache_folder: Path) -> None:
    words = ("--tls-self-signed", "--allowed-host", "talk.test", "--seed", "1")
    names = "--host-resolver-rules=MAP talk.test 127.0.0.1"
    spoken = said(1.0, speech(QUESTION), 60.0)
    with (
        serving(*words, cache=cache_folder) as server,
        browsing(spoken, names, ignore_https_errors=True) as browser,
    ):
        visitor = visit(browser, f"https://talk.test:{server.url.rpartition(':')[2]}")
        start_hands_free(visitor)
        visitor.told("started")
        assert visitor.event("response.done")["response"]["status"] == "completed"
        assert not visitor.complaints


def test_a_server_that_ends_is_told_and_come_back_to(cache_folder: Path) -> None:
    with serving("--vad", "none", cache=cache_folder) as server, browsing(None) as browser:
        visitor = visit(browser, server.url)
        write(visitor, "Hello.")
        visitor.told("started")
        server.stop()
        visitor.page.get_by_text("The connection was lost").wait_for()
        visitor.page.get_by_role("button", name="Connect now").click()
        visitor.page.get_by_text("The server cannot be reached").wait_for()


# What can be seen without a conversation.

CONTROLS = {
    "button", "checkbox", "combobox", "link", "listbox", "radio", "slider", "spinbutton",
    "textbox", "DisclosureTriangle",
}  # fmt: skip


def test_every_control_and_picture_has_a_name(server: Server) -> None:
    with browsing(None) as browser:
        visitor = visit(browser, server.url)
        visitor.page.get_by_text("Settings:").click()
        visitor.page.evaluate("for (const each of document.querySelectorAll('[hidden]'))"
                              " each.hidden = false")  # fmt: skip
        devtools = browser.new_cdp_session(visitor.page)
        nodes = devtools.send("Accessibility.getFullAXTree")["nodes"]
        told = [
            (node["role"]["value"], node.get("name", {}).get("value", ""))
            for node in nodes
            if not node["ignored"]
        ]
        controls = [each for each in told if each[0] in CONTROLS]
        assert len(controls) >= 20
        assert not [role for role, name in controls if not name.strip()]
        assert {"status", "alert", "main", "banner", "contentinfo"} <= {role for role, _ in told}
        assert not [name for role, name in told if role == "image" and not name]
        visitor.require_no_complaints()


def test_the_keyboard_reaches_everything(server: Server) -> None:
    with browsing(None) as browser:
        page = visit(browser, server.url).page
        page.get_by_text("Settings:").click()
        page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
        reached = []
        for _ in range(40):
            page.keyboard.press("Tab")
            reached.append(page.evaluate(FOCUSED))
        wanted = {
            "language", "theme", "press", "anew", "turns", "volume", "text", "say",
            "microphone", "loudspeaker", "reply", "preset", "voice", "preview", "echo",
        }  # fmt: skip
        assert wanted <= set(reached)


FOCUSED = "document.activeElement.id || document.activeElement.name"


def test_calm_eyes_get_a_meter_and_the_night_its_colours(server: Server) -> None:
    calm = {"reduced_motion": "reduce", "color_scheme": "dark"}
    with browsing(said(speech(QUESTION), 60.0), **calm) as browser:
        visitor = start(visit(browser, server.url))
        # Scrolling peaks have a bar at the right edge, and in the beginning none at the left.
        visitor.wait(f"{DRAWN}(1) && !{DRAWN}(-3)")
        ground = "getComputedStyle(document.body).backgroundColor"
        night = visitor.page.evaluate(ground)
        visitor.page.get_by_label("Colours").select_option("light")
        assert visitor.page.evaluate(ground) != night


DRAWN = """((x) => {
    const canvas = document.getElementById("wave-you");
    const at = x < 0 ? canvas.width + x : x;
    const pixel = canvas.getContext("2d").getImageData(at, Math.floor(canvas.height / 2), 1, 1);
    return pixel.data[3] > 0;
})"""
