"""``mosstalk speak`` and ``mosstalk transcribe``."""

from pathlib import Path
from typing import Annotated

import typer

from mosstalk.cli import options as opt
from mosstalk.cli.common import reported


def speak(
    text: Annotated[
        str | None, typer.Argument(help="What to read aloud; - reads standard input.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", help="Read this text file (UTF-8) aloud instead.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Where the sound goes: .wav, .flac or .ogg.")] = Path(
        "spoken.wav"
    ),
    model: opt.Model = None,
    codec: opt.Codec = None,
    voice: opt.VoiceName = "default",
    vocoder: opt.Vocoder = "hift",
    vocoder_dir: opt.VocoderDir = None,
    system: opt.TaskSystem = None,
    temperature: opt.Temperature = None,
    top_k: opt.TopK = None,
    top_p: opt.TopP = None,
    repetition_penalty: opt.RepetitionPenalty = None,
    seed: opt.Seed = 0,
    max_rows: opt.MaxRows = None,
    script: opt.ReplyScript = None,
    device: opt.Device = "auto",
    dtype: opt.ModelDtype = None,
    trace: opt.TraceFile = None,
    json: opt.AsJson = False,
) -> None:
    """Read text aloud into one sound file.

    mosstalk speak "Good morning." --out morning.wav

    mosstalk speak --file chapter.txt --out chapter.flac

    echo "The train is late." | mosstalk speak - --out late.ogg

    Long text is cut at sentence ends, else commas: each piece is one reply, one
    after the other in OUT. It grows in OUT.part, which is renamed at the end.

    The model says what it can read. For mosstalk-pocket numbers, units and
    abbreviations become words, emoji are left out with a note, and text that
    is not English is refused.

    Exit code 1: the model ended its replies without a sound. 2: wrong input.
    """
    with reported():
        from mosstalk.cli.opening import ModelRequest, SamplingRequest
        from mosstalk.cli.speak_console import SpeakRequest, run_speak
        from mosstalk.codec.sound_request import SoundRequest
        from mosstalk.offline.defaults import Choices

        sound = SoundRequest(vocoder=vocoder, vocoder_folder=vocoder_dir)
        choices = Choices(temperature, top_k, top_p, repetition_penalty, max_rows)
        request = SpeakRequest(
            text=text, file=file, out=out, voice=voice, system=system,
            model=ModelRequest(model, codec, device, dtype, sound),
            sampling=SamplingRequest.of(choices, seed, script),
            trace=trace, as_json=json,
        )  # fmt: skip
        raise typer.Exit(run_speak(request))


def transcribe(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="Sound files that libsndfile reads.")
    ],
    model: opt.Model = None,
    codec: opt.Codec = None,
    system: opt.TaskSystem = None,
    temperature: opt.Temperature = None,
    top_k: opt.TopK = None,
    top_p: opt.TopP = None,
    repetition_penalty: opt.RepetitionPenalty = None,
    seed: opt.Seed = 0,
    max_rows: opt.MaxRows = None,
    script: opt.ReplyScript = None,
    channel: opt.Channel = None,
    device: opt.Device = "auto",
    dtype: opt.ModelDtype = None,
    trace: opt.TraceFile = None,
    json: opt.AsJson = False,
) -> None:
    """Write down what is said in recordings.

    mosstalk transcribe meeting.wav > meeting.txt

    mosstalk transcribe monday.flac tuesday.flac

    The text alone goes to stdout, a line for each piece as soon as it is there,
    behind the file's name where there are several files; figures go to stderr.
    What is longer than 30 s is cut at pauses. A file that was cut short is written
    down as far as it goes, with a warning on stderr.

    How much of it is right depends on the model: see its card.
    """
    with reported():
        from mosstalk.cli.opening import ModelRequest, SamplingRequest
        from mosstalk.cli.transcribe_console import TranscribeRequest, run_transcribe
        from mosstalk.offline.defaults import Choices

        choices = Choices(temperature, top_k, top_p, repetition_penalty, max_rows)
        request = TranscribeRequest(
            files=tuple(files),
            channel=channel,
            system=system,
            model=ModelRequest(model, codec, device, dtype),
            sampling=SamplingRequest.of(choices, seed, script),
            trace=trace,
            as_json=json,
        )
        run_transcribe(request)
