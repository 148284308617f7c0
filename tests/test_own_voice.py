"""The published codec has no voice: where there is one's own alone, everything speaks with it."""

import json
import shutil
from pathlib import Path

import pytest
from conftest import Checkpoint, Run, run
from server_rig import QUICK, Talker, serving

from mosstalk.errors import VoiceError
from mosstalk.models.voices import any_voice
from mosstalk.server.ipc import BY_HAND, WorkerOptions
from mosstalk.server.loading import load


@pytest.fixture
def own(tiny: Checkpoint, tmp_path: Path) -> Checkpoint:
    """A checkpoint whose only voice is ada."""
    copy = tiny.copy(tmp_path)
    voices = copy.codec / "voices"
    (voices / "default.safetensors").rename(voices / "ada.safetensors")
    return copy


def test_a_server_starts_answers_and_is_replayed_in_the_only_voice(
    own: Checkpoint, tmp_path: Path, cache_folder: Path, mosstalk: Run
) -> None:
    folders = ("--model", str(own.model), "--codec", str(own.codec))
    spoken = ("--voice", "ada", "--script", "speech:25")
    kept = tmp_path / "kept"
    words = (*folders, *QUICK, *spoken, "--record", str(kept))
    with serving(*words, cache=cache_folder) as server:

        async def main() -> None:
            async with Talker(server) as talker:
                assert (await talker.ask("Good morning."))["status"] == "completed"
                assert talker.pcm()

        run(main())
        server.await_nothing_held()
        (recording,) = server.await_folder(kept)

    replayed = mosstalk("replay", recording, *folders)
    assert replayed.returncode == 0, replayed.stderr


def test_a_start_without_its_name_says_which_voice_there_is(own: Checkpoint) -> None:
    async def main(voice: str) -> None:
        options = WorkerOptions(
            own.model, own.codec, "cpu", sessions=1, detector=BY_HAND, voice=voice
        )
        async with load(options, lambda *_: None).host as host:
            await host.warm_up()

    run(main("ada"))
    with pytest.raises(VoiceError, match="unknown voice 'default'; there are: ada"):
        run(main("default"))
    (own.codec / "voices" / "ada.safetensors").unlink()
    with pytest.raises(VoiceError, match="there are: none, make one with mosstalk voice create"):
        run(main("default"))


def test_the_voice_that_speaks_unasked_is_named_first(own: Checkpoint) -> None:
    voices = own.codec / "voices"
    shutil.copy(voices / "ada.safetensors", voices / "zoe.safetensors")

    async def main() -> None:
        for names in (("zoe", "ada"), ("ada", "zoe")):
            options = WorkerOptions(
                own.model, own.codec, "cpu", sessions=1, detector=BY_HAND, voice=names[0]
            )
            loaded = load(options, lambda *_: None)
            async with loaded.host:
                assert loaded.info(0.0).voices == names

    run(main())


def test_a_report_is_spoken_in_the_voice_that_there_is(
    own: Checkpoint, tmp_path: Path, mosstalk: Run
) -> None:
    made = mosstalk("doctor", "--report", "r.json", "--model", own.model, "--codec", own.codec)
    assert made.returncode == 0, made.stderr
    assert json.loads((tmp_path / "r.json").read_text())["turn"]["audio_s"] == 2.0


def test_any_voice_is_the_default_one_where_it_is() -> None:
    assert any_voice(["ada", "default"]) == "default"
    assert any_voice(["ada", "bob"]) == "ada"
    assert any_voice([]) == "default"
