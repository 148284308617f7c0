"""npm's clients, unmodified, against a running server: in Node, and in a real browser.

The programs of docs/clients/openai-js.md and docs/clients/agents-js.md are run as they stand there.
"""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import soundfile
from browser_rig import SENTENCE, browsing, said
from browser_rig import speech as sound_of
from conftest import QUESTION, require_package
from npm_rig import CLIENTS, INSTALL_S, PAGES, TALK_S, Packages, Variables
from server_rig import QUICK, RATE, Server, ask, free_port, question, sentence, serving, silence

from mosstalk.audio.sound import Samples, read_audio

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [pytest.mark.system, pytest.mark.timeout(INSTALL_S + 2 * TALK_S)]

KEY = "a-key-for-tests"
SAID_SAMPLES = RATE // 10
"""What every spoken answer is longer than."""
SOON_MS = 120_000


@dataclass(frozen=True)
class Service:
    """A server that speaks TLS, what its clients have in their environment, and a page's origin."""

    server: Server
    env: Variables
    port: int

    @property
    def socket(self) -> str:
        """Where its WebSocket is."""
        return f"wss{self.server.url.removeprefix('https')}/v1/realtime"

    @property
    def page(self) -> Variables:
        """What the program that serves the page has in its environment."""
        return self.env | {"MOSSTALK_URL": self.server.url, "PORT": str(self.port)}


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Packages:
    """A folder in which Node has the clients."""
    return Packages.install(tmp_path_factory.mktemp("packages"))


@pytest.fixture(scope="module")
def service(cache_folder: Path) -> Iterator[Service]:
    """A server that finds turns by itself and writes down what it hears."""
    require_package("faster_whisper", "transcribe")
    require_package("aiortc", "webrtc")
    port = free_port()
    words = ("--tls-self-signed", "--api-key", KEY, "--allow-origin", f"http://localhost:{port}")
    drawn = ("--temperature", "0", "--seed", "0", "--transcriber", "whisper-tiny")
    with serving(*words, *drawn, cache=cache_folder) as server:
        server.headers = {"Authorization": f"Bearer {KEY}"}
        env = {
            "NODE_EXTRA_CA_CERTS": str(cache_folder / "tls" / "certificate.pem"),
            "OPENAI_BASE_URL": f"{server.url}/v1",
            "OPENAI_API_KEY": KEY,
            "MOSSTALK_API_KEY": KEY,
        }
        yield Service(server, env, port)


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recorded question as raw sound."""
    file = tmp_path_factory.mktemp("asked") / "question.raw"
    file.write_bytes(question())
    return file


@pytest.fixture(scope="module")
def speech(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Someone who says a sentence in a quiet room, as raw sound."""
    file = tmp_path_factory.mktemp("speech") / "speech.raw"
    file.write_bytes(silence(0.5) + sentence() + silence(1.5))
    return file


@pytest.fixture
def page(packages: Packages, service: Service) -> Iterator["Page"]:
    """The page of docs/clients/agents-js.md, open in a browser whose user asks a question."""
    packages.save("agents-js.md", "page.html")
    program = packages.save("agents-js.md", "page.mjs")
    microphone = said(3.0, sound_of(SENTENCE), 600.0)
    with packages.running(program, service.page) as process:
        assert process.stdout
        (url,) = re.findall(r"http://\S+", process.stdout.readline())
        with visiting(url, microphone) as visitor:
            yield visitor


@contextmanager
def visiting(url: str, microphone: Samples) -> Iterator["Page"]:
    """A page of another origin, open in a browser that takes the server's certificate."""
    with browsing(microphone, ignore_https_errors=True) as browser:
        visitor = browser.new_page()
        visitor.set_default_timeout(SOON_MS)
        complaints: list[str] = []
        visitor.on("pageerror", lambda error: complaints.append(str(error)))
        visitor.goto(url)
        yield visitor
        assert not complaints


def test_the_pages_name_the_versions_that_are_tried() -> None:
    versions = json.loads((CLIENTS / "package.json").read_text())["dependencies"]
    text = " ".join(path.read_text() for path in sorted(PAGES.glob("*-js.md")))
    for name, version in versions.items():
        assert f"{name} {version}" in text.replace("\n", " ")


# openai


def test_openai_completes_chats_by_voice_and_in_writing(
    packages: Packages, service: Service, tmp_path: Path
) -> None:
    file = tmp_path / "question.wav"
    soundfile.write(file, read_audio(QUESTION, RATE).samples, RATE)
    said = packages.told("with_openai.mjs", service.server.url, file, env=service.env)
    assert "Paris" in said["whole"]
    assert said["helped"], "its own helper joins the chunks"
    assert said["header"] == "RIFF"
    assert said["streamed"] == {
        "words": said["whole"], "samples": said["samples"], "reason": "stop",
        "usage": said["usage"],
    }  # fmt: skip
    assert said["samples"] > SAID_SAMPLES
    assert "Rome" in said["next"], "the reply before is sent back as it came"
    assert said["heard"] > 10
    assert said["answered"]
    assert said["refused"] == ["BadRequestError", "unsupported_value", "n"]


@pytest.mark.parametrize("name", ["OpenAIRealtimeWS", "OpenAIRealtimeWebSocket"])
def test_openai_types_speaks_interrupts_and_errs(
    packages: Packages, service: Service, asked: Path, name: str
) -> None:
    told = packages.told(
        "with_openai_realtime.mjs", service.server.url, asked, name, env=service.env
    )
    assert (told["began"], told["updated"]) == ("Be brief.", "Be kind.")
    assert "Paris" in told["words"]["typed"]
    assert "Rome" in told["words"]["written"]
    assert told["samples"]["written"] == 0
    for turn in ("typed", "spoken", "after"):
        assert told["words"][turn], turn
        assert told["samples"][turn] > SAID_SAMPLES, turn
        assert told["status"][turn] == "completed", turn
    assert told["status"]["interrupted"] == "cancelled"
    assert told["cut"] == [True, 80]
    assert told["errors"] == [
        ["OpenAIRealtimeError", "item_retrieve_invalid_item_id", "mine"],
        ["OpenAIRealtimeError", "invalid_value", "other"],
    ]
    assert told["closed"] == 1000
    assert told["stranger"] == "OpenAIRealtimeError", "a key that is none"


def test_the_program_of_openais_page_asks_and_keeps_the_answer(
    packages: Packages, service: Service, asked: Path, tmp_path: Path
) -> None:
    program = packages.save("openai-js.md", "talk.mjs")
    answer = tmp_path / "answer.raw"
    assert packages.run(program, asked, answer, env=service.env).strip()
    assert len(answer.read_bytes()) / 2 > SAID_SAMPLES


def test_openais_classes_come_back_after_a_restart(packages: Packages, cache_folder: Path) -> None:
    words = (*QUICK, "--tls-self-signed", "--port", str(free_port()))
    with serving(*words, cache=cache_folder) as server:
        env = {
            "NODE_EXTRA_CA_CERTS": str(cache_folder / "tls" / "certificate.pem"),
            "OPENAI_BASE_URL": f"{server.url}/v1",
            "OPENAI_API_KEY": "none",
        }
        with packages.running(CLIENTS / "with_openai_restart.mjs", env) as talk:
            assert talk.stdout
            assert talk.stdout.readline() == "talked\n"
            server.stop()
            with serving(*words, cache=cache_folder):
                out, errors = talk.communicate(timeout=TALK_S)
    assert talk.returncode == 0, errors[-3000:]
    for told in json.loads(out.splitlines()[-1]):
        assert told["codes"][0] == 1012, "the server's own code for a restart"
        assert "Paris" in told["before"]
        assert "Rome" in told["after"]


INDEX = """<!doctype html><meta charset="utf-8"><title>talk</title>
<script type="importmap">{"imports": {
  "openai": "/node_modules/openai/index.mjs",
  "openai/realtime/webrtc": "/node_modules/openai/realtime/webrtc.mjs",
  "openai/realtime/websocket": "/node_modules/openai/realtime/websocket.mjs"
}}</script>
<button>connect</button><button>call</button>
<script type="module">
  import * as ways from "/browser.mjs";
  window.talks = {};
  for (const button of document.querySelectorAll("button")) {
    const way = button.innerText;
    button.onclick = () => { talks[way] = Promise.resolve(ways[way](...window.server)); };
  }
</script>"""
"""Imports as a bundler resolves them."""
TALK = """async (way) => {
  const talk = await talks[way];
  const events = [];
  const [on, one] = talk.onEvent ? ["onEvent", []] : ["on", ["event"]];
  let wake = () => {};
  talk[on](...one, (event) => { events.push(event); wake(); });
  const next = async (type) => {
    while (!events.some((event) => event.type === type)) {
      await new Promise((resolve) => { wake = resolve; });
    }
    return events.find((event) => event.type === type);
  };
  if (way === "connect") await next("session.created");
  const content = [{ type: "input_text", text: "What is the capital of France?" }];
  talk.send({
    type: "session.update",
    session: { type: "realtime", audio: { input: { turn_detection: null } } },
  });
  talk.send({ type: "conversation.item.create", item: { type: "message", role: "user", content } });
  talk.send({ type: "response.create" });
  const { response } = await next("response.done");
  if (way === "call") await next("output_audio_buffer.stopped");
  const stats = way === "call" ? [...(await talk.peerConnection.getStats()).values()] : [];
  talk.close();
  return {
    text: response.output[0].content[0].transcript,
    kinds: events.map(({ type }) => type),
    energy: stats.find(({ type }) => type === "inbound-rtp")?.totalAudioEnergy,
  };
}"""


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is printed."""


@contextmanager
def files(folder: Path, port: int) -> Iterator[str]:
    """A plain server of a folder's files; where."""
    with ThreadingHTTPServer(("localhost", port), partial(_Quiet, directory=folder)) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        try:
            yield f"http://localhost:{port}"
        finally:
            http.shutdown()


@pytest.mark.alone
def test_the_functions_of_openais_page_talk_in_a_browser(
    packages: Packages, service: Service
) -> None:
    packages.save("openai-js.md", "browser.mjs")
    (packages.folder / "index.html").write_text(INDEX)
    base, headers = service.server.url, service.server.headers
    made = ask("POST", f"{base}/v1/realtime/client_secrets", headers=headers, json={})
    secret = made.json()["value"]
    with files(packages.folder, service.port) as url, visiting(url, said(600.0)) as visitor:
        visitor.evaluate("(server) => { window.server = server; }", [base, secret])
        visitor.get_by_role("button", name="connect").click()
        told = visitor.evaluate(TALK, "connect")
        assert "Paris" in told["text"]
        assert "response.output_audio.delta" in told["kinds"]
        visitor.get_by_role("button", name="call").click()
        told = visitor.evaluate(TALK, "call")
        assert "Paris" in told["text"]
        assert "response.output_audio.delta" not in told["kinds"]
        assert told["energy"] > 0.001, "it can be heard"
    service.server.await_nothing_held()


# @openai/agents-realtime


def test_an_agent_types_speaks_interrupts_and_changes_its_history(
    packages: Packages, service: Service, speech: Path
) -> None:
    told = packages.told("with_agents.mjs", service.socket, speech, env=service.env)
    for turn in ("typed", "spoken", "after"):
        assert told["samples"][turn] > SAID_SAMPLES, turn
    assert told["interrupted"] == "cancelled"
    assert told["roles"] == ["user", "assistant"] * 3
    first, heard, answer, joke = told["words"]
    assert first
    assert "young man" in heard
    assert answer
    assert len(joke) < len("Why did the snowman go home?"), "what was heard of it is left"
    assert told["replaced"] == ["user", "assistant"] * 2
    assert told["warnings"] == ["the voice is unknown: the default one speaks"]
    assert told["errors"] == []
    assert told["refused"] == "invalid_value"
    assert told["interruptions"] >= 2, "by the user, and by its guardrail"
    assert told["usage"] > 0


def test_the_program_of_the_agents_page_hears_a_question_and_answers(
    packages: Packages, service: Service, speech: Path, tmp_path: Path
) -> None:
    program = packages.save("agents-js.md", "agent.mjs")
    answer = tmp_path / "answer.raw"
    env = service.env | {"MOSSTALK_URL": service.socket}
    assert packages.run(program, speech, answer, env=env).strip()
    assert len(answer.read_bytes()) / 2 > SAID_SAMPLES


KEEP = """() => {
  window.kept = [];
  session.transport.on("*", (event) => kept.push(event));
}"""


HEARD = """async () => {
  const stats = await session.transport.connectionState.peerConnection.getStats();
  const inbound = [...stats.values()].find(({ type }) => type === "inbound-rtp");
  return inbound.totalAudioEnergy > 0.001;
}"""
"""Whether the page has played something that can be heard."""


def wait(page: "Page", kind: str, count: int = 1) -> dict[str, Any]:
    """The ``count``-th event of a kind that the page's agent was sent, waited for."""
    page.wait_for_function(
        "([kind, count]) => kept.filter(({ type }) => type === kind).length >= count",
        arg=[kind, count],
    )
    found = page.evaluate("(kind) => kept.filter(({ type }) => type === kind)", kind)
    event: dict[str, Any] = found[count - 1]
    return event


def history(page: "Page") -> list[str]:
    """What the page shows of the talk."""
    return page.locator("li").all_inner_texts()


@pytest.mark.alone
def test_an_agents_page_talks_by_webrtc_is_interrupted_and_hangs_up(
    page: "Page", service: Service
) -> None:
    page.evaluate(KEEP)
    page.get_by_role("button", name="Talk", exact=True).click()
    wait(page, "output_audio_buffer.stopped")
    page.wait_for_function("session.history[0].content[0].transcript")
    assert page.evaluate("session.transport.callId").startswith("rtc_"), "CORS lets it be read"
    page.get_by_label("Type something").fill("Tell me a joke.")
    page.keyboard.press("Enter")
    started = wait(page, "output_audio_buffer.started", 2)
    page.get_by_role("button", name="Interrupt").click()
    cleared = wait(page, "output_audio_buffer.cleared")
    assert cleared["response_id"] == started["response_id"]
    page.wait_for_function(HEARD)
    item_id = wait(page, "conversation.item.truncated")["item_id"]
    assert wait(page, "conversation.item.retrieved", 2)["item"]["id"] == item_id
    user, reply, joke, cut = history(page)
    assert re.fullmatch("user: .*man.*", user)
    assert re.fullmatch("assistant: .+", reply)
    assert joke == "user: Tell me a joke."
    assert len(cut) < len("assistant: Why did the snowman go home?"), "what was heard of it"
    kinds = page.evaluate("kept.map(({ type }) => type)")
    assert "response.output_audio.delta" not in kinds
    assert "error" not in kinds
    page.get_by_role("button", name="Hang up").click()
    service.server.await_nothing_held()
    assert not service.server.faults()


ASK_BY_WEBSOCKET = """async () => {
  const { RealtimeAgent, RealtimeSession } = await import("/agents/openai-realtime-agents.mjs");
  const { mosstalk, key } = await (await fetch("/pass")).json();
  const agent = new RealtimeAgent({ name: "Clerk", instructions: "Be brief." });
  const session = new RealtimeSession(agent, { transport: "websocket" });
  let samples = 0;
  session.on("audio", ({ data }) => { samples += data.byteLength / 2; });
  const answered = new Promise((resolve, reject) => {
    session.on("agent_end", (context, agent, text) => resolve(text));
    session.on("error", ({ error }) => reject(new Error(JSON.stringify(error))));
  });
  await session.connect({ apiKey: key, url: `${mosstalk.replace("http", "ws")}/v1/realtime` });
  session.sendMessage("What is the capital of France?");
  const text = await answered;
  session.close();
  return [text, samples];
}"""


def test_an_agent_in_a_browser_talks_by_websocket(page: "Page") -> None:
    text, samples = page.evaluate(ASK_BY_WEBSOCKET)
    assert "Paris" in text
    assert samples > SAID_SAMPLES


def test_nothing_is_held_for_clients_that_have_gone(service: Service) -> None:
    service.server.await_nothing_held()
    assert not service.server.faults()
