"""Two things to do with one reply: read text aloud, and write down what is said.

A model does them as well as it was trained for these prompts.
"""

import warnings

import numpy as np

from mosstalk.audio.sound import Samples
from mosstalk.errors import AudioError
from mosstalk.models.voices import Voice
from mosstalk.offline.pipeline import Answer, Pipeline
from mosstalk.offline.text_normalizer import readable
from mosstalk.reply_options import Limits, SamplingOptions, Script

SPEAK_PROMPT = "Read the user's text aloud."
TRANSCRIBE_PROMPT = "Write down what the user says."


def speak(
    pipeline: Pipeline,
    text: str,
    *,
    voice: str | Voice = "default",
    system: str | None = None,
    options: SamplingOptions | None = None,
    limits: Limits | None = None,
    script: Script | None = None,
    as_written: bool = False,
) -> Answer:
    """Begin to read ``text`` aloud; iterate over the answer for its sound.

    A conversation of its own: a system turn (``system``, by default ``SPEAK_PROMPT``, empty
    for none), the text as a typed turn, a spoken reply. ``options`` and ``limits`` None are
    the checkpoint's for this task. The text is spelled as the checkpoint asks, with a warning
    of what is left out, and is not cut: longer text is best given in the pieces of
    ``text_normalizer.readable``, ``as_written``, which leaves a text as it is.

    Raises:
        TextError: the text is empty, cannot be encoded, or holds no word or no letters that the
            checkpoint knows.
        VoiceError: the voice is unknown, damaged, or made for another codec.
    """
    if not as_written:
        found = readable(text, pipeline.defaults.text)
        text = found.text
        if found.note:
            warnings.warn(found.note, stacklevel=2)
    chat = pipeline.chat(voice=voice, system=SPEAK_PROMPT if system is None else system)
    chat.read(text)
    return chat.answer(task="speak", options=options, limits=limits, script=script)


def transcribe(
    pipeline: Pipeline,
    samples: Samples,
    *,
    system: str | None = None,
    options: SamplingOptions | None = None,
    limits: Limits | None = None,
    script: Script | None = None,
) -> Answer:
    """Begin to write down speech; once iterated to its end, ``answer.text`` is what was said.

    ``samples`` (n,) are float at 16 kHz, mono, best at most 30 s. A conversation of its own:
    a system turn (``system``, by default ``TRANSCRIBE_PROMPT``, empty for none), the speech
    as a turn, a written reply. ``options`` and ``limits`` None are the checkpoint's for this
    task. No voice is needed.

    Raises:
        AudioError: the samples are none, not one-dimensional, or not finite.
    """
    heard = np.asarray(samples, np.float32)
    if heard.ndim != 1 or not len(heard) or not np.isfinite(heard).all():
        raise AudioError("speech to write down must be finite samples (n,), mono at 16 kHz")
    prompt = TRANSCRIBE_PROMPT if system is None else system
    chat = pipeline.chat(system=prompt, speech=False)
    chat.hear(heard)
    return chat.answer(
        speech=False, task="transcribe", options=options, limits=limits, script=script
    )
