# mypy: ignore-errors
"""LiveKit's STT and TTS against a server: with_livekit_speech.py http://host:port speech.pcm"""

import asyncio
import json
import sys
from pathlib import Path

from livekit import rtc
from livekit.agents import stt, utils
from livekit.plugins import openai

RATE, STEP = 24_000, 480


def frames(pcm):
    size = 2 * STEP
    return [
        rtc.AudioFrame(pcm[start : start + size], RATE, 1, STEP)
        for start in range(0, len(pcm) - size + 1, size)
    ]


async def streamed(asked, speech):
    """What a stream tells of two turns."""
    kinds, texts = [], []
    stream = asked.stream()
    for frame in frames(speech + speech):
        stream.push_frame(frame)
    async for event in stream:
        kinds.append(event.type.value)
        if event.type is stt.SpeechEventType.FINAL_TRANSCRIPT:
            texts.append(event.alternatives[0].text)
        if kinds.count("recognition_usage") == 2:
            break
    stream.end_input()
    await stream.aclose()
    await asked.aclose()
    return {"kinds": kinds, "texts": texts}


async def main(url, speech):
    where, told = {"base_url": f"{url}/v1", "api_key": "none"}, {}
    for language in ("en", "zh"):
        heard = await openai.STT(language=language, **where).recognize(frames(speech))
        told[f"heard_{language}"] = heard.alternatives[0].text
    for response_format in ("mp3", "pcm"):
        voice = openai.TTS(response_format=response_format, **where)
        samples = 0
        async for audio in voice.synthesize("Good morning."):
            samples += audio.frame.samples_per_channel
        told[f"spoken_{response_format}"] = samples
        await voice.aclose()
    async with utils.http_context.open():
        told["streamed"] = await streamed(openai.STT(use_realtime=True, **where), speech)
    print(json.dumps(told))


asyncio.run(main(sys.argv[1], Path(sys.argv[2]).read_bytes()))
