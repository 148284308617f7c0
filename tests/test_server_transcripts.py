"""Transcripts of both sides, made beside the talk."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import require_package
from server_rig import BY_HAND, QUICK, Server, Talker, question, run, serving
from typer.testing import CliRunner

from mosstalk.cli import app


@pytest.fixture(scope="module")
def server(cache_folder: Path) -> Iterator[Server]:
    """A server that writes down what is said."""
    require_package("faster_whisper", "transcribe")
    with serving(*QUICK, "--transcriber", "whisper-tiny", cache=cache_folder) as running:
        yield running


def test_both_sides_are_written_down_and_clients_see_it_in_time(server: Server) -> None:
    async def main() -> None:
        async with Talker(server) as talker:
            await talker.send(BY_HAND)
            await talker.say(question())
            await talker.send({"type": "input_audio_buffer.commit"})
            item_id = (await talker.wait("conversation.item.done"))["item"]["id"]
            kind = "conversation.item.input_audio_transcription.completed"
            heard = await talker.wait(kind, item_id=item_id)
            assert "folder" in heard["transcript"].lower()
            assert heard["usage"] == {"type": "duration", "seconds": 2.866}
            await talker.send({"type": "response.create"})
            done = await talker.wait("response.output_audio_transcript.done")
            assert done["transcript"]
            ended = (await talker.wait("response.done"))["response"]
            assert ended["output"][0]["content"][0]["transcript"] == done["transcript"]

    run(main())
    server.await_nothing_held()


def test_a_transcriber_that_cannot_be_had_is_said_before_anything_is_loaded(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["serve", "--transcriber", str(tmp_path)])
    assert result.exit_code == 2
    assert "model.bin" in result.stderr or "mosstalk[transcribe]" in result.stderr
