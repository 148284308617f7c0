"""Record what the public MOSS-Speech code computes, as golden cases for ``mosstalk verify``.

Run this where OpenMOSS's public code and the real weights are. It needs torch, safetensors
and transformers, and the two ``reference_*.py`` beside it; it imports nothing from mosstalk and
holds none of the public code:

    python tools/record_reference.py --model MOSS-Speech --codec MOSS-Speech-Codec \\
        --wav question-16k.wav --voice voice.wav --out recorded
    mosstalk verify recorded/*

It writes one folder a component (language-model, speech-tokenizer, flow, hift). Weights are
not copied: ``case.json`` names their folder, and ``mosstalk verify --weights DIR`` names
another. What could not be found is said in NOTES.txt.

NOT YET RUN AGAINST THE REAL THING: the public code and weights were out of reach where this
was written. It follows the calls of their public demo, and was tested with stand-ins that
have this interface and compute with small random weights.
"""

import argparse
import importlib
import json
import shutil
import sys
import tempfile
import wave
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reference_codec import (
    Recording,
    add_flow,
    add_hift,
    find_parts,
    listening,
    plain,
)
from reference_rows import add_logits, add_run, head_logits

SYSTEM_PROMPTS = {
    "audio": "You are a helpful voice assistant. "
    "Answer the user's questions with spoken responses.",
    "text": "You are a helpful assistant. Answer the user's questions with text.",
}
RUNS = {"greedy_plain": 1.0, "greedy_penalty": 1.1}
"""Greedy runs and their repetition penalty."""
SPOKEN = "clip0_to_audio"
"""The prompt whose reply is decoded to sound."""
INPUT_RATE = 16_000
FRAMES_PER_CODE = 8


class CannotRecordError(Exception):
    """Something is missing; the message is one line that says what and what to do."""


@dataclass
class Reference:
    """The public objects, loaded."""

    library: Any
    torch: Any
    processor: Any
    model: Any

    @property
    def stop_ids(self) -> list[int]:
        """Ids that end a reply: <|endoftext|>, which is the padding token, and <|im_end|>."""
        tokenizer = self.processor.tokenizer
        return [
            int(tokenizer.pad_token_id),
            int(tokenizer.convert_tokens_to_ids("<|im_end|>")),
        ]


def say(line: str) -> None:
    """Progress, at once."""
    print(line, flush=True)


def load(options: argparse.Namespace, library: Any) -> Reference:
    """Load processor and model as the public demo does."""
    torch = needed("torch")
    say("loading the processor and codec")
    try:
        processor = library.AutoProcessor.from_pretrained(
            options.model,
            codec_path=options.codec,
            device=options.device,
            trust_remote_code=True,
        )
        say("loading the model")
        model = library.AutoModel.from_pretrained(
            options.model, trust_remote_code=True, device_map=options.device
        )
    except (OSError, ValueError, ImportError, RuntimeError, KeyError) as error:
        reason = " ".join(str(error).split())[:300]
        raise CannotRecordError(f"cannot load {options.model}: {reason}") from None
    if options.dtype:
        model = model.to(getattr(torch, options.dtype))
    return Reference(library, torch, processor, model.eval())


def needed(name: str) -> Any:
    """Import a package, or say in one line that it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise CannotRecordError(
            f"{name} cannot be imported ({error}): run this in the environment in which the "
            "public MOSS-Speech demo runs"
        ) from None


def read_pcm(path: Path) -> list[int]:
    """Samples of a wav that needs no resampling, so that every reader hears the same."""
    try:
        with wave.open(str(path)) as file:
            kind = (file.getframerate(), file.getnchannels(), file.getsampwidth())
            data = file.readframes(file.getnframes())
    except (OSError, EOFError, wave.Error) as error:
        raise CannotRecordError(f"{path}: not a readable wav file ({error})") from None
    if kind != (INPUT_RATE, 1, 2):
        raise CannotRecordError(
            f"{path}: must be 16 kHz, mono, 16 bit; convert it: "
            f"ffmpeg -i {path.name} -ar 16000 -ac 1 -sample_fmt s16 question-16k.wav"
        )
    return [int.from_bytes(data[i : i + 2], "little", signed=True) for i in range(0, len(data), 2)]


# Prompts and greedy runs.


def conversations(options: argparse.Namespace) -> dict[str, tuple[list[dict[str, Any]], str]]:
    """Conversations by name, each with the kind of reply that is asked for."""
    spoken = {f"clip{i}": {"path": str(p), "type": "audio/wav"} for i, p in enumerate(options.wav)}
    questions: dict[str, Any] = {"typed": options.text} | spoken
    return {
        f"{name}_to_{kind}": (
            [{"role": "system", "content": prompt}, {"role": "user", "content": question}],
            kind,
        )
        for name, question in questions.items()
        for kind, prompt in SYSTEM_PROMPTS.items()
    }


def stopping(reference: Reference, seen: list[int]) -> Any:
    """The public demo's rule, as its own class of this script: the last row's text id ends it."""
    torch, stop = reference.torch, set(reference.stop_ids)

    class StopIds(reference.library.StoppingCriteria):  # type: ignore[misc, name-defined]
        def __call__(self, input_ids: Any, *_: Any, **__: Any) -> Any:
            seen.append(1)
            if len(seen) % 10 == 0:
                say(f"  {len(seen)} rows")
            last = input_ids[:, -1]
            texts = last[..., 0] if last.ndim > 1 else last
            flags = [int(text) in stop for text in texts.flatten()]
            return torch.tensor(flags, device=input_ids.device)

    return reference.library.StoppingCriteriaList([StopIds()])


def generate(reference: Reference, inputs: Any, penalty: float, options: argparse.Namespace) -> Any:
    """Rows as ``generate`` returns them, greedily."""
    config = reference.library.GenerationConfig(
        do_sample=False,
        repetition_penalty=penalty,
        max_new_tokens=options.max_new_tokens,
        min_new_tokens=0,
    )
    with reference.torch.inference_mode():
        return reference.model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            generation_config=config,
            stopping_criteria=stopping(reference, []),
        )


def record_language_model(
    reference: Reference, options: argparse.Namespace
) -> tuple[Recording, dict[str, Any]]:
    """Greedy runs of every prompt; also returns the prompts, and ``generate``'s spoken output."""
    case = Recording("language_model", {"stop_token_ids": reference.stop_ids, "runs": []})
    case.settings["dtype"] = str(next(reference.model.parameters()).dtype).removeprefix("torch.")
    prompts: dict[str, Any] = {}
    for name, (conversation, kind) in conversations(options).items():
        inputs = reference.processor([conversation], [kind])
        inputs = {key: inputs[key].to(options.device) for key in ("input_ids", "attention_mask")}
        prompts[name] = case.tensors[f"{name}.prompt"] = inputs["input_ids"][0].cpu().long()
        for run, penalty in RUNS.items():
            say(f"{name}, {run}")
            with head_logits(reference.model) as logits:
                output = generate(reference, inputs, penalty, options)
            if (name, run) == (SPOKEN, "greedy_penalty"):
                prompts["spoken output"] = output
            add_run(case, reference, f"{name}.{run}", prompts[name], output)
            case.settings["runs"][-1] |= {
                "repetition_penalty": penalty,
                "min_new_tokens": 0,
                "max_new_tokens": options.max_new_tokens,
            }
            if run == "greedy_penalty":
                stem = f"{name}.{run}"
                add_logits(case, reference.torch, stem, logits, options.logits)
    return case, prompts


# The codec.


def record_speech_tokenizer(
    reference: Reference, options: argparse.Namespace, prompts: dict[str, Any]
) -> Recording:
    """Codes of every clip, as they stand in the prompt that the processor made."""
    case = Recording("speech_tokenizer", {"clips": [], "sampling_rate": INPUT_RATE})
    config = reference.model.config
    for index, path in enumerate(options.wav):
        grid = prompts[f"clip{index}_to_audio"]
        spoken = grid[grid[:, 0] == int(config.modality_pad_token_id)][:, 1]
        codes = spoken[spoken != int(config.eosp_token_id)]
        pcm = reference.torch.tensor(read_pcm(path), dtype=reference.torch.int16)
        case.tensors |= {f"clip{index}.pcm16": pcm, f"clip{index}.tokens": codes}
        case.settings["clips"].append(
            {"clip": f"clip{index}", "samples": len(pcm), "tokens": len(codes)}
        )
        _add_log_mel(case, reference, options, index)
    return case


def _add_log_mel(
    case: Recording, reference: Reference, options: argparse.Namespace, index: int
) -> None:
    """The encoder's input, where the processor's encoder can be found and hears one segment."""
    parts = find_parts(reference.processor)
    conversation, kind = conversations(options)[f"clip{index}_to_audio"]
    with listening({key: parts[key] for key in parts if key == "encoder"}) as calls:
        reference.processor([conversation], [kind])
    mels = [call.first("input_features") for call in calls["encoder"]]
    if len(mels) != 1 or mels[0] is None:
        case.notes.append(f"clip{index}: log-mel not seen ({len(mels)} calls of an encoder)")
        return
    frames = FRAMES_PER_CODE * case.settings["clips"][index]["tokens"]
    mel = plain(mels[0])
    if mel.ndim == 2 and mel.shape[1] >= frames:
        case.tensors[f"clip{index}.log_mel"] = mel[:, :frames]
    else:
        case.notes.append(f"clip{index}: log-mel of shape {list(mel.shape)} is not one segment")


def record_decoding(
    reference: Reference, options: argparse.Namespace, output: Any
) -> list[Recording]:
    """Flow and vocoder while the spoken reply is decoded; what was not seen is noted."""
    say("decoding the spoken reply")
    parts = find_parts(reference.processor)
    with listening(parts) as calls, reference.torch.inference_mode():
        decoded = reference.processor.decode(
            output.cpu(), ["audio"], decoder_audio_prompt_path=str(options.voice)
        )
    flow, hift = Recording("flow"), Recording("hift")
    for case in (flow, hift):
        if case.component not in parts:
            case.notes.append(f"no object that looks like {case.component} was reachable")
        elif not calls[case.component]:
            case.notes.append(f"{type(parts[case.component]).__name__} was not called")
    if calls["flow"]:
        files = Path(options.codec) / "flow"
        add_flow(flow, reference.torch, parts["flow"], calls["flow"], files)
    if calls["hift"]:
        add_hift(hift, calls)
    rates = [int(item.sampling_rate) for item in decoded if hasattr(item, "sampling_rate")]
    hift.notes.append(f"the decoded sound is at {rates or 'unknown'} Hz")
    return [flow, hift]


# Writing.


def write_case(folder: Path, case: Recording, weights: str, torch: Any) -> None:
    """Write one folder, whole or not at all; without tensors only its notes go in the parent's."""
    save_file = needed("safetensors.torch").save_file
    part = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    part.chmod(0o755)
    settings = {"component": case.component, "weights": weights, "dtype": "float32"}
    try:
        tensors = {name: value.contiguous().clone() for name, value in case.tensors.items()}
        save_file(tensors, part / "expected.safetensors")
        (part / "case.json").write_text(json.dumps(settings | case.settings, indent=1) + "\n")
        notes = [f"recorded with torch {torch.__version__}", *case.notes]
        (part / "NOTES.txt").write_text("\n".join(notes) + "\n")
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def located(name: str) -> str:
    """Where weights are: an absolute folder, or the name as given where it is none."""
    return str(Path(name).resolve()) if Path(name).is_dir() else name


def record(options: argparse.Namespace, library: Any) -> int:
    """Record everything; return 1 where a component could not be recorded."""
    reference = load(options, library)
    language_model, prompts = record_language_model(reference, options)
    cases = [language_model, record_speech_tokenizer(reference, options, prompts)]
    if options.voice:
        cases += record_decoding(reference, options, prompts["spoken output"])
    options.out.mkdir(parents=True)
    lost = []
    for case in cases:
        name = case.component.replace("_", "-")
        weights = options.model if case is language_model else options.codec
        if case.tensors:
            write_case(options.out / name, case, located(weights), reference.torch)
            say(f"{options.out / name}: {len(case.tensors)} tensors")
        else:
            lost += [f"{case.component}: NOT RECORDED: {note}" for note in case.notes]
    (options.out / "NOTES.txt").write_text("\n".join(lost or ["everything was recorded"]) + "\n")
    say("\n".join(lost or [f"next: mosstalk verify {options.out}/*"]))
    return 1 if lost else 0


def plan(options: argparse.Namespace) -> Iterator[str]:
    """What a run would record, line by line."""
    for name in conversations(options):
        runs = ", ".join(f"{run} (penalty {penalty})" for run, penalty in RUNS.items())
        yield f"language-model: {name}: {runs}, up to {options.max_new_tokens} rows"
    yield f"language-model: raw logits of the first {options.logits} steps of greedy_penalty"
    for index, path in enumerate(options.wav):
        yield f"speech-tokenizer: clip{index}: {path.name}, {len(read_pcm(path))} samples"
    yield (
        f"flow, hift: the reply of {SPOKEN} in the voice of {options.voice.name}"
        if options.voice
        else "flow, hift: not recorded without --voice"
    )


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", required=True, help="folder (or hub name) of the language model")
    add("--codec", required=True, help="folder of the codec")
    add("--wav", type=Path, action="append", required=True, help="a question, 16 kHz mono 16 bit")
    add("--voice", type=Path, help="a recording whose voice the reply gets; else no decoding")
    add("--text", default="Hello! How are you today?", help="a typed question")
    add("--out", type=Path, required=True, help="a new folder for the cases")
    add("--device", default="cuda", help="where to compute [%(default)s]; cpu is the most exact")
    add("--dtype", choices=("float32", "bfloat16"), help="of the language model; else as loaded")
    add("--max-new-tokens", type=int, default=64, help="longest reply in rows [%(default)s]")
    add("--logits", type=int, default=16, help="steps whose logits are kept [%(default)s]")
    add("--dry-run", action="store_true", help="say what would be recorded, load nothing")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None, library: Any = None) -> int:
    """Entry point; ``library`` stands in for transformers in tests."""
    options = parse(words)
    try:
        for line in plan(options):
            say(line)
        if options.dry_run:
            return 0
        if options.out.exists():
            raise CannotRecordError(f"{options.out}: exists already; choose another name")
        return record(options, library or needed("transformers"))
    except CannotRecordError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
