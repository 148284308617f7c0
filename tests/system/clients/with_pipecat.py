# mypy: ignore-errors
"""Pipecat's Realtime service against a server: with_pipecat.py URL speech.pcm [manual] [legal]"""

import asyncio
import base64
import json
import os
import sys
import traceback
from pathlib import Path

import numpy as np
import soxr
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

    async def tell(self, kind, **more):
        """Send an event of the protocol, of which Pipecat's own types know a part."""
        await self.service._ws_send({"type": kind, **more})

    async def legal(self, speech):
        """What the protocol allows and few clients send; bytes of each reply to it."""
        audio = base64.b64encode(speech).decode()
        parts = [
            {"type": "input_text", "text": "What is said here?"},
            {"type": "input_audio", "audio": audio},
        ]
        mixed = {"type": "message", "role": "user", "content": parts}
        approval = {"type": "mcp_approval_response", "approval_request_id": "r", "approve": True}
        await self.tell("conversation.item.create", item=mixed)
        await self.tell("conversation.item.create", item=approval)
        await self.tell("response.create")
        told = {"mixed": await self.reply()}
        for name, given in (("input", [mixed]), ("nothing", [])):
            await self.tell("response.create", response={"input": given})
            told[name] = await self.reply()
        narrow = mu_law(speech)
        for name, kind, sound in (
            ("telephone", "audio/pcmu", narrow), ("again", "audio/pcm", speech),
        ):  # fmt: skip
            rate = {"rate": 24_000} if kind == "audio/pcm" else {}
            heard = {"format": {"type": kind, **rate}}
            session = {"type": "realtime", "audio": {"input": heard}}
            await self.tell("session.update", session=session)
            encoded = base64.b64encode(sound).decode()
            await self.tell("input_audio_buffer.append", audio=encoded)
            await self.tell("input_audio_buffer.commit")
            await self.tell("response.create")
            told[name] = await self.reply()
        return told


def mu_law(pcm):
    """PCM16 at 24 kHz as mu-law at 8 kHz."""
    low = soxr.resample(np.frombuffer(pcm, "<i2"), 24_000, 8000).astype(np.int32)
    size = np.minimum(np.abs(low), 32_635) + 132
    exponent = np.log2(size).astype(np.int32) - 7
    mantissa = size >> (exponent + 3) & 15
    return (~(np.where(low < 0, 128, 0) | exponent << 4 | mantissa) & 255).astype("u1").tobytes()


async def run(url, speech, manual, legal):
    """The talk; where it fails, the process ends: Pipecat's runner outlives a cancellation."""
    try:
        await main(url, speech, manual, legal)
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


async def main(url, speech, manual, legal):
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
    if legal:
        told |= await talk.legal(speech)
    told["listening"] = not talk.service._receive_task.done()
    told["errors"] = talk.errors
    await talk.task.queue_frame(EndFrame())
    await asyncio.wait_for(running, 60)
    print(json.dumps(told))


asyncio.run(
    run(sys.argv[1], Path(sys.argv[2]).read_bytes(), "manual" in sys.argv, "legal" in sys.argv)
)
