# mypy: ignore-errors
"""Pipecat's Realtime service against a server: with_pipecat.py URL speech.pcm [manual]"""

import asyncio
import json
import sys
from pathlib import Path

from loguru import logger
from pipecat.adapters.llm.schemas.function_schema import FunctionSchema
from pipecat.adapters.llm.schemas.tools_schema import ToolsSchema
from pipecat.frames.frames import (
    EndFrame,
    ErrorFrame,
    InputAudioRawFrame,
    InterruptionFrame,
    LLMContextFrame,
    LLMFullResponseEndFrame,
    TTSAudioRawFrame,
    UserStartedSpeakingFrame,
    UserStoppedSpeakingFrame,
)
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.runner import PipelineRunner
from pipecat.pipeline.task import PipelineParams, PipelineTask
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.frame_processor import FrameProcessor
from pipecat.services.openai.realtime import events
from pipecat.services.openai.realtime.llm import OpenAIRealtimeLLMService

logger.remove()
logger.add(sys.stderr, level="WARNING")


class Ear(FrameProcessor):
    """What comes out of the service."""

    def __init__(self, into):
        super().__init__()
        self._into = into

    async def process_frame(self, frame, direction):
        await super().process_frame(frame, direction)
        if isinstance(frame, TTSAudioRawFrame | LLMFullResponseEndFrame | ErrorFrame):
            self._into.put_nowait(frame)
        await self.push_frame(frame, direction)


class Talk:
    """A running pipeline."""

    def __init__(self, url, manual):
        self.manual = manual
        detection = False if manual else events.TurnDetection(silence_duration_ms=300)
        heard = events.AudioInput(
            transcription=events.InputAudioTranscription(), turn_detection=detection
        )
        properties = events.SessionProperties(audio=events.AudioConfiguration(input=heard))
        self.service = OpenAIRealtimeLLMService(
            api_key="none",
            base_url=f"{url.replace('http', 'ws')}/v1/realtime",
            settings=OpenAIRealtimeLLMService.Settings(
                model="gpt-realtime",
                system_instruction="Be brief.",
                session_properties=properties,
            ),
        )
        self.heard, self.errors = asyncio.Queue(), []
        params = PipelineParams(audio_in_sample_rate=24_000, audio_out_sample_rate=24_000)
        self.task = PipelineTask(Pipeline([self.service, Ear(self.heard)]), params=params)

        @self.service.event_handler("on_error")
        async def on_error(_, error):
            self.errors.append(repr(error))

    async def reply(self, most=None):
        """Bytes of a reply's sound, or of its first frames."""
        size = 0
        while True:
            frame = await asyncio.wait_for(self.heard.get(), 60)
            if isinstance(frame, ErrorFrame):
                self.errors.append(frame.error)
            elif isinstance(frame, TTSAudioRawFrame):
                size += len(frame.audio)
                if most is not None and size >= most:
                    return size
            elif size:
                return size

    async def turn(self, pcm):
        """A turn that interrupts what is being said: found by the server, or by hand."""
        if self.manual:
            await self.task.queue_frame(UserStartedSpeakingFrame())
        await self.task.queue_frame(InterruptionFrame())
        await self.say(pcm)
        if self.manual:
            await self.task.queue_frame(UserStoppedSpeakingFrame())

    async def say(self, pcm):
        for start in range(0, len(pcm), 4800):
            await self.task.queue_frame(InputAudioRawFrame(pcm[start : start + 4800], 24_000, 1))


async def main(url, speech, manual):
    talk, told = Talk(url, manual), {}
    running = asyncio.create_task(PipelineRunner(handle_sigint=False).run(talk.task))
    schema = FunctionSchema("weather", "What it is like", {"city": {"type": "string"}}, ["city"])
    messages = [
        {"role": "user", "content": "Hello."},
        {"role": "assistant", "content": "Good morning."},
        {"role": "user", "content": "How are you?"},
    ]
    context = LLMContext(messages, tools=ToolsSchema(standard_tools=[schema]))
    await talk.task.queue_frame(LLMContextFrame(context))
    told["first"] = await talk.reply()
    await talk.turn(speech)
    told["spoken"] = await talk.reply()
    await talk.turn(speech)
    told["interrupted"] = await talk.reply(most=1)
    await talk.turn(speech)
    told["after"] = await talk.reply()
    told["listening"] = not talk.service._receive_task.done()
    told["errors"] = talk.errors
    await talk.task.queue_frame(EndFrame())
    await asyncio.wait_for(running, 60)
    print(json.dumps(told))


asyncio.run(main(sys.argv[1], Path(sys.argv[2]).read_bytes(), "manual" in sys.argv))
