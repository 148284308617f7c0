"""Python's garbage collector kept from looking again and again at what will not be freed."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def lasting_objects_spared() -> Iterator[None]:
    """Within, collections leave out what is alive on entry, after a last one of everything.

    A process with torch and a model holds hundreds of thousands of objects. Looking at all of
    them takes longer than a listener has sound in hand, and stops every thread. What is made
    within is collected as ever. For a process that has loaded what it works with.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
