"""What lasts is left out of collections, and what comes after it is not."""

import gc
import weakref

from mosstalk.runtime.device import gc_frozen


class Knot:
    """It holds itself, so that only a collection frees it."""

    def __init__(self) -> None:
        self.own = self


def test_what_is_alive_on_entry_is_not_looked_at_again() -> None:
    gc.collect()  # what other tests left behind does not last
    before = gc.get_freeze_count()
    objects = len(gc.get_objects())
    with gc_frozen():
        assert gc.get_freeze_count() - before > 0.9 * objects
        assert len(gc.get_objects()) < 0.1 * objects
    assert gc.get_freeze_count() == 0
    assert len(gc.get_objects()) > 0.9 * objects


def test_what_is_made_within_is_freed() -> None:
    with gc_frozen():
        made = weakref.ref(Knot())
        gc.collect()
        assert made() is None


def test_what_was_garbage_on_entry_is_freed_by_then() -> None:
    gone = weakref.ref(Knot())
    with gc_frozen():
        assert gone() is None
