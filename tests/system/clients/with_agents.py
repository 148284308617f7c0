# mypy: ignore-errors
"""openai-agents against a server: with_agents.py http://host:port speech.pcm [words]"""

import asyncio
import json
import sys
from pathlib import Path

from agents import function_tool, set_tracing_disabled
from agents.realtime import RealtimeAgent, RealtimeRunner

set_tracing_disabled(True)


@function_tool
def weather(city: str) -> str:
    """What the weather is like."""
    return f"rain in {city}"


class Talk:
    """A session, and all that it tells."""

    def __init__(self, session):
        self.session, self.events, self.sound = session, [], 0
        self._told = session.__aiter__()

    async def until(self, *kinds, model=None):
        """Listen until an event of one of these types comes; of raw ones, of the model's type."""
        while True:
            event = await asyncio.wait_for(anext(self._told), 60)
            self.events.append(event)
            if event.type == "audio":
                self.sound += len(event.audio.data)
            raw = event.data.type if event.type == "raw_model_event" else None
            if event.type in kinds and model in (None, raw):
                return event


def words(item):
    """What is written in an item of the history."""
    return " ".join(getattr(each, "text", None) or each.transcript or "" for each in item.content)


async def main(url, speech):
    agent = RealtimeAgent(name="Clerk", instructions="Be brief.", tools=[weather])
    config = {"url": f"{url.replace('http', 'ws')}/v1/realtime?model=anything", "api_key": "none"}
    told = {}
    async with await RealtimeRunner(agent).run(model_config=config) as session:
        talk = Talk(session)
        await session.send_message("Hello.")
        await talk.until("audio_end")
        await talk.until("agent_end")
        told["typed"] = talk.sound
        for start in range(0, len(speech), 4800):
            await session.send_audio(speech[start : start + 4800])
        await talk.until("audio_end")
        await talk.until("agent_end")
        told["spoken"] = talk.sound - told["typed"]
        while "words" in sys.argv and not words(session._history[2]):
            await talk.until("history_updated")
        await session.send_message("And now?")
        await talk.until("audio")
        await session.interrupt()
        await talk.until("agent_end")
        await session.send_message("Go on.")
        await talk.until("agent_end")
        errors = [event for event in talk.events if event.type == "error"]
        told["errors"] = [repr(event.error) for event in errors]
        told["raw"] = sorted(
            {e.data.type for e in talk.events if e.type == "raw_model_event"} - {"raw_server_event"}
        )
        told["history"] = [item.role for item in session._history]
        told["words"] = [words(item) for item in session._history]
    print(json.dumps(told))


asyncio.run(main(sys.argv[1], Path(sys.argv[2]).read_bytes()))
