"""``mosstalk bench codec``: figures of valid runs, and none of others."""

import json
from pathlib import Path

import pytest
import torch
from conftest import Run, refused

from mosstalk import Pipeline
from mosstalk.bench import codec
from mosstalk.bench.codec import HopLoad, measure_pushes, measure_repairing, sound_like_speech
from mosstalk.bench.timed import Timed, measure_ceilings, timed_table
from mosstalk.codec.tokenizer_stream import LiveTokenizer
from mosstalk.errors import BenchError
from mosstalk.models.features import WhisperBands
from mosstalk.plan.limits import Work

SMALL = ("--random-weights", "tiny", "--hops", "3", "--replies", "1,2", "--rounds", "1")


@pytest.mark.slow  # its parts are measured one by one below
def test_it_measures_hops_pushes_and_memory_of_random_weights(
    mosstalk: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codec, "_RECOMPUTED", 1)  # of times a hop, which takes seconds
    page = tmp_path / "codec.html"
    run = mosstalk("bench", "codec", *SMALL, "--streams", "1,2", "--json", "-", "--html", page)
    assert run.returncode == 0, run.stderr
    document = json.loads(run.stdout)
    assert document["format"] == "mosstalk-codec-1"
    assert document["weights"] == "synthetic"
    assert {"device", "torch", "commit", "precision", "rates"} <= document["settings"].keys()
    rows = [row for table in document["timed"].values() for row in table]
    assert {row["name"] for row in rows} >= {
        "1 x hop first", "1 x hop 2-3", "2 x hop 2-3", "1 x hop 2, recomputing",
        "1 x 400 ms after 0 s", "2 x 400 ms after 15 s", "2 x 400 ms after 15 s, one repairs",
    }  # fmt: skip
    for row in rows:
        assert row["valid"] == row["n"] > 0
        assert 0 < row["min_ms"] <= row["p50_ms"] <= row["p95_ms"] <= row["max_ms"]
    assert document["memory_mb"]["a second of voice or own history, MB"] > 0
    for place in (run.stderr, page.read_text()):
        assert "A hop of 5 codes through flow and vocoder, voice of 26.8 s" in place
        assert "weights" in place


# Slow: a measurement in small, for one line of it.
@pytest.mark.slow
def test_fewer_steps_are_said_in_its_settings(mosstalk: Run) -> None:
    options = ("--part", "memory", "--flow-steps", "4", "--flow-context", "2", "--json", "-")
    run = mosstalk("bench", "codec", *SMALL, *options)
    settings = json.loads(run.stdout)["settings"]
    assert settings["euler steps"] == "4"
    assert settings["own history"] == "2 s besides the voice"


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--part", "everything"), "--part everything: choose of decode, recompute"),
        (("--replies", "1,x"), "--replies 1,x: give numbers above 0"),
        (("--streams", "0"), "--streams 0: give numbers above 0"),
        (("--random-weights", "huge"), "--random-weights must be full or tiny, not 'huge'"),
        (("--codec", "absent"), "absent: no such folder"),
        (("--flow-context", "-1"), "flow context must be above 0"),
        (("--html", "absent/page.html"), "absent: no such folder"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_a_wrong_option_is_refused(mosstalk: Run, options: tuple[str, ...], complaint: str) -> None:
    given = (*SMALL, *options)
    if options[0] == "--codec":
        given = options
    assert complaint in refused(mosstalk("bench", "codec", *given))


def test_a_run_that_was_wrong_gives_no_time() -> None:
    good = Timed("good", 9.0, 1, (1.0, 2.0, 3.0))
    wrong = Timed("wrong", 9.0, 1, (1.0, 2.0, 3.0), ("samples that are not finite",))
    assert good.require_valid() is good
    with pytest.raises(BenchError, match="wrong: valid 2/3, no time is given: samples that"):
        timed_table("both", [good, wrong])
    assert good.figures() | {"p50_ms": 2.0, "std_ms": 1.0, "valid": 3} == good.figures()


def test_a_crowd_is_timed_early_and_late() -> None:
    assert HopLoad.of(1, 250).stretches == {
        "first": range(1, 2), "2-11": range(2, 12), "241-250": range(241, 251),
    }  # fmt: skip
    assert HopLoad.of(8, 4).stretches == {"first": range(1, 2), "2-4": range(2, 5)}


def test_limits_are_measured_rates() -> None:
    rates = measure_ceilings(torch.device("cpu"), torch.float32)
    assert rates.limit_ms(Work(rates.bytes_per_s, 0)) == pytest.approx(1000)
    assert rates.limit_ms(Work(0, rates.flops_per_s / 2)) == pytest.approx(500)
    assert "GB/s" in rates.describe()


@pytest.mark.parametrize("seed", range(8))
def test_after_its_first_second_no_frame_of_the_sound_is_louder(seed: int) -> None:
    sound = torch.from_numpy(sound_like_speech(6.0, seed))
    frames = sound.unfold(0, 400, 160)
    bands = WhisperBands.of(128, torch.device("cpu"))
    loudness = bands.logs(torch.fft.rfft(frames * bands.window).T).amax(0)
    assert loudness[100:].max() < loudness[:100].max() - 0.5


def test_pushes_are_timed_with_a_repair_or_without(pipeline: Pipeline) -> None:
    live = LiveTokenizer(pipeline.codec.tokenizer)
    plain, _ = measure_pushes(live, 2, 1.0, 3)
    repairing = measure_repairing(live, 2, 1.0)
    assert (plain.n, plain.wrong) == (3, ())
    assert (repairing.n, repairing.wrong) == (5, ())
