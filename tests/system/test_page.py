"""What the page offers besides the talk itself, in a real browser against a real server."""

import json
import wave
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from browser_rig import (
    PHONE,
    PICTURES,
    RATE,
    Pcm,
    Visit,
    browsing,
    draw,
    levels,
    rounded,
    said,
    speech,
    visit,
)
from conftest import QUESTION, require_package
from server_rig import Server, serving

pytestmark = [pytest.mark.system, pytest.mark.alone, pytest.mark.timeout(240)]

CAPITAL = "What is the capital of France?"
ASK = {"name": "A turn in writing"}
PAUSE_MS = 400
"""Between the turns of a conversation that is saved."""


@pytest.fixture(scope="module")
def server(cache_folder: Path) -> Iterator[Server]:
    """A server that talks with the model that ships, the same each time."""
    with serving("--temperature", "0", "--seed", "1", cache=cache_folder) as running:
        yield running


def ask_for_the_capital(visitor: Visit) -> str:
    """Press the first of the questions; the id of the answer, once it was heard."""
    visitor.page.get_by_role("button", name=CAPITAL).click()
    visitor.told("ended")
    return str(visitor.told("started")["item"])


def pcm_of_wav(content: bytes) -> Pcm:
    with wave.open(BytesIO(content)) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (RATE, 1, 2)
        return np.frombuffer(file.readframes(file.getnframes()), "<i2")


# The conversation in words and sound.


def test_the_first_question_is_answered_in_words_and_sound_to_keep(server: Server) -> None:
    with browsing(None) as browser:
        visitor = visit(browser, server.url)
        page = visitor.page
        page.get_by_text("knows short questions in English").wait_for()
        assert page.locator("#questions button").count() == 3
        item = ask_for_the_capital(visitor)
        assert not page.locator("#intro").is_visible()
        assert page.locator("#log li[data-who=you] .text").all_inner_texts() == [CAPITAL]
        (answer,) = visitor.replies(".text")
        assert "Paris" in answer

        received = visitor.received_pcm(item)
        bubble = page.locator("#log li[data-who=reply]")
        saved = visitor.saved(bubble.get_by_role("button", name="Save"))
        assert np.array_equal(pcm_of_wav(saved), received)
        whole = pcm_of_wav(visitor.saved(page.get_by_role("button", name="Save sound")))
        assert np.array_equal(whole[: len(received)], received)
        assert len(whole) - len(received) == PAUSE_MS * RATE // 1000
        assert not whole[len(received) :].any()

        told = json.loads(visitor.saved(page.get_by_role("button", name="Save text")))
        texts = [(line["role"], line["text"]) for line in told["lines"]]
        assert texts == [("user", CAPITAL), ("assistant", answer)]
        assert told["lines"][1]["heard_ms"] == round(1000 * len(received) / RATE)
        assert (told["model"], told["weights"]) == ("mosstalk-pocket", "pocket")
        assert told["turns"][0]["answer_ms"] == visitor.turn(1)["answerMs"]
        visitor.require_no_complaints()


def test_what_the_user_said_is_kept_and_written_down(cache_folder: Path) -> None:
    require_package("faster_whisper", "transcribe")
    words = ("--transcriber", "whisper-tiny", "--seed", "1")
    spoken = speech(QUESTION)
    with (
        serving(*words, cache=cache_folder) as server,
        browsing(said(1.0, spoken, 60.0)) as browser,
    ):
        visitor = visit(browser, server.url)
        visitor.page.get_by_role("button", name="Talk", exact=True).click()
        done = visitor.event("conversation.item.input_audio_transcription.completed")
        bubble = visitor.page.locator("#log li[data-who=you]")
        bubble.locator(".text").get_by_text(done["transcript"].strip()).wait_for()
        kept = pcm_of_wav(visitor.saved(bubble.get_by_role("button", name="Save"))) / 32768
        # Browsers clean the microphone, so loudness is compared; the beginning has a margin.
        ours, heard = levels(spoken), levels(kept)
        least = min(len(ours), len(heard)) * 3 // 4
        alike = [
            np.corrcoef(ours[at : at + least], heard[by : by + least])[0, 1]
            for at in range(len(ours) - least + 1)
            for by in range(len(heard) - least + 1)
        ]
        assert max(alike) > 0.9
        visitor.require_no_complaints()


def test_a_reply_is_played_again_and_the_microphone_does_not_hear_it(server: Server) -> None:
    with browsing(said(speech(QUESTION), speech(QUESTION), speech(QUESTION), 60.0)) as browser:
        visitor = visit(browser, server.url)
        page = visitor.page
        ask_for_the_capital(visitor)
        play = page.locator("#log li[data-who=reply] .play")
        play.click()
        page.get_by_role("button", name="Talk", exact=True).click()
        visitor.wait("kept.all.some((e) => e.event?.type === 'input_audio_buffer.append')")
        page.locator(".play").get_by_text("Stop").wait_for()
        played = visitor.sent_pcm()
        assert len(played)
        assert not played.any()
        play.get_by_text("Play").wait_for()  # to its end
        visitor.wait("kept.all.filter((e) => e.what === 'sent').length > value",
                     len(visitor.all("sent")) + 20)  # fmt: skip
        assert visitor.sent_pcm()[len(played) :].any()
        visitor.require_no_complaints()


def test_a_new_conversation_begins_with_nothing(server: Server) -> None:
    with browsing(None) as browser:
        visitor = visit(browser, server.url)
        page = visitor.page
        ask_for_the_capital(visitor)
        page.get_by_role("button", name="New conversation").click()
        assert not page.locator("#log li").count()
        page.get_by_text("No turn yet.").wait_for()
        page.get_by_role("button", name=CAPITAL).click()
        visitor.told("ended", 2)
        sessions = [event["session"]["id"] for event in visitor.events("session.created")]
        assert len(set(sessions)) == 2
        texts = page.locator("#log li .text").all_inner_texts()
        assert len(texts) == 2
        assert visitor.cells(1)[1] == rounded(visitor.turn(1)["answerMs"])
        visitor.require_no_complaints()


AWAY = """
window.away = true;
const add = AudioWorklet.prototype.addModule;
AudioWorklet.prototype.addModule = function (url) {
  if (window.away) return Promise.reject(new DOMException("Unable to load", "AbortError"));
  return add.call(this, url);
};
"""
"""The audio thread's file cannot be fetched, as from a server that has gone since the page came."""


def test_who_writes_while_the_server_is_away_is_told_and_answered_once_it_is_back(
    server: Server,
) -> None:
    lines = "What is the capital", "of France?"
    with browsing(None) as browser:
        browser.add_init_script(AWAY)
        visitor = visit(browser, server.url)
        page = visitor.page
        for line in lines:
            page.get_by_role("textbox", name="A turn in writing").fill(line)
            page.keyboard.press("Enter")
            page.get_by_text("The server cannot be reached.").wait_for()
            page.get_by_role("button", name="Dismiss").click()
            assert page.locator("#status").inner_text() == "Not connected."
        page.evaluate("window.away = false")
        page.get_by_role("button", name="Talk", exact=True).click()
        item = visitor.event("conversation.item.create", what="sent")["item"]
        assert item["content"][0]["text"] == "\n".join(lines)
        visitor.told("ended")


# Time to the answer.


def test_the_plot_shows_what_each_answer_waited_for(server: Server) -> None:
    with browsing(None) as browser:
        visitor = visit(browser, server.url)
        page = visitor.page
        ask_for_the_capital(visitor)
        assert not page.locator("#plot svg").is_visible()
        page.get_by_text("What it is made of").click()
        assert page.locator("#plot svg").is_visible()
        page.get_by_role("textbox", **ASK).fill("Tell me a joke.")
        page.keyboard.press("Enter")
        visitor.told("ended", 2)
        visitor.event("response.done", 2)
        for number in (1, 2):
            turn = visitor.turn(number)
            _, answer, _, made, output, rest = visitor.cells(number)
            assert int(answer) == round(turn["answerMs"])
            assert abs(int(made) + int(output) + int(rest) - int(answer)) <= 2
        servers = page.locator("#plot rect.server").evaluate_all(HEIGHTS)
        cells = [float(visitor.cells(number)[3]) for number in (1, 2)]
        assert servers[0] / servers[1] == pytest.approx(cells[0] / cells[1], rel=0.02)
        visitor.require_no_complaints()


HEIGHTS = "(bars) => bars.map((bar) => Number(bar.getAttribute('height')))"


# Settings.


LISTEN = """
const joined = AudioNode.prototype.connect;
AudioNode.prototype.connect = function (to, ...more) {
  if (to === this.context.destination) {
    window.last = new AnalyserNode(this.context, { fftSize: 32768 });
    joined.call(this, window.last);
  }
  return joined.call(this, to, ...more);
};
window.loudest = () => {
  const sound = new Float32Array(32768);
  window.last.getFloatTimeDomainData(sound);
  return Math.max(...sound.map(Math.abs));
};
"""
"""``loudest()`` is the loudest sample that has just gone to the loudspeaker."""


def test_microphone_loudspeaker_and_volume_are_chosen(server: Server) -> None:
    with browsing(said(60.0)) as browser:
        browser.add_init_script(LISTEN)
        visitor = visit(browser, server.url)
        page = visitor.page
        page.get_by_role("button", name="Talk", exact=True).click()
        visitor.status("waiting")
        page.get_by_text("Settings:").click()
        for label in ("Microphone", "Loudspeaker"):
            chosen = page.get_by_role("combobox", name=label)
            names = chosen.locator("option").all_inner_texts()
            assert len(names) > 1, names
            assert all(names)
            chosen.select_option(index=1)
        used = "navigator.mediaDevices.enumerateDevices().then((all) => all.map((d) => d.deviceId))"
        ids = page.evaluate(used)
        assert page.get_by_role("combobox", name="Loudspeaker").input_value() in ids
        page.get_by_label("Volume").fill("0")
        ask_for_the_capital(visitor)
        assert page.evaluate("window.loudest()") == 0
        page.get_by_label("Volume").fill("50")
        page.get_by_role("textbox", **ASK).fill(CAPITAL)
        page.keyboard.press("Enter")
        second = visitor.told("started", 2)["item"]
        visitor.wait("window.loudest() > 0.01")
        visitor.told("ended", 2)
        assert page.evaluate("window.loudest()") < 0.7 * np.abs(visitor.received_pcm(second)).max()
        visitor.require_no_complaints()


PLAYED = """
const play = HTMLMediaElement.prototype.play;
HTMLMediaElement.prototype.play = function () {
  this.addEventListener("ended", () => (window.playedS = this.currentTime));
  return play.call(this);
};
"""
"""``playedS`` is how much of a file was played, once it has ended."""


def test_a_voice_is_heard_before_it_is_chosen(server: Server) -> None:
    with browsing(None) as browser:
        browser.add_init_script(PLAYED)
        visitor = visit(browser, server.url)
        page = visitor.page
        page.get_by_text("Settings:").click()
        voices = page.get_by_role("combobox", name="Voice").locator("option").all_inner_texts()
        assert voices == ["the server's own", "default"]
        preview = page.locator("#preview")
        with page.expect_response("**/v1/audio/speech") as answered:
            preview.click()
        assert answered.value.status == 200
        preview.get_by_text("Stop").wait_for()
        visitor.wait("window.playedS > 1")
        preview.get_by_text("Hear this voice").wait_for()
        visitor.require_no_complaints()


def test_presets_reach_the_session(server: Server) -> None:
    with browsing(None) as browser:
        visitor = visit(browser, server.url)
        page = visitor.page
        page.get_by_text("Settings:").click()
        ask_for_the_capital(visitor)
        preset = page.get_by_role("combobox", name="Preset")
        preset.select_option("steady")
        preset.select_option("patient")
        steady, patient = (settled(visitor, count) for count in (2, 3))
        sampling = steady["mosstalk"]["sampling"]
        assert (sampling["temperature"], sampling["seed"]) == (0, 1)
        assert steady["audio"]["input"]["turn_detection"]["silence_duration_ms"] == 500
        assert patient["audio"]["input"]["turn_detection"]["silence_duration_ms"] == 1200
        page.get_by_label("Pause that ends a turn").fill("700")
        page.keyboard.press("Tab")
        settled(visitor, 4)
        assert preset.input_value() == ""
        visitor.require_no_complaints()


def settled(visitor: Visit, count: int) -> dict[str, Any]:
    session: dict[str, Any] = visitor.event("session.updated", count)["session"]
    return session


# For developers, in other languages, on a phone.


def test_the_event_log_shows_the_wire_without_its_sound(server: Server) -> None:
    with browsing(None) as browser:
        visitor = visit(browser, server.url)
        page = visitor.page
        page.get_by_text("Events, for developers").click()
        ask_for_the_capital(visitor)
        visitor.event("response.done")
        lines = page.locator("#events summary").all_inner_texts()
        assert "↓ session.created" in lines[0]
        assert any("↑ response.create" in line for line in lines)
        done = page.locator("#events li", has_text="↓ response.done")
        done.locator("summary").click()
        visitor.wait("document.querySelector('#events details[open] pre')?.textContent")
        shown = json.loads(done.locator("pre").inner_text())
        assert shown["response"]["status"] == "completed"
        saved = json.loads(visitor.saved(page.get_by_role("button", name="Save as JSON")))
        assert next(each["type"] for each in saved if each["way"] == "↓") == "session.created"
        sound = [each for each in saved if each["type"] == "response.output_audio.delta"]
        assert sum(each["count"] for each in sound) == len(
            visitor.events("response.output_audio.delta")
        )
        assert all(each["event"]["delta"].endswith("characters") for each in sound)
        page.get_by_role("button", name="Clear").click()
        assert not page.locator("#events li").count()
        visitor.require_no_complaints()


def test_the_page_speaks_chinese_to_who_prefers_it_and_english_on_demand(server: Server) -> None:
    with browsing(None, locale="zh-CN") as browser:
        visitor = visit(browser, server.url)
        page = visitor.page
        page.get_by_role("button", name="说话", exact=True).wait_for()
        ask_for_the_capital(visitor)
        assert page.locator("html").get_attribute("lang") == "zh-CN"
        assert "声音" in visitor.replies(".note")[0]
        page.locator("#language").select_option("en")
        assert page.locator("html").get_attribute("lang") == "en"
        assert visitor.replies(".note")[0].startswith("sound, ")
        assert page.locator("#latest-of").inner_text().startswith("turn 1: from sending")
        assert page.url.endswith("lang=en")
        page.reload()
        page.get_by_role("button", name="Talk", exact=True).wait_for()
        visitor.require_no_complaints()


@pytest.mark.parametrize("phone", [False, True], ids=["desk", "phone"])
def test_keys_are_named_where_there_are_some(server: Server, phone: bool) -> None:
    context = {"viewport": {"width": 390, "height": 844}, **PHONE} if phone else {}
    with browsing(None, **context) as browser:
        page = visit(browser, server.url).page
        page.get_by_text("Hold to talk").click()
        shown = page.locator("main").inner_text()
        assert ("Esc" in shown) is not phone
        assert ("space bar" in shown) is not phone
        across = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert across[0] <= across[1]


def test_browsers_find_the_icon(server: Server) -> None:
    answer = httpx.get(f"{server.url}/favicon.ico")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "image/x-icon"
    assert answer.content[:6] == b"\0\0\1\0\1\0"


def test_of_other_models_the_page_promises_nothing(cache_folder: Path) -> None:
    words = ("--model", "synthetic", "--vad", "none")
    with serving(*words, cache=cache_folder) as server, browsing(None) as browser:
        visitor = visit(browser, server.url)
        page = visitor.page
        page.get_by_text("These weights are random").wait_for()
        assert not page.locator("#questions button").count()
        page.get_by_role("textbox", **ASK).fill("Hello.")
        page.keyboard.press("Enter")
        visitor.event("response.done")
        assert "synthetic" in page.locator("#model").inner_text()
        # This server finds no ends of turns either.
        assert page.get_by_label("Hold to talk").is_checked()
        assert page.get_by_label("Hands-free").is_disabled()
        assert "finds no ends of turns" in page.locator("#hint").inner_text()


# For everyone.


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_axe_finds_nothing_to_mend(server: Server, scheme: str, width: int) -> None:
    require_package("axe_playwright_python", "browser")
    from axe_playwright_python.sync_playwright import Axe

    context = {"viewport": {"width": width, "height": 844}, "color_scheme": scheme}
    with browsing(said(60.0), **context) as browser:
        visitor = visit(browser, server.url)
        page = visitor.page
        found = [Axe().run(page)]  # as a visitor finds it
        ask_for_the_capital(visitor)
        page.get_by_role("button", name="Talk", exact=True).click()
        visitor.status("waiting")
        page.evaluate(OPEN)
        found.append(Axe().run(page))  # all that can be opened
        assert [each.generate_report() for each in found if each.violations_count] == []
        names = {rule["id"] for each in found for rule in each.response["passes"]}
        assert {"color-contrast", "label", "button-name", "html-has-lang"} <= names


OPEN = """
for (const fold of document.querySelectorAll("details")) fold.open = true;
for (const each of document.querySelectorAll("[hidden]")) each.hidden = false;
document.getElementById("notice-text").textContent = "Something is to be said.";
"""


def test_the_pictures_of_the_documents_can_be_drawn(server: Server, tmp_path: Path) -> None:
    draw(tmp_path, server.url)
    for name in PICTURES:
        size = (tmp_path / name).stat().st_size
        assert 20_000 < size < 120_000, (name, size)
