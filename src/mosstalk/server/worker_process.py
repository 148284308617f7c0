"""``python -m mosstalk.server.worker_process FD``: the process with the models.

It is started by ``EngineClient``.

``FD`` is its end of a socket pair. It ends when it is told to, when the engine fails, and at once
when the front is gone; signals that a terminal or a supervisor sends to the whole group are the
front's to deal with.
"""

import asyncio
import logging
import os
import signal
import socket
import sys

from mosstalk.environment import share_the_processor
from mosstalk.server.child_process import end_with_parent
from mosstalk.server.streams import bounded_output


def main(words: list[str]) -> None:
    """Serve until the end, then leave without waiting for threads that still load or compute."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    share_the_processor()
    end = socket.socket(fileno=int(words[0]))
    end_with_parent(end.fileno())
    with bounded_output():
        code = _serve(end)
    os._exit(code)


def _serve(end: socket.socket) -> int:
    from mosstalk.server.worker import serve

    try:
        return asyncio.run(serve(end))
    except BaseException:
        logging.getLogger(__name__).exception("the worker ends")
        return 1


if __name__ == "__main__":
    main(sys.argv[1:])
