# mypy: ignore-errors
"""LiveKit's RealtimeModel and a server that ends and comes back: python ... http://host:port

It prints a line once it has talked, and what it has to tell after it has talked again.
"""

import asyncio
import json
import sys

from livekit.agents import APIConnectOptions, llm
from livekit.plugins import openai
from with_livekit import soon


async def words(generation):
    """What a reply says."""
    said = ""
    async for message in generation.message_stream:
        async for delta in message.text_stream:
            said += delta
    return said


async def main(url):
    model = openai.realtime.RealtimeModel(
        base_url=f"{url}/v1", api_key="none", voice="marin",
        conn_options=APIConnectOptions(max_retry=100, retry_interval=0.5),
    )  # fmt: skip
    session, told = model.session(), {}
    metrics, again, fatal = [], asyncio.Event(), []
    session.on("metrics_collected", metrics.append)
    session.on("session_reconnected", lambda _: again.set())
    session.on("error", lambda event: event.recoverable or fatal.append(repr(event)))
    chat = llm.ChatContext.empty()
    chat.add_message(role="user", content="My name is Ada, and I live in Spain.", id="lk_user")
    chat.add_message(role="assistant", content="Good morning, Ada.", id="lk_assistant")
    await soon(session.update_chat_ctx(chat))
    told["before"] = await soon(words(await soon(session.generate_reply())))
    print("talked", flush=True)
    await soon(again.wait(), 100)
    told["after"] = await soon(words(await soon(session.generate_reply())))
    told["items"] = [[item.role, item.text_content] for item in session.chat_ctx.items]
    told["read"] = [each.input_tokens for each in metrics]
    told["fatal"] = fatal
    await soon(session.aclose())
    await model.aclose()
    print(json.dumps(told))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
