"""What the page's tests share: headless Chromium with a microphone that plays a file.

Run as a program it draws the page for the documents: ``python tests/browser_rig.py docs/img``.
"""

import base64
import functools
import math
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import soundfile
from conftest import ROOT, require_package, require_program

from mosstalk.audio.sound import Samples, read_audio

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext, Locator, Page

RATE = 24_000
SENTENCE = ROOT / "assets" / "librivox.flac"
Pcm = npt.NDArray[np.int16]
Sound = npt.NDArray[np.floating[Any]]
FLAGS = (
    "--use-fake-device-for-media-stream",
    "--use-fake-ui-for-media-stream",
    "--autoplay-policy=user-gesture-required",
)
PHONE: dict[str, Any] = {"has_touch": True, "is_mobile": True}
SOON_S = 60.0
KEEP = """
window.kept = {all: [], violations: [], played: [], out: []};
const coded = (sound) => {
  const bytes = new Uint8Array(sound.buffer, sound.byteOffset, sound.byteLength);
  let text = "";
  for (const byte of bytes) text += String.fromCharCode(byte);
  return btoa(text);
};
document.addEventListener("mosstalk", ({ detail }) => {
  if (detail.what !== "tap") window.kept.all.push(detail);
  else {
    window.kept.played.push(coded(detail.pcm));
    window.kept.out.push([detail.frame, coded(detail.out)]);
  }
});
document.addEventListener("securitypolicyviolation", ({ violatedDirective, blockedURI }) =>
  window.kept.violations.push(`${violatedDirective} ${blockedURI}`));
"""


@functools.lru_cache(maxsize=4)
def speech(path: Path) -> Samples:
    """A recording of a person, at 24 kHz."""
    return read_audio(path, RATE).samples


def silence(seconds: float) -> Samples:
    """Nothing to hear."""
    return np.zeros(int(seconds * RATE), np.float32)


def said(*parts: Samples | float) -> Samples:
    """What the microphone hears: sounds, and silences of so many seconds."""
    return np.concatenate([silence(p) if isinstance(p, int | float) else p for p in parts])


@dataclass
class Visit:
    """A visitor's look at the page, and all that the page's debug events told."""

    page: "Page"
    complaints: list[str] = field(default_factory=list)
    """What the console and the security policy had to say; for a good page nothing."""

    def wait(self, condition: str, value: Any = None, most_s: float = SOON_S) -> None:
        """Until a JavaScript condition holds; ``kept`` and ``value`` are at hand."""
        test = f"(value) => {{ const kept = window.kept; return {condition}; }}"
        self.page.wait_for_function(test, arg=value, timeout=1000 * most_s)

    def status(self, wanted: str, most_s: float = SOON_S) -> None:
        """Wait for a state of the conversation or of the connection."""
        self.wait("document.documentElement.dataset.status === value", wanted, most_s)

    def event(self, kind: str, count: int = 1, what: str = "received") -> dict[str, Any]:
        """The ``count``-th event of a type on the wire, waited for."""
        wanted = [what, kind, count]
        self.wait(
            "kept.all.filter((e) => e.what === value[0] && e.event.type === value[1]).length"
            " >= value[2]",
            wanted,
        )
        return self.events(kind, what)[count - 1]

    def told(self, what: str, count: int = 1, most_s: float = SOON_S) -> dict[str, Any]:
        """The ``count``-th thing of a kind that the page told, waited for."""
        enough = "kept.all.filter((e) => e.what === value[0]).length >= value[1]"
        self.wait(enough, [what, count], most_s)
        return self.all(what)[count - 1]

    def all(self, what: str) -> list[dict[str, Any]]:
        """Everything of a kind that the page told so far."""
        found: list[dict[str, Any]] = self.page.evaluate(
            "(what) => window.kept.all.filter((e) => e.what === what)", what
        )
        return found

    def events(self, kind: str, what: str = "received") -> list[dict[str, Any]]:
        """Events of a type on the wire so far."""
        return [each["event"] for each in self.all(what) if each["event"]["type"] == kind]

    def turn(self, number: int) -> dict[str, Any]:
        """What the page knows of a turn."""
        return next(t["turn"] for t in reversed(self.all("turn")) if t["turn"]["number"] == number)

    def sent_pcm(self) -> Pcm:
        """What went to the server."""
        return _pcm(e["audio"] for e in self.events("input_audio_buffer.append", "sent"))

    def received_pcm(self, item_id: str) -> Pcm:
        """What came from the server."""
        deltas = self.events("response.output_audio.delta")
        return _pcm(each["delta"] for each in deltas if each["item_id"] == item_id)

    def played_pcm(self) -> Pcm:
        """What the page's audio thread took out of its queue, in order."""
        return _pcm(self.page.evaluate("window.kept.played"))

    def heard(self) -> tuple[Samples, int]:
        """What left the audio thread, at the context's rate, and the frame of its first sample."""
        blocks = self.page.evaluate("window.kept.out")
        first, length = blocks[0][0], 128
        sound = np.zeros(blocks[-1][0] - first + length, np.float32)
        for frame, text in blocks:
            sound[frame - first :][:length] = np.frombuffer(base64.b64decode(text), "<f4")
        return sound, first

    def cells(self, turn: int) -> list[str]:
        """The row of the read-out about a turn."""
        rows = self.page.locator("#turns tr").all()
        texts = [row.locator("td").all_text_contents() for row in rows]
        return next(text for text in texts if text[0] == str(turn))

    def replies(self, part: str) -> list[str]:
        """A part of each bubble of the replies."""
        return self.page.locator(f"#log li[data-who=reply] {part}").all_inner_texts()

    def saved(self, button: "Locator") -> bytes:
        """The file that a button saves."""
        with self.page.expect_download() as download:
            button.click()
        return Path(download.value.path()).read_bytes()

    def require_no_complaints(self) -> None:
        """Check that nothing went wrong that a developer would see."""
        assert self.complaints + self.page.evaluate("window.kept.violations") == []


def rounded(value: float) -> str:
    """A number as JavaScript rounds it: halves go up."""
    return str(math.floor(value + 0.5))


def ratio_db(wanted: Sound, heard: Sound) -> float:
    """How much louder a sound is than what differs from it where it is found."""
    size = 1 << (len(heard) + len(wanted)).bit_length()
    match = np.fft.irfft(np.fft.rfft(heard, size) * np.conj(np.fft.rfft(wanted, size)))
    until = np.cumsum(np.append(0.0, heard.astype(np.float64) ** 2))
    power = (until[len(wanted) :] - until[: -len(wanted)])[:-1]
    # Other sounds may be louder, so what counts is the part of a place's power that is the sound.
    alike = match[: len(power)] / np.sqrt(np.maximum(power, 1e-3 * power.max()))
    place = int(np.argmax(alike))
    found = heard[place : place + len(wanted)].astype(np.float64)
    return max(_ratio_db(_later(wanted, eighth / 8), found) for eighth in range(-4, 5))


def _later(sound: Sound, part: float) -> Sound:
    """A sound a part of a sample later."""
    spectrum = np.fft.rfft(sound)
    turns = np.fft.rfftfreq(len(sound)) * part
    return np.fft.irfft(spectrum * np.exp(-2j * np.pi * turns), len(sound))


def _ratio_db(wanted: Sound, found: Sound) -> float:
    rest = found - (found @ wanted) / (wanted @ wanted) * wanted
    return float(10 * np.log10((found @ found) / (rest @ rest)))


def levels(sound: Sound) -> Sound:
    """How loud each 20 ms are, as a logarithm."""
    frames = sound[: len(sound) // 480 * 480].reshape(-1, 480)
    return np.log(np.sqrt((frames**2).mean(axis=1)) + 1e-3)


def _pcm(texts: Any) -> Pcm:
    return np.frombuffer(b"".join(map(base64.b64decode, texts)), "<i2")


@contextmanager
def browsing(microphone: Samples | None, *flags: str, **context: Any) -> Iterator["BrowserContext"]:
    """Chromium whose microphone plays sound at 24 kHz once; None: there is no microphone."""
    require_package("playwright", "browser")
    from playwright.sync_api import sync_playwright

    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        given = [*flags]
        if microphone is not None:
            path = Path(folder) / "microphone.wav"
            soundfile.write(path, microphone, RATE, subtype="PCM_16")
            given += [*FLAGS, f"--use-file-for-fake-audio-capture={path}%noloop"]
        if os.geteuid() == 0:
            given.append("--no-sandbox")
        chromium = stack.enter_context(sync_playwright()).chromium
        browser = chromium.launch(executable_path=require_program("chromium"), args=given)
        stack.callback(browser.close)
        yield browser.new_context(**{"viewport": {"width": 1200, "height": 900}} | context)


def visit(context: "BrowserContext", url: str, debug: str = "tap") -> Visit:
    """Open the page."""
    visitor = Visit(context.new_page())
    page = visitor.page
    page.add_init_script(KEEP)
    page.on("pageerror", lambda error: visitor.complaints.append(str(error)))
    page.on(
        "console",
        lambda said: visitor.complaints.append(said.text) if said.type != "log" else None,
    )
    page.goto(f"{url}/?debug={debug}")
    return visitor


PICTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "web-page.png": ("light", {"viewport": {"width": 1280, "height": 920}}),
    "web-page-dark.png": ("dark", {"viewport": {"width": 1280, "height": 920}}),
    "web-page-phone.png": ("light", {"viewport": {"width": 390, "height": 844}} | PHONE),
    "web-page-phone-dark.png": ("dark", {"viewport": {"width": 390, "height": 844}} | PHONE),
}
"""Of the documents: the page after two turns, by scheme and size."""


def draw(folder: Path, url: str) -> None:
    """Draw the page of a server that talks with the model that ships."""
    for name, (scheme, context) in PICTURES.items():
        with browsing(said(60.0), color_scheme=scheme, **context) as browser:
            visitor = visit(browser, url)
            page = visitor.page
            page.get_by_role("button", name="What is the capital of France?").click()
            visitor.told("ended")
            page.get_by_role("button", name="Talk", exact=True).click()
            visitor.wait("document.getElementById('press').innerText === 'Mute'")
            page.get_by_role("textbox", name="A turn in writing").fill("Tell me a joke.")
            page.keyboard.press("Enter")
            visitor.told("started", 2)
            page.get_by_text("What it is made of").click()
            visitor.told("ended", 2)
            page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
            page.screenshot(path=folder / name)


def shrink(picture: Path) -> None:
    """Give a picture 256 colours: it looks the same, in a third of the bytes."""
    from PIL import Image  # comes with matplotlib, of the extra recipe

    shown = Image.open(picture).convert("RGB")
    small = shown.quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    small.save(picture, optimize=True)


if __name__ == "__main__":
    from server_rig import serving

    with (
        tempfile.TemporaryDirectory() as made,
        serving("--temperature", "0", "--seed", "1", cache=Path(made)) as running,
    ):
        draw(Path(sys.argv[1]), running.url)
    for name in PICTURES:
        shrink(Path(sys.argv[1]) / name)
