"""The page goes on with its conversation once the server that had it has been killed."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser_rig import Visit, browsing, visit
from resume_rig import Store
from server_rig import free_port, serving

pytestmark = [pytest.mark.system, pytest.mark.alone, pytest.mark.timeout(240)]

CAPITAL = "What is the capital of France?"
LOST = "The connection was lost"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """A Redis of its own."""
    with Store.running(tmp_path) as redis:
        yield redis


def is_kept(store: Store, items: int) -> bool:
    """Whether the store has one conversation of so many items, all of which have ended."""
    return [
        all(each.item.status == "completed" for each in kept.items) and len(kept.items)
        for kept in store.conversations()
    ] == [items]


def connect(visitor: Visit, sessions: int) -> None:
    """Connect now, and wait for a session that can be talked with."""
    visitor.page.get_by_role("button", name="Connect now").click()
    visitor.event("session.created", sessions)
    visitor.status("waiting")


def ask(visitor: Visit, text: str, answers: int) -> str:
    """Ask in writing; the words of the answer, once it was heard."""
    visitor.page.get_by_role("textbox", name="A turn in writing").fill(text)
    visitor.page.keyboard.press("Enter")
    visitor.told("ended", answers)
    return visitor.page.locator("#log li[data-who=reply] .text").last.inner_text()


def test_the_page_goes_on_where_it_was_and_says_when_it_cannot(
    store: Store, cache_folder: Path
) -> None:
    words = ("--port", str(free_port()), "--temperature", "0", "--seed", "1")
    keeping = (*words, "--store", store.url)
    with browsing(None) as browser:
        with serving(*keeping, cache=cache_folder) as first:
            visitor = visit(browser, first.url)
            assert "Paris" in ask(visitor, CAPITAL, 1)
            first.await_metrics(lambda _: is_kept(store, 2))
            first.process.send_signal(signal.SIGKILL)
            visitor.page.get_by_text(LOST).wait_for()
        lines = visitor.page.locator("#log li")
        with serving(*keeping, cache=cache_folder) as second:
            connect(visitor, 2)
            assert "Madrid" in ask(visitor, "And of Spain?", 2)
            assert lines.count() == 4
            second.process.send_signal(signal.SIGKILL)
            visitor.page.get_by_text(LOST).wait_for()
        with serving(*words, cache=cache_folder):  # a store that has never heard of it
            connect(visitor, 3)
            visitor.page.get_by_text("A new session").wait_for()
            assert "Paris" in ask(visitor, CAPITAL, 3)
            assert lines.count() == 7
