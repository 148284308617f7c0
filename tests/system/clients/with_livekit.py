# mypy: ignore-errors
"""LiveKit's RealtimeModel against a server: with_livekit.py http://host:port speech.pcm [words]"""

import asyncio
import json
import sys
from pathlib import Path

from livekit import rtc
from livekit.agents import llm
from livekit.plugins import openai

RATE = 24_000


async def soon(waited, seconds=60):
    return await asyncio.wait_for(waited, seconds)


class Talk:
    """A session, and all that it emits."""

    def __init__(self, model):
        self.session = model.session()
        self.errors, self.metrics, self.stops = [], [], []
        self.generations, self.heard = asyncio.Queue(), asyncio.Queue()
        self.started = asyncio.Event()
        self.session.on("error", lambda event: self.errors.append(repr(event)))
        self.session.on("metrics_collected", self.metrics.append)
        self.session.on("generation_created", self.generations.put_nowait)
        self.session.on("input_speech_started", lambda _: self.started.set())
        self.session.on("input_speech_stopped", self.stops.append)
        self.session.on("input_audio_transcription_completed", self.heard.put_nowait)

    def say(self, pcm):
        step = RATE // 100 * 2
        for start in range(0, len(pcm) - step + 1, step):
            piece = pcm[start : start + step]
            self.session.push_audio(rtc.AudioFrame(piece, RATE, 1, step // 2))

    async def listen(self, generation, most=None):
        """Item, samples and modalities of a reply, or of its first frames."""
        samples = 0
        message = await anext(aiter(generation.message_stream))
        async for frame in message.audio_stream:
            samples += frame.samples_per_channel
            if most is not None and samples >= most:
                break
        return message.message_id, samples, list(await message.modalities)


@llm.function_tool
async def weather(city: str) -> str:
    """What the weather is like."""
    return f"rain in {city}"


async def all_words(session: openai.realtime.RealtimeSession) -> list[str]:
    """Of the whole history, once all of it has words: the last come after their sound."""
    while True:
        found = [item.text_content for item in session.chat_ctx.items if item.type == "message"]
        if all(found):
            return found
        await asyncio.sleep(0.01)


async def main(url, speech):
    model = openai.realtime.RealtimeModel(base_url=f"{url}/v1", api_key="none", voice="marin")
    talk, told = Talk(model), {}
    session = talk.session

    chat = llm.ChatContext.empty()
    chat.add_message(role="system", content="You are brief.", id="lk_system")
    chat.add_message(role="user", content="Hello.", id="lk_user")
    chat.add_message(role="assistant", content="Good morning.", id="lk_assistant")
    await soon(session.update_instructions("Answer in one word."))
    await soon(session.update_tools([weather]))
    await soon(session.update_chat_ctx(chat))
    told["items"] = [item.id for item in session.chat_ctx.items]
    chat.items += [
        llm.FunctionCall(id="lk_call", call_id="c", name="weather", arguments="{}"),
        llm.FunctionCallOutput(id="lk_out", call_id="c", output="rain", is_error=False),
    ]
    await soon(session.update_chat_ctx(chat))
    told["with_call"] = [item.id for item in session.chat_ctx.items]

    generation = await soon(session.generate_reply(instructions="Say hello."))
    told["asked"] = await soon(talk.listen(generation))
    told["user_initiated"] = generation.user_initiated
    talk.generations.get_nowait()

    talk.say(speech)
    spoken = await soon(talk.generations.get())
    told["spoken"] = await soon(talk.listen(spoken))
    if "words" in sys.argv:
        while not (event := await soon(talk.heard.get())).is_final:
            pass
        told["heard"] = event.transcript
        told["words"] = await soon(all_words(session))

    talk.started.clear()
    again = await soon(session.generate_reply())
    item_id, _, _ = await soon(talk.listen(again, most=1))
    talk.session.interrupt()
    session.truncate(message_id=item_id, modalities=["audio", "text"], audio_end_ms=99_999)
    session.interrupt()
    await soon(session.update_chat_ctx(llm.ChatContext.empty()))
    told["left"] = [item.id for item in session.chat_ctx.items]

    told["transcripts_asked"] = talk.stops[0].user_transcription_enabled
    told["metrics"] = len(talk.metrics)
    told["errors"] = talk.errors
    await soon(session.aclose())
    await model.aclose()
    print(json.dumps(told))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2]).read_bytes()))
