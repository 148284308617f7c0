# mypy: ignore-errors
"""Pipecat's STT and TTS against a server: with_pipecat_speech.py http://host:port speech.pcm"""

import asyncio
import json
import sys
from pathlib import Path

from loguru import logger
from pipecat.frames.frames import (
    EndFrame,
    ErrorFrame,
    InputAudioRawFrame,
    InterimTranscriptionFrame,
    TranscriptionFrame,
    TTSAudioRawFrame,
    TTSSpeakFrame,
    TTSStoppedFrame,
    VADUserStartedSpeakingFrame,
    VADUserStoppedSpeakingFrame,
)
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.runner import PipelineRunner
from pipecat.pipeline.task import PipelineParams, PipelineTask
from pipecat.processors.frame_processor import FrameProcessor
from pipecat.services.openai.stt import OpenAIRealtimeSTTService, OpenAISTTService
from pipecat.services.openai.tts import OpenAITTSService

logger.remove()
logger.add(sys.stderr, level="WARNING")
KINDS = (
    ErrorFrame, InterimTranscriptionFrame, TranscriptionFrame, TTSAudioRawFrame, TTSStoppedFrame,
)  # fmt: skip
RATE = 24_000


class Ear(FrameProcessor):
    """What comes out of a service."""

    def __init__(self, into):
        super().__init__()
        self._into = into

    async def process_frame(self, frame, direction):
        await super().process_frame(frame, direction)
        if isinstance(frame, KINDS):
            self._into.put_nowait(frame)
        await self.push_frame(frame, direction)


async def heard(service, frames, last):
    """The frames of a service up to the first of the last kind."""
    into, got = asyncio.Queue(), []
    params = PipelineParams(audio_in_sample_rate=RATE, audio_out_sample_rate=RATE)
    task = PipelineTask(Pipeline([service, Ear(into)]), params=params)
    running = asyncio.create_task(PipelineRunner(handle_sigint=False).run(task))
    while not getattr(service, "_session_ready", True):  # it sends sound before its settings
        await asyncio.sleep(0.02)
    await task.queue_frames(frames)
    while not got or not isinstance(got[-1], last):
        got.append(await asyncio.wait_for(into.get(), 60))
        assert not isinstance(got[-1], ErrorFrame), got[-1].error
    await task.queue_frame(EndFrame())
    await asyncio.wait_for(running, 60)
    return got


async def main(url, speech):
    where, socket = {"base_url": f"{url}/v1", "api_key": "none"}, url.replace("http", "ws")
    said = [
        InputAudioRawFrame(speech[start : start + 4800], RATE, 1)
        for start in range(0, len(speech), 4800)
    ]
    turn = [VADUserStartedSpeakingFrame(), *said, VADUserStoppedSpeakingFrame()]
    told = {"heard": (await heard(OpenAISTTService(**where), turn, TranscriptionFrame))[-1].text}
    spoken = await heard(
        OpenAITTSService(**where), [TTSSpeakFrame("Good morning.")], TTSStoppedFrame
    )
    told["spoken"] = sum(len(each.audio) for each in spoken if isinstance(each, TTSAudioRawFrame))
    for name, detection, frames in (
        ("by_hand", False, turn), ("hands_free", {"type": "server_vad"}, said),
    ):  # fmt: skip
        service = OpenAIRealtimeSTTService(
            api_key="none", base_url=f"{socket}/v1/realtime", turn_detection=detection
        )
        got = await heard(service, frames, TranscriptionFrame)
        told[name] = {"text": got[-1].text, "interim": "".join(each.text for each in got[:-1])}
    print(json.dumps(told))


asyncio.run(main(sys.argv[1], Path(sys.argv[2]).read_bytes()))
