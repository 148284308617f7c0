"""docs/realtime.md names every event and every code, and docs/clients/ every version."""

import re

from conftest import ROOT
from realtime_rig import caller
from test_realtime_refusals import CLIENT_EVENTS

from mosstalk.session.events import ErrorCode, ErrorRaised

PAGE = (ROOT / "docs" / "realtime.md").read_text()
COMMANDS = ("Push", "CreateText", "CreateResponse", "DeleteItem", "Truncate")


def test_every_event_of_a_client_is_in_the_table() -> None:
    (unknown,) = caller().send("input_audio_buffer.magic")
    listed = re.findall(r"'([a-z_.]+)'", unknown["error"]["message"].partition("values are")[2])
    assert sorted(listed) == sorted(CLIENT_EVENTS)
    for kind in listed:
        assert f"| `{kind}` |" in PAGE


def test_every_code_that_a_session_can_cause_is_explained() -> None:
    for code in ErrorCode:
        for command in COMMANDS:
            events = caller().hear(ErrorRaised(code, "no", command, clock=0))
            last = events[-1]
            error = last.get("error") or last["response"]["status_details"]["error"]
            assert f"`{error['code']}`" in PAGE, error


def test_the_clients_named_are_those_that_are_tried() -> None:
    pins = (ROOT / "tests" / "system" / "clients" / "requirements.txt").read_text()
    pages = "".join(page.read_text() for page in (ROOT / "docs" / "clients").glob("*.md"))
    named = re.findall(r"[a-z-]+(?:\[\w+\])?==[\d.]+", pages)
    assert sorted(named) == sorted(re.findall(r"^[a-z].+==.+$", pins, re.MULTILINE))
