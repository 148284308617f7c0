"""Whatever was said, cut, deleted and interrupted: the next answer is that to a fresh prompt."""

from dataclasses import replace
from random import Random

import pytest
from conftest import run
from session_rig import (
    BY_HAND,
    QUESTION,
    SENTENCE,
    Client,
    Offline,
    host,
    require_nothing_held,
    speech,
)

from mosstalk.reply_options import Limits
from mosstalk.session.commands import (
    CancelResponse,
    Clear,
    Commit,
    Context,
    CreateResponse,
    CreateText,
    DeleteItem,
    ReplyLimits,
    Truncate,
    UpdateSettings,
)
from mosstalk.session.events import AudioDelta, ErrorRaised, ItemDone, ResponseDone

SHORT = replace(BY_HAND, limits=ReplyLimits(rows=14), context=Context(rows=330))


async def settle(client: Client) -> None:
    """Wait until all that was asked has been done and no response is being made."""
    number = f"{len(client.events)}"
    client.do(CancelResponse("none", command_id=number))
    await client.wait(ErrorRaised, lambda error: error.command_id == number)
    while client.session.is_answering:
        await client.wait(ResponseDone)


async def disturb(client: Client, random: Random) -> None:
    """Something that a client may do at any time."""
    items = [event.item for event in client.all(ItemDone)]
    replies = [item.item_id for item in items if item.role == "assistant"]
    start = random.randrange(20_000)
    sound = speech(random.choice([QUESTION, SENTENCE]))[start : start + 20_000]
    kind = random.randrange(9)
    if kind == 0 and replies:
        client.do(Truncate(random.choice(replies), random.uniform(0, 1200)))
    elif kind == 1 and items:
        client.do(DeleteItem(random.choice(items).item_id))
    elif kind == 2:
        client.do(CreateResponse(), CreateResponse(in_conversation=False))
        await client.wait(AudioDelta)
        client.do(CancelResponse())
    elif kind == 3:
        client.say(sound)
        client.do(CreateText("user", "The train is late."), CreateResponse())
    elif kind == 4:
        client.say(sound[: random.choice([900, 12_000])])
        client.do(Clear())
    elif kind == 5:
        client.do(UpdateSettings(replace(SHORT, instructions=random.choice(["Hello.", None]))))
    elif kind == 6:
        client.do(CreateResponse(instructions="Be brief."))
    else:
        client.say(sound, piece=random.choice([160, 3000]))
        client.do(Commit(), CreateResponse())


async def require_as_offline(client: Client, response_id: str) -> None:
    """Check the next answer against one to the same rows, read afresh."""
    offline = Offline()
    offline.chat.conversation.rows = client.rows
    client.do(CreateResponse(response_id))
    await client.wait(ResponseDone, lambda done: done.response_id == response_id)
    assert client.pcm(response_id) == offline.answer(limits=Limits(14))[0]


@pytest.mark.parametrize(
    # Slow: longer walks, and one more.
    ("seed", "turns"),
    [(0, 2), *(pytest.param(seed, 5, marks=pytest.mark.slow) for seed in (0, 1))],
)
def test_after_any_walk_the_answer_is_that_to_a_fresh_prompt(seed: int, turns: int) -> None:
    random = Random(seed)

    async def main() -> None:
        async with host(blocks=60) as here:
            async with await here.open(SHORT) as session:
                client = Client(session)
                client.do(CreateText("user", "Good morning."))
                for number in range(turns):
                    for _ in range(random.randint(1, 3)):
                        await disturb(client, random)
                    client.do(Clear())
                    await settle(client)
                    await require_as_offline(client, f"asked {number}")
            require_nothing_held(here)

    run(main())
