"""How many of the project's files one turn passes, from the socket to the socket."""

import os
import signal
from collections import Counter
from pathlib import Path

from conftest import ROOT, require_package, run
from server_rig import Server, Talker, question, serving, silence

SOURCES = ROOT / "src" / "mosstalk"
MOST_FILES = 85
"""What was reached so far, on a CPU. It may only become less; two came with conversations that are
kept for who comes back."""


def test_a_turn_passes_few_files(cache_folder: Path, tmp_path: Path) -> None:
    require_package("silero_vad", "vad")
    folders = (str(ROOT / "tests" / "turn_trace"), os.environ.get("PYTHONPATH"))
    env = {"PYTHONPATH": os.pathsep.join(filter(None, folders)), "TURN_FILES": str(tmp_path)}
    # Without a transcriber, which is not installed everywhere.
    quiet = ("--temperature", "0", "--seed", "0", "--transcriber", "none")
    with serving(*quiet, cache=cache_folder, env=env) as server:
        processes = {"front": server.process.pid, "worker": server.worker_id}

        async def main() -> None:
            async with Talker(server) as talker:
                tell(server, processes, tmp_path, signal.SIGUSR1, "begun")
                await talker.say(question() + silence(1.0))
                await talker.wait("response.done")
                assert talker.pcm()
                tell(server, processes, tmp_path, signal.SIGUSR2, "ran")

        run(main())
    passed = {name: files(tmp_path / f"ran-{number}") for name, number in processes.items()}
    for name, paths in passed.items():
        print(f"\n{name}, {len(paths)} files:", *sorted(paths), sep="\n  ")
    all_files = set().union(*passed.values())
    rooms = Counter(path.partition("/")[0] for path in all_files)
    print(f"\n{len(all_files)} files in all:", dict(rooms.most_common()))
    assert {"server/connection.py", "server/ipc.py"} <= passed["front"]
    assert {"server/ipc.py", "engine/engine_core.py", "codec/speech_decoder.py"} <= passed["worker"]
    assert len(all_files) <= MOST_FILES


def tell(
    server: Server, processes: dict[str, int], folder: Path, number: signal.Signals, name: str
) -> None:
    """Send each process a signal and wait until it has written a file for it."""
    for each in processes.values():
        os.kill(each, number)
    written = [folder / f"{name}-{each}" for each in processes.values()]
    server.await_log(lambda: all(path.exists() for path in written))


def files(path: Path) -> set[str]:
    """Those of the project, relative to its package."""
    lines = (Path(line) for line in path.read_text().splitlines())
    return {line.relative_to(SOURCES).as_posix() for line in lines if SOURCES in line.parents}
