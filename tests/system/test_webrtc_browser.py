"""A page with the lines of docs/webrtc.md talks by WebRTC in a real browser, and is closed."""

import re
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from browser_rig import SENTENCE, browsing, said, speech
from conftest import QUESTION, ROOT, require_package
from server_rig import ask, serving

pytestmark = [pytest.mark.system, pytest.mark.alone, pytest.mark.timeout(240)]

KEY = "a-key-for-tests"
LONG = ("--script", "speech:125", "--seed", "1")
"""Ten seconds of answer, which can be interrupted on a busy machine too."""
PAGE = """<!doctype html><meta charset="utf-8"><title>talk</title><button>Talk</button>
<script>
%s
window.events = [];
document.querySelector("button").onclick = async () => {
  const { pc, events } = await connect(...window.server);
  window.pc = pc;
  events.onmessage = ({ data }) => window.events.push(JSON.parse(data));
};
window.inbound = async () => {
  const all = [...(await window.pc.getStats()).values()];
  return all.find(({ type }) => type === "inbound-rtp");
};
</script>"""


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is printed."""


@pytest.fixture
def page(tmp_path: Path) -> Iterator[str]:
    """Where a page of another origin is, made of the document's first lines."""
    lines, *_ = re.findall(r"```js\n(.+?)```", (ROOT / "docs" / "webrtc.md").read_text(), re.DOTALL)
    (tmp_path / "index.html").write_text(PAGE % lines)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=tmp_path)) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield f"http://localhost:{http.server_address[1]}"
        http.shutdown()


def test_a_page_asks_hears_interrupts_and_leaves_nothing_behind(
    page: str, cache_folder: Path
) -> None:
    require_package("aiortc", "webrtc")
    spoken = said(1.0, speech(QUESTION), 3.6, speech(SENTENCE), 60.0)
    words = (*LONG, "--max-sessions", "1", "--api-key", KEY, "--allow-origin", page)
    with serving(*words, cache=cache_folder) as server, browsing(spoken) as browser:
        server.headers = {"Authorization": f"Bearer {KEY}"}
        secret = ask(
            "POST", f"{server.url}/v1/realtime/client_secrets", headers=server.headers, json={}
        ).json()["value"]
        visitor = browser.new_page()
        complaints: list[str] = []
        visitor.on("pageerror", lambda error: complaints.append(str(error)))
        visitor.goto(page)
        visitor.evaluate("(server) => { window.server = server; }", [server.url, secret])
        visitor.get_by_role("button", name="Talk").click()

        def wait(kind: str, count: int = 1) -> dict[str, Any]:
            visitor.wait_for_function(
                "([kind, count]) => events.filter((e) => e.type === kind).length >= count",
                arg=[kind, count],
                timeout=60_000,
            )
            found = visitor.evaluate("(kind) => events.filter((e) => e.type === kind)", kind)
            event: dict[str, Any] = found[count - 1]
            return event

        started = wait("output_audio_buffer.started")
        cleared = wait("output_audio_buffer.cleared")
        assert cleared["response_id"] == started["response_id"]
        cut = wait("conversation.item.truncated")
        assert cut["mosstalk"]["by_server"] is True
        assert 500 < cut["audio_end_ms"] < 10_000
        wait("output_audio_buffer.started", 2)
        visitor.wait_for_function("async () => (await inbound()).totalAudioEnergy > 0.001")
        inbound = visitor.evaluate("inbound()")
        assert inbound["packetsLost"] == 0
        print(f"the browser's jitter buffer: {inbound['jitterBufferDelay']:.2f} s in all")
        kinds = visitor.evaluate("events.map((e) => e.type)")
        assert kinds[0] == "session.created"
        assert "response.output_audio.delta" not in kinds
        assert not {"error"} & set(kinds)
        visitor.close()
        server.await_nothing_held()
        assert not complaints
        assert not server.faults()
