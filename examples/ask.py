"""Ask a spoken question, get a spoken answer, and go on talking.

    .venv/bin/python examples/ask.py assets/capital.flac answer.wav

Without --model and --codec the model that ships answers. Random weights (--model synthetic) would
never end by themselves: the length of their answers is forced here, and what is heard is noise.
"""

import argparse
from pathlib import Path

import mosstalk


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("question", type=Path, help="a sound file")
    parser.add_argument("answer", type=Path, help="a .wav, .flac or .ogg to write")
    parser.add_argument("--model", type=Path, help="folder of the language model")
    parser.add_argument("--codec", type=Path, help="folder of the codec")
    args = parser.parse_args()

    pipeline = mosstalk.Pipeline.load(args.model, args.codec)
    random_weights = pipeline.model.config.weights_kind == "synthetic"
    script = mosstalk.Script.parse("speech:40") if random_weights else None

    chat = pipeline.chat(voice="default")
    chat.hear_file(args.question)

    answer = chat.answer(options=mosstalk.SamplingOptions(seed=1), script=script)
    writer = mosstalk.AudioWriter(args.answer, rate=24_000)
    for samples in answer:  # float32, as soon as each hop is made
        writer.write(samples)
        print(f"{answer.audio_s:.2f} s of sound")
    writer.close()

    # The conversation goes on: the answer is history now, and only new rows are read.
    chat.read("And of Spain?")
    text_script = mosstalk.Script.parse("text:12") if random_weights else None
    second = chat.answer(speech=False, script=text_script)
    for _ in second:
        pass
    print(f"{second.timings.rows_prefilled} new rows read, answer: {second.text!r}")


if __name__ == "__main__":
    main()
