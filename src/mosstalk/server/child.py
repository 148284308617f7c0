"""``python -m mosstalk.server.child FD``: the process with the models, started by ``EngineLink``.

``FD`` is its end of a socket pair. It ends when it is told to, when the other end closes, or when
the engine fails; signals that a terminal or a supervisor sends to the whole group are the front's
to deal with.
"""

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
import time
from select import poll

from mosstalk.settings import share_the_processor

_ORPHAN_S = 10.0
"""How long it may take to end once the front is gone, however stuck this process is."""


def main(words: list[str]) -> None:
    """Serve until the end, then leave without waiting for threads that still load or compute."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    share_the_processor()
    end = socket.socket(fileno=int(words[0]))
    threading.Thread(target=_end_with_the_front, args=(end.fileno(),), daemon=True).start()
    from mosstalk.server.worker import serve

    try:
        code = asyncio.run(serve(end))
    except BaseException:
        logging.getLogger(__name__).exception("the worker ends")
        code = 1
    sys.stderr.flush()
    os._exit(code)


def _end_with_the_front(descriptor: int) -> None:
    waiting = poll()
    waiting.register(descriptor, 0)  # nothing but that the other end was closed
    waiting.poll()
    time.sleep(_ORPHAN_S)
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
