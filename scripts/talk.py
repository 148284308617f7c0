"""Start the server on the model that ships, and open its page in a browser: what `make talk` runs.

    .venv/bin/python scripts/talk.py [--port 8000] [OPTIONS OF mosstalk serve]

Ctrl-C ends it, with exit code 0.
"""

import argparse
import os
import socket
import ssl
import sys
import threading
import time
import urllib.request
import webbrowser

from mosstalk.cli import main as mosstalk

ASK_EVERY_S = 0.2
NO_MATTER_WHO = ssl._create_unverified_context()
"""This machine is asked, whatever name its certificate is for."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="make talk", add_help=False)
    parser.add_argument("--port", type=int, default=8000)
    chosen, others = parser.parse_known_args()
    port = free_port(chosen.port)
    if port is None:
        sys.exit(
            f"error: port {chosen.port} is taken: is a server running already? End it, or choose "
            f"another port: make talk OPTIONS='--port {chosen.port + 1}'"
        )
    scheme = "https" if any(word.startswith("--tls-") for word in others) else "http"
    page = f"{scheme}://localhost:{port}/"
    threading.Thread(target=open_when_ready, args=(page,), daemon=True).start()
    sys.argv = ["mosstalk", "serve", "--port", str(port), *others]
    mosstalk()


def free_port(asked: int) -> int | None:
    """That port, for 0 any; None where another program listens."""
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind(("127.0.0.1", asked))
        except OSError:
            return None
        return int(tried.getsockname()[1])


def open_when_ready(page: str) -> None:
    """Wait until the server lets clients in, then open its page, or say where it is."""
    while not is_ready(page):
        time.sleep(ASK_EVERY_S)
    opened = has_browser() and webbrowser.open(page)
    done = f"opened {page} in your browser" if opened else f"open {page} in a browser"
    print(f"{done}; Ctrl-C ends the server", flush=True)


def is_ready(page: str) -> bool:
    """Whether the server says so."""
    try:
        with urllib.request.urlopen(f"{page}ready", timeout=5, context=NO_MATTER_WHO) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def has_browser() -> bool:
    """Whether a page would open in a window: on a plain terminal it would fill that."""
    return sys.platform != "linux" or not os.environ.keys().isdisjoint(
        ("BROWSER", "DISPLAY", "WAYLAND_DISPLAY")
    )


if __name__ == "__main__":
    main()
