"""The whole training by one command: what begins when, and what a second call leaves out."""

import signal
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file
from test_recipe import recipe, trained, write_data

from recipes.pocket.whole import MARKS, Job, OtherVoices, Runner, Whole, WholeError


def whole(work: Path, cards: int = 1, others: OtherVoices | None = None) -> Whole:
    talks = [work / "talks.jsonl"]
    return Whole(work, work / "kept.safetensors", talks, cards, smoke=True, others=others)


def mark(work: Path, *names: str) -> None:
    (work / MARKS).mkdir(exist_ok=True)
    for name in names:
        (work / MARKS / f"{name}.done").touch()


def test_jobs_stand_after_all_that_they_wait_for_and_every_card_has_some() -> None:
    jobs = whole(Path("work"), cards=2).jobs()

    names = [job.name for job in jobs]
    assert len(set(names)) == len(names)
    for place, job in enumerate(jobs):
        assert set(job.after) <= set(names[:place])
    assert {job.card for job in jobs} == {0, 1}


def test_every_part_that_is_read_is_encoded_once_and_learned_from() -> None:
    jobs = whole(Path("work"), cards=2).jobs()

    def parts(prefix: str) -> list[int]:
        argvs = [job.argv for job in jobs if job.name.startswith(prefix)]
        return sorted(int(n) for a in argvs for n in a[a.index("--parts") + 1].split(","))

    readers = [job.argv for job in jobs if job.name.startswith("read-")]
    read = sorted(int(argv[argv.index("--part") + 1]) for argv in readers)
    assert read == parts("encode") == parts("language-model") == list(range(6))
    first = [job.part for job in jobs if job.part is not None and job.card == 0]
    assert parts("flow") == parts("predict") == parts("vocoder") == first == [0, 2, 4]


def test_flow_and_vocoder_wait_for_no_other_card() -> None:
    jobs = {job.name: job for job in whole(Path("work"), cards=2).jobs()}

    waited, begun = {"vocoder"}, set[str]()
    while waited:
        begun.add(name := waited.pop())
        waited |= set(jobs[name].after) - begun
    assert {jobs[name].card for name in begun} == {0}
    assert "encode-1" in jobs["language-model"].after


@pytest.mark.parametrize("others", [None, OtherVoices(Path("root"), Path("whisper"))])
def test_the_language_model_alone_waits_for_its_codes_and_keeps_the_codec(
    others: OtherVoices | None,
) -> None:
    kept = Path("codec") / "model.safetensors"
    asked = Whole(Path("work"), kept, [], 2, others=others, model_alone=True)

    jobs = {job.name: job for job in asked.jobs()}

    readers, voices = {f"read-{part}" for part in range(6)}, {"voices"} if others else set[str]()
    encoders = {"encode-0", "encode-1"}
    assert set(jobs) == readers | voices | encoders | {"give", "language-model", "package"}
    assert all({"give", *voices} <= set(jobs[name].after) for name in encoders)
    assert jobs["give"].argv[-1] == str(Path("work") / "tokenizer.safetensors")
    assert len({jobs[name].until for name in readers}) == 1
    assert jobs["package"].after == ("language-model",)
    assert jobs["package"].argv[-2:] == ("--kept-codec", "codec")


def test_a_training_of_speech_alone_tells_its_language_model_so() -> None:
    kept = Path("codec") / "model.safetensors"
    asked = Whole(Path("work"), kept, [], resume=Path("old"), model_alone=True, speaking_alone=True)

    jobs = {job.name: job for job in asked.jobs()}

    assert "--speaking-alone" in jobs["language-model"].argv
    assert "flow" not in jobs


def test_the_tokenizer_hears_other_programs_before_anything_is_encoded(tmp_path: Path) -> None:
    others = OtherVoices(tmp_path / "root", tmp_path / "whisper.safetensors")
    asked = whole(tmp_path, 2, others)

    jobs = {job.name: job for job in asked.jobs()}

    held, voices = jobs["tokenizer"], jobs["voices"]
    assert set(held.after) == {"read-0", "read-2", "read-4", "voices", "give"}
    assert {job.card for job in (held, *(jobs[name] for name in held.after))} == {0}
    assert held.files == (others.whisper,)
    assert all("tokenizer" in jobs[f"encode-{card}"].after for card in range(2))
    parts = held.argv[held.argv.index("--parts") + 1].split(",")
    assert voices.argv[voices.argv.index("--part") + 1] == parts[0]
    given = jobs["give"].argv[-1]
    limits = Runner(asked, 10.0)._limits(held)
    assert limits == ["--minutes", "3.600", "--resume", given]
    assert not Path(given).name.startswith("tokenizer"), "a second call does not hold it by itself"


def test_a_file_that_nothing_makes_is_named(tmp_path: Path) -> None:
    with pytest.raises(WholeError, match=r"lines\.xz: no stage makes"):
        Runner(whole(tmp_path), 1.0).run()


def test_a_job_that_fails_is_named_with_the_end_of_its_log(tmp_path: Path) -> None:
    mark(tmp_path, "read-0", "read-1", "read-2")
    (tmp_path / "kept.safetensors").write_bytes(b"no weights")

    with pytest.raises(WholeError) as raised:
        Runner(whole(tmp_path), 1.0).run()

    assert str(raised.value).startswith("failed: give")
    assert "give: " in str(raised.value)


def test_training_ends_at_its_share_of_the_time_that_is_left(tmp_path: Path) -> None:
    runner = Runner(whole(tmp_path), 10.0, time.monotonic() - 60)

    option, left, *rest = runner._limits(Job("flow", (), until=0.5))
    reader, seconds = runner._limits(Job("read-0", (), until=0.2, part=0))

    assert (option, reader, rest) == ("--minutes", "--seconds", [])
    assert 3.9 < float(left) <= 4.0
    assert 59 < float(seconds) <= 60


def test_a_second_call_goes_on_from_the_weights_of_the_first(tmp_path: Path) -> None:
    for folder in ("old", "work"):
        (tmp_path / folder).mkdir()
    (tmp_path / "old" / "flow.safetensors").touch()
    (tmp_path / "old" / "vocoder.safetensors").touch()
    (tmp_path / "work" / "flow.safetensors").touch()
    training = Whole(tmp_path / "work", tmp_path, [], resume=tmp_path / "old")

    assert training.earlier("flow") == tmp_path / "work" / "flow.safetensors"
    assert training.earlier("vocoder") == tmp_path / "old" / "vocoder.safetensors"
    assert training.earlier("language-model") is None


def test_training_that_fails_is_tried_once_more_without_graphs(tmp_path: Path) -> None:
    mark(tmp_path, *(job.name for job in whole(tmp_path).jobs() if job.name != "flow"))

    with pytest.raises(WholeError, match=r"failed: flow"):
        Runner(whole(tmp_path), 1.0).run()  # there are no clips

    log = (tmp_path / MARKS / "flow.log").read_text()
    assert log.count("no finished shards") == 2


def test_whoever_interrupts_it_leaves_no_stage_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: float) -> None:
        raise KeyboardInterrupt

    mark(tmp_path, *(job.name for job in whole(tmp_path).jobs() if job.name != "flow"))
    monkeypatch.setattr(time, "sleep", interrupted)
    runner = Runner(whole(tmp_path), 1.0)
    with pytest.raises(KeyboardInterrupt):
        runner.run()
    monkeypatch.undo()
    assert [process.wait(60) for process in runner._running.values()] == [-signal.SIGTERM]


def test_a_reader_that_falls_leaves_what_it_has_read(tmp_path: Path) -> None:
    (tmp_path / "lines.xz").write_bytes(b"no lines")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "00-kokoro-00000.json").touch()

    with pytest.raises(WholeError, match=r"failed: read-[12], read-[12]\n"):
        Runner(whole(tmp_path), 1.0).run()

    assert (tmp_path / MARKS / "read-0.done").exists()


@trained
def test_from_clips_to_a_package_and_again_only_what_is_missing(tmp_path: Path) -> None:
    work = tmp_path / "work"
    write_data(work / "data")
    for part in (1, 2):
        for path in list((work / "data").glob("00-*")):
            path.with_name(f"{part:02}{path.name[2:]}").write_bytes(path.read_bytes())
    recipe("tokenizer", "--work", work, "--smoke", "--minutes", "5", "--steps", "4")
    (work / "talks.jsonl").write_text('{"turns": [{"user": "Hello.", "answer": "Hi."}]}\n' * 60)
    mark(work, "read-0", "read-1", "read-2", "give")
    talks = ("--dialogues", work / "talks.jsonl", "--minutes", "0.4")
    options = ("whole", "--work", work, "--kept", work, "--smoke", "--cards", "1", *talks)

    said = recipe(*options)

    begun = [line.split()[2] for line in said.splitlines() if " begins: " in line]
    trained_once = ["encode-0", "flow", "language-model", "package", "predict", "vocoder"]
    assert sorted(begun) == trained_once
    assert "language-model has ended, status 0" in said
    assert load_file(work / "package" / "model" / "model.safetensors")
    (work / MARKS / "package.done").unlink()
    again = recipe(*options)
    assert "package has ended, status 0" in again
    assert "language-model" not in again
