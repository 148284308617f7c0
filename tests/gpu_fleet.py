"""A fleet with a card for each replica: ``python tests/gpu_fleet.py MODEL SPEECH``.

One crowd talks with one replica past the ingress, as large a crowd with each of them through it,
and a smaller one while a replica is killed. Prints, for each, the time from commit to first audio,
and what share of one replica's 95th percentile the fleet's is. Ends with 1 if a turn failed that
should not have, or if a bound was missed. MODEL is a folder of ``mosstalk build``, or a language
model's with ``--codec``. ``--device cpu --replicas 2 --each 2 --turns 2`` tries
the script on a machine without cards.
"""

import argparse
import os
import signal
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from fleet_rig import Fleet, fleet_file, running_fleet

from mosstalk.audio.sound import read_audio
from mosstalk.bench.serve import QUANTILES, Bounds, Crowd, Load, Target, measure, quantiles
from mosstalk.bench.serve_clients import COMPLETED, RATE, Pattern
from mosstalk.files import write_document
from mosstalk.session.sound import pcm_of

EQUAL, BESIDE_A_FAULT = 1.05, 1.2
"""How many times one replica's 95th percentile the fleet's may be, and that of those who stay."""
START_S = 600.0
"""Weights of the published sizes take minutes where no folder was built of them."""
SERVE = {"vad": "none", "script": "speech:75", "max-rows": 1700}


@dataclass
class Clients:
    """Who talks, how long, and what they say."""

    turns: int
    seed: int
    speech: "np.typing.NDArray[np.int16]"

    def crowd(self, url: str, count: int) -> Crowd:
        """So many talk with this server."""
        load = Load((count,), Pattern(), self.turns, self.seed)
        (crowd,) = measure(Target(url, {}), load, self.speech, lambda *_: None)
        return crowd


def told(name: str, crowd: Crowd) -> list[float]:
    """Print what a crowd met, and return its quantiles."""
    found = crowd.first_audio_ms or [float("nan")] * len(QUANTILES)
    lags = crowd.lags_ms or [float("nan")] * len(QUANTILES)
    print(
        f"{name}: {crowd.clients} conversations, {len(crowd.turns)} turns, "
        f"{len(crowd.refusals)} refused, {len(crowd.failures)} failed, {crowd.broken} broke off; "
        f"first audio {joined(found)} ms, clients' lag {joined(lags)} ms",
        flush=True,
    )
    return found


def joined(values: list[float]) -> str:
    """Median, 95th and 99th percentile in a line."""
    return " / ".join(f"{each:.1f}" for each in values)


def kill_one(fleet: Fleet) -> None:
    """Kill the replica with the most conversations."""
    sessions = fleet.sessions_by_process()
    killed = max(sessions, key=lambda pid: sessions[pid])
    os.kill(killed, signal.SIGKILL)
    print(f"killed a replica with {sessions[killed]} conversations of {sum(sessions.values())}")


def others_ms(crowd: Crowd) -> list[float]:
    """Times to first audio of all whose every turn was answered."""
    lost = {turn.client for turn in crowd.turns if turn.status != COMPLETED}
    return [
        turn.commit_to_audio_ms
        for turn in crowd.turns
        if turn.client not in lost and turn.commit_to_audio_ms is not None
    ]


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--codec", type=Path)
    parser.add_argument("speech", type=Path, help="sound of speech, longer than a turn")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--each", type=int, default=64, help="conversations of a replica")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--kill-after", type=float, default=20.0, help="seconds")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    places = given.each * 3 // 2 + 1  # HAProxy counts all connections, not conversations alone
    options = dict(SERVE) if given.device != "cpu" else {"vad": "none"}
    options |= {"model": given.model.absolute(), "device": given.device}
    options |= {"codec": given.codec.absolute()} if given.codec else {}
    file = fleet_file(str(given.replicas), **options, **{"max-sessions": places})
    speech = np.frombuffer(pcm_of(read_audio(given.speech, RATE).samples), np.int16)
    clients = Clients(given.turns, 7, speech)
    begun_s = time.monotonic()
    with (
        tempfile.TemporaryDirectory() as cache,
        running_fleet(Path(cache), file, given.replicas, START_S) as fleet,
    ):
        print(
            f"{given.replicas} replicas were ready in {time.monotonic() - begun_s:.0f} s",
            flush=True,
        )
        return measured(fleet, clients, given)


def measured(fleet: Fleet, clients: Clients, given: argparse.Namespace) -> int:
    """The four crowds; the exit code."""
    sockets = fleet.replica_sockets()
    assert len(sockets) == given.replicas, sockets
    one = clients.crowd(sockets[0], given.each)
    alone = told("one replica, past the ingress", one)
    all_ = clients.crowd(fleet.socket, given.each * given.replicas)
    together = told(f"{given.replicas} replicas, by the ingress", all_)
    times = together[1] / alone[1]
    print(f"p95 of all over p95 of one: {times:.3f}, goal {EQUAL}")
    half = max(given.each // 2, 1) * given.replicas
    quiet = clients.crowd(fleet.socket, half)
    before = told("before a replica is killed", quiet)
    timer = threading.Timer(given.kill_after, kill_one, (fleet,))
    timer.start()
    faulty = clients.crowd(fleet.socket, half)
    timer.join()
    told("one was killed meanwhile", faulty)
    kept = others_ms(faulty)
    after = quantiles(np.array(kept)) or [float("nan")] * len(QUANTILES)
    beside = after[1] / before[1]
    print(
        f"those of the other replicas: {len(kept)} turns, first audio {joined(after)} ms, "
        f"p95 {beside:.3f} times that before, goal {BESIDE_A_FAULT}"
    )
    failed = len(one.failures) + len(all_.failures) + len(quiet.failures)
    if given.json:
        crowds = {"one": one, "all": all_, "before": quiet, "killed": faulty}
        values = {name: crowd.as_values(Bounds()) for name, crowd in crowds.items()}
        write_document(given.json, values | {"equal": times, "beside a fault": beside})
    return int(bool(failed) or times > EQUAL or beside > BESIDE_A_FAULT)


if __name__ == "__main__":
    sys.exit(main())
