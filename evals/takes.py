"""What a checkpoint makes: text read aloud, recordings spoken again, speech written down."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from evals.readings import Reading
from mosstalk.audio.sound import Samples
from mosstalk.codec.speech_decoder import decode_offline
from mosstalk.models.voices import Voice
from mosstalk.offline.pipeline import Answer, Pipeline, speak, transcribe
from mosstalk.offline.text_normalizer import readable
from mosstalk.progress import Progress
from mosstalk.reply_options import SamplingOptions, Script
from mosstalk.runtime.timing import TurnTimings

READ_ALOUD = "read aloud"
READ_ALOUD_LONG = "read aloud, long sentences"
RESYNTHESISED = "resynthesised"
STREAMED = "streamed"
"""Resynthesised hop by hop."""
_Hops = list[Samples]
_SCRIPTS = {"speak": "speech:25", "transcribe": "text:8", "chat": "speech:25"}
"""Replies of random weights, which never end by themselves."""


@dataclass(frozen=True)
class Way:
    """How a checkpoint is run: voice, seed, and scripts where its weights are random."""

    pipeline: Pipeline
    voice: Voice
    seed: int = 0

    @property
    def scripted(self) -> bool:
        """Whether the replies' mode changes and lengths are forced."""
        return self.pipeline.model.config.weights_kind == "synthetic"

    def script(self, task: str) -> Script | None:
        """The script of a task's replies, if they are scripted."""
        return Script.parse(_SCRIPTS[task]) if self.scripted else None

    def options(self, task: str) -> SamplingOptions:
        """How ids are drawn: as the checkpoint says for the task, with this seed."""
        return self.pipeline.defaults.of(task).options(self.seed)

    @property
    def replies(self) -> str:
        """How replies end, for whoever reads the figures."""
        if not self.scripted:
            return "replies end by themselves"
        scripts = " and ".join(dict.fromkeys(_SCRIPTS.values()))
        return f"scripted {scripts}: mode changes and length forced"

    def drawing(self, task: str) -> str:
        """How ids are drawn for a task, and how long a reply may be."""
        limits, options = self.pipeline.defaults.of(task).limits(), vars(self.options(task))
        drawn = ", ".join(f"{name} {value}" for name, value in options.items() if name != "seed")
        return f"{drawn}; at most {limits.max_new_rows} rows"


@dataclass(frozen=True)
class Streamed:
    """A reading that came hop by hop: where hops join, and what the first sound and all took.

    ``seams`` are, for each sound, indices of the first sample of each hop after the first.
    """

    reading: Reading
    seams: tuple[tuple[int, ...], ...]
    first_audio_ms: tuple[float, ...] = ()
    real_time_factors: tuple[float, ...] = ()

    @classmethod
    def of(
        cls,
        name: str,
        texts: Sequence[str],
        hops: Sequence[Sequence[Samples]],
        *figures: list[float],
    ) -> "Streamed":
        """Of the sounds of each text's hops."""
        wholes = (np.concatenate(each) if each else np.zeros(0, np.float32) for each in hops)
        ends = (np.cumsum([len(sound) for sound in each])[:-1].tolist() for each in hops)
        reading = Reading(name, tuple(texts), tuple(wholes))
        return cls(reading, tuple(map(tuple, ends)), *map(tuple, figures))


def read_texts(way: Way, texts: Sequence[str], tell: Progress, name: str = READ_ALOUD) -> Streamed:
    """Have the checkpoint read each text aloud, as a user hears it: hop by hop.

    A text that is longer than the checkpoint reads at once is read in pieces. One text is read
    first and thrown away, so that no figure holds the machine's warm-up.
    """
    _read(way, texts[0])
    hops, first_ms, factors = list[_Hops](), list[float](), list[float]()
    for place, text in enumerate(texts):
        tell("reading aloud", place, len(texts))
        read, timings, audio_s = _read(way, text)
        hops.append(read)
        factor = timings.real_time_factor(audio_s)
        if timings.first_audio_ms is not None and factor is not None:
            first_ms.append(timings.first_audio_ms)
            factors.append(factor)
    return Streamed.of(name, texts, hops, first_ms, factors)


def _read(way: Way, text: str) -> tuple[_Hops, TurnTimings, float]:
    """The sound of a text, piece after piece, with what it took and how many seconds it lasts."""
    hops, answers = _Hops(), list[Answer]()
    for piece in readable(text, way.pipeline.defaults.text).pieces:
        answers.append(_speak_piece(way, piece))
        hops += answers[-1]
    timings = TurnTimings.together([answer.timings for answer in answers])
    return hops, timings, sum(answer.audio_s for answer in answers)


def _speak_piece(way: Way, piece: str) -> Answer:
    return speak(
        way.pipeline,
        piece,
        voice=way.voice,
        options=way.options("speak"),
        script=way.script("speak"),
        as_written=True,
    )


def resynthesise(way: Way, recordings: Reading, tell: Progress) -> tuple[Reading, Streamed]:
    """Recordings to codes and back to sound in the voice: at once, and hop by hop."""
    codec = way.pipeline.codec
    offline, hops = list[Samples](), list[_Hops]()
    for place, heard in enumerate(recordings.heard):
        tell("resynthesising", place, len(recordings))
        codes = codec.tokenizer.encode(torch.from_numpy(heard))
        with torch.inference_mode():
            sound = decode_offline(codec, way.voice, codes, way.seed)
        offline.append(sound.cpu().numpy().astype(np.float32))
        hops.append(_stream(way, codes))
    whole = Reading(RESYNTHESISED, recordings.texts, tuple(offline))
    return whole, Streamed.of(STREAMED, recordings.texts, hops)


def _stream(way: Way, codes: Sequence[int]) -> _Hops:
    """Codes one by one through the streaming decoder, as generation gives them."""
    stream = way.pipeline.open_stream(way.voice, way.seed)
    sounds = [sound for code in codes for sound in stream.push([code])]
    sounds += [last for last in (stream.finish(),) if last is not None]
    return [sound.cpu().numpy().astype(np.float32) for sound in sounds]


def write_down(way: Way, reading: Reading, tell: Progress) -> list[str]:
    """The checkpoint's own transcript of each sound."""
    texts = []
    for place, heard in enumerate(reading.heard):
        tell(f"writing down {reading.name}", place, len(reading))
        answer = transcribe(
            way.pipeline,
            heard,
            options=way.options("transcribe"),
            script=way.script("transcribe"),
        )
        for _ in answer:
            pass
        texts.append(answer.text)
    return texts


def reply_to(way: Way, turns: Sequence[str | Samples]) -> tuple[str, Samples]:
    """What the checkpoint writes and says (n,) at 24 kHz in reply to the last of ``turns``.

    A turn is text or speech (n,), float at 16 kHz; each is answered in speech before the next.
    """
    chat = way.pipeline.chat(voice=way.voice)
    text, hops = "", _Hops()
    for turn in turns:
        if isinstance(turn, str):
            chat.read(turn)
        else:
            chat.hear(turn)
        answer = chat.answer(options=way.options("chat"), script=way.script("chat"))
        hops = list(answer)
        text = answer.text
    return text.strip(), np.concatenate(hops) if hops else np.zeros(0, np.float32)
