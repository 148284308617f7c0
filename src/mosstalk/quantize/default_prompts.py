"""The conversations that are used where none are given: typed and spoken, replies by the model.

No recording is needed: what is said in them are codes that the model itself drew when it spoke,
so they are as likely to it as codes can be. Half of the conversations are typed, half spoken;
half of the replies are written, half spoken; some ask for plain reading and writing down.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from mosstalk.bench.sentences import HELD_OUT, read_sentences
from mosstalk.conversation import (
    SYSTEM_PROMPTS,
    Conversation,
    Encode,
    Reply,
    Segment,
    SpecialIds,
    SpeechSegment,
    TextSegment,
    Turn,
)
from mosstalk.engine.engine_core import EngineCore, EngineOptions, ReplyParams
from mosstalk.engine.request import Request, State
from mosstalk.models.language_model import LanguageModel
from mosstalk.offline.defaults import Choices
from mosstalk.offline.tasks import SPEAK_PROMPT, TRANSCRIBE_PROMPT
from mosstalk.progress import Progress
from mosstalk.quantize.prompts import Prompt, Prompts, lay_out
from mosstalk.sampling_options import Limits

NAME = "default-1"
"""Changes whenever the sentences do."""
SENTENCES, MEASURED = 135, 15
_AT_ONCE = 32
_ROOM = 256
"""Rows of a prompt with its reply."""

_WHO = "my sister|the doctor|our neighbour|her uncle|the driver|a friend|the teacher|my boss"
_DID = "found|sold|painted|forgot|borrowed|repaired|washed|ordered|carried|returned"
_WHAT = "the bicycle|an old map|two tickets|the kitchen table|a warm coat|the letters|a small lamp"
_WHEN = "yesterday|last night|before dinner|two weeks ago|this morning|on Sunday|after the storm"
_CAN = "help me find|tell me about|show me|explain|choose|describe|compare"
_OF = (
    "the fastest train|a good book|the weather in spring|cheap hotels|the history of tea|the stars"
)
_FORMS = (
    (_WHO, _DID, _WHAT, _WHEN, "."),
    ("Could you|Can you|Would you|Please", _CAN, _OF, "today|tomorrow|for a child|in short", "."),
    ("Why has|When has", _WHO, _DID, _WHAT, "?"),
)


def sentences(count: int, seed: int = 0) -> list[str]:
    """So many different sentences of a small grammar, always the same ones."""
    draws, found = random.Random(seed), dict[str, None]()
    while len(found) < count:
        words = [draws.choice(slot.split("|")) for slot in draws.choice(_FORMS)]
        text = " ".join(words[:-1]) + words[-1]
        found[text[0].upper() + text[1:]] = None
    return list(found)


@dataclass(frozen=True)
class Speaker:
    """The model that draws the replies of at most ``longest_rows``, and how to talk to it."""

    model: LanguageModel
    ids: SpecialIds
    encode: Encode
    chosen: Choices
    longest_rows: int = 64

    def default_prompts(self, tell: Progress) -> Prompts:
        """Calibrate on sentences of a grammar, measure on the quality bench's held-out ones."""
        texts = [*sentences(SENTENCES), *read_sentences(HELD_OUT)[:MEASURED]]
        kinds = self.conversations(texts, tell)
        by_text = [kind[place] for place in range(len(texts)) for kind in kinds]
        cut = len(kinds) * SENTENCES
        return Prompts(
            tuple(by_text[:cut]),
            tuple(by_text[cut:]),
            f"{NAME}: {len(by_text)} conversations, typed and spoken, all replies and all speech "
            "drawn by the model itself; those measured on are of other sentences",
        )

    def conversations(self, texts: Sequence[str], tell: Progress) -> list[list[Prompt]]:
        """Four kinds of each text: typed or spoken, answered by speech or in writing."""
        typed: list[Segment] = [self._words(text) for text in texts]
        aloud = self._asked(typed, (SPEAK_PROMPT, SYSTEM_PROMPTS["speech"]))
        said = [self._codes(reply) for reply in self._replies(aloud, True, tell)]
        kinds = [self._laid_out(aloud, said)]
        for segments, systems, speech in (
            (typed, (SYSTEM_PROMPTS["text"],), False),
            (said, (TRANSCRIBE_PROMPT, SYSTEM_PROMPTS["text"]), False),
            (said, (SYSTEM_PROMPTS["speech"],), True),
        ):
            asked = self._asked(segments, systems)
            replies = self._replies(asked, speech, tell)
            as_segment = self._codes if speech else self._written
            kinds.append(self._laid_out(asked, [as_segment(reply) for reply in replies]))
        return kinds

    def _words(self, text: str) -> Segment:
        return TextSegment(tuple(self.encode(text)))

    def _codes(self, reply: Reply) -> Segment:
        return SpeechSegment(tuple(reply.codes(self.ids)))

    def _written(self, reply: Reply) -> Segment:
        return TextSegment(tuple(reply.text_ids(self.ids)))

    def _asked(self, segments: Sequence[Segment], systems: Sequence[str]) -> list[list[Turn]]:
        """What comes before each reply; system prompts take turns."""
        return [
            [
                Turn("system", (self._words(systems[place % len(systems)]),)),
                Turn("user", (segment,)),
            ]
            for place, segment in enumerate(segments)
        ]

    def _laid_out(self, asked: Sequence[list[Turn]], replies: Sequence[Segment]) -> list[Prompt]:
        return [
            lay_out([*turns, Turn("assistant", (reply,))], self.ids, self.encode)
            for turns, reply in zip(asked, replies, strict=True)
        ]

    def _replies(self, asked: Sequence[list[Turn]], speech: bool, tell: Progress) -> list[Reply]:
        """A reply to each, many at once; each is drawn by a seed of its own."""
        blocks = _AT_ONCE * _ROOM // EngineOptions().block_rows
        core = EngineCore(self.model, self.ids, EngineOptions(blocks=blocks))
        made, under_way = list[Request](), list[Request]()
        for place, turns in enumerate(asked):
            tell("drawing replies", place, len(asked))
            while len(under_way) == _AT_ONCE:
                core.step()
                under_way = _still_under_way(core, under_way)
            conversation = Conversation(self.ids, self.encode)
            for turn in turns:
                conversation.add_turn(turn)
            conversation.open_reply(speech)
            ask = ReplyParams(self.chosen.options(seed=place), Limits(self.longest_rows))
            under_way.append(core.submit(core.open(conversation.rows), ask))
            made.append(under_way[-1])
        core.run()
        _still_under_way(core, under_way)
        return [request.reply for request in made]


def _still_under_way(core: EngineCore, requests: Sequence[Request]) -> list[Request]:
    """Those that go on; what others took is free again.

    Raises:
        PoisonedError: the model's logits are not finite.
    """
    for request in requests:
        if request.error:
            raise request.error
        if request.state is State.DONE:
            core.close(request.sequence)
    return [request for request in requests if request.state is not State.DONE]
