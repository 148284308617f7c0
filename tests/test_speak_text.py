"""Text is read aloud as the checkpoint asks: in pieces of its length, in words, or refused."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from conftest import Checkpoint, Run, refused
from conftest import run as wait_for
from session_rig import WRITTEN, Client, Offline, host, pocket

from mosstalk import Pipeline, speak
from mosstalk.conversation import Conversation
from mosstalk.offline.pieces import text_pieces
from mosstalk.offline.pipeline import SPEAK_PROMPT
from mosstalk.session.commands import CreateResponse, CreateText
from mosstalk.session.events import ResponseDone

LONG = " ".join(f"This is sentence {number}, and it goes on for a while." for number in
                ("one", "two", "three", "four"))  # fmt: skip
OLDER = b"from before"


def document(run: "subprocess.CompletedProcess[str]") -> dict[str, Any]:
    assert run.returncode == 0, run.stderr
    found: dict[str, Any] = json.loads(run.stdout)
    return found


def asking(at: Checkpoint, **rules: object) -> tuple[str | Path, ...]:
    """The options that name a checkpoint which asks this of text that it reads aloud."""
    own = {"mosstalk": {"speak": rules}}
    (at.model / "generation_config.json").write_text(json.dumps(own))
    return ("--model", at.model, "--codec", at.codec)


ENGLISH = {"max_chars": 90, "languages": ["en"], "normalize": True}


def test_a_piece_is_as_long_as_the_checkpoint_says(
    here: Run, tiny: Checkpoint, tmp_path: Path
) -> None:
    folders = asking(tiny.copy(tmp_path), max_chars=40)
    found = document(here("speak", LONG, "--script", "speech:3", "--json", *folders))
    texts = [piece["text"] for piece in found["pieces"]]
    assert texts == text_pieces(LONG, 40)
    assert max(map(len, texts)) <= 40
    assert " ".join(texts) == LONG


def test_the_shipped_model_reads_ninety_characters_at_once_and_numbers_as_words(
    here: Run,
) -> None:
    text = (
        "The U.S. team paid $3.50 for 5 km at 3:45 pm, and then they walked all the way back to "
        "the hotel in the rain, e.g. over 2 bridges."
    )
    words = ("--model", "pocket", "--script", "speech:3", "--json")
    found = document(here("speak", text, *words))
    assert [piece["text"] for piece in found["pieces"]] == [
        "The you ess team paid three dollars",
        "and fifty cents for five kilometers at three forty five pee em, and then they",
        "walked all the way back to the hotel in the rain, for example over two bridges.",
    ]
    assert found["left_out"] == []


def test_what_is_left_out_is_told_and_kept_in_the_document(
    here: Run, tiny: Checkpoint, tmp_path: Path
) -> None:
    words = ("Hi 😀 there ★!", "--script", "speech:3", *asking(tiny.copy(tmp_path), **ENGLISH))
    run = here("speak", *words)
    assert run.returncode == 0
    assert "note: left out, having no words: 😀 ★\n" in run.stderr
    found = document(here("speak", *words, "--json", "--force"))
    assert found["left_out"] == ["😀", "★"]
    assert [piece["text"] for piece in found["pieces"]] == ["Hi there!"]


def test_the_library_reads_words_and_warns_of_what_it_leaves_out(
    tiny: Checkpoint, tmp_path: Path
) -> None:
    at = tiny.copy(tmp_path)
    asking(at, **ENGLISH)
    pipeline = Pipeline.load(at.model, at.codec, device="cpu")
    with pytest.warns(UserWarning, match="left out, having no words: 😀"):
        answer = speak(pipeline, "I have 3 cats 😀")
    expected = Conversation(pipeline.ids, pipeline.tokenizer.encode)
    expected.add_text("system", SPEAK_PROMPT)
    expected.add_text("user", "I have three cats")
    expected.open_reply(speech=True)
    assert answer.chat.conversation.rows == expected.rows


def test_what_is_typed_in_a_session_is_never_changed() -> None:
    typed = "It costs $3.50 at 3:45 pm. 😀 Привет!"
    assert pocket().defaults.text.normalize  # of text that is read aloud, which this is not

    async def main() -> None:
        async with host() as here, await here.open(WRITTEN) as session:
            client, offline = Client(session), Offline(speech=False)
            client.do(CreateText("user", typed), CreateResponse())
            await client.wait(ResponseDone)
            offline.chat.conversation.add_text("user", typed)
            offline.answer()
            assert client.rows == offline.rows

    wait_for(main())


def test_a_chat_message_is_never_changed(tiny: Checkpoint, tmp_path: Path) -> None:
    at = tiny.copy(tmp_path)
    asking(at, **ENGLISH)
    pipeline = Pipeline.load(at.model, at.codec, device="cpu")
    for text in ("It costs $3.50 at 3:45 pm 😀", "Привет", "!!!"):
        chat = pipeline.chat(system="")
        chat.read(text)
        expected = Conversation(pipeline.ids, pipeline.tokenizer.encode)
        expected.add_text("user", text)
        assert chat.conversation.rows == expected.rows


@pytest.mark.parametrize(
    ("rules", "complaint"),
    [
        ({"max_chars": 0}, "mosstalk.speak: max_chars must be at least 1, found 0"),
        ({"max_chars": "90"}, "mosstalk.speak: max_chars must be int"),
        ({"languages": ["fr"]}, "mosstalk.speak: unknown language 'fr'; known: en, zh"),
        ({"languages": [["en"]]}, "mosstalk.speak: unknown language"),
        ({"normalize": True}, "mosstalk.speak: normalize needs languages"),
        ({"normalise": True}, "mosstalk.speak: unknown key 'normalise'; known: temperature"),
    ],
)
def test_a_checkpoint_that_asks_for_what_is_unknown_is_refused(
    here: Run, tiny: Checkpoint, tmp_path: Path, rules: dict[str, object], complaint: str
) -> None:
    folders = asking(tiny.copy(tmp_path), **rules)
    assert complaint in refused(here("speak", "Hi.", *folders))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Привет, мир", "reads English alone, and 'Привет,' is written in Cyrillic"),
        ("!!!", "there is no word to read aloud in '!!!'"),
        ("😀🎉", "there is no word to read aloud in '😀🎉'"),
        (" \n", "the text is empty"),
    ],
)
def test_the_shipped_model_refuses_what_it_cannot_read(
    here: Run, tmp_path: Path, text: str, said: str
) -> None:
    (tmp_path / "spoken.wav").write_bytes(OLDER)
    assert said in refused(here("speak", text, "--model", "pocket", "--force"))
    assert (tmp_path / "spoken.wav").read_bytes() == OLDER
