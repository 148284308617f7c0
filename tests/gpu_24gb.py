"""The whole pipeline in 23.5 GiB of a GPU: ``python tests/gpu_24gb.py --precision fp8``.

Random weights of the published sizes, drawn on the device in the precision that they serve in. One
conversation fills 8,192 rows; its last turn is spoken and answered by speech.

The cap holds for the whole process: another one takes all memory of the card but 23.5 GiB before
this one has so much as a context, and watches how much is left every few milliseconds. ``--device
cpu --size tiny`` tries the script without a GPU, uncapped.
"""

import argparse
import asyncio
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
from session_rig import QUESTION, RATE, Client, speech
from torch import Tensor

from mosstalk.bench.documents import WHOLE
from mosstalk.codec.speech_decoder import DecoderOptions
from mosstalk.config import LanguageModelConfig
from mosstalk.conversation import SpecialIds
from mosstalk.engine.engine_core import EngineOptions
from mosstalk.engine.kv_store import bytes_per_row
from mosstalk.engine.memory import keep_table_on_host
from mosstalk.engine.scheduler import SchedulerLimits
from mosstalk.files import write_document
from mosstalk.models.checkpoint import empty_model
from mosstalk.models.language_model import LanguageModel
from mosstalk.models.quantization import Quantization, replace_linear
from mosstalk.models.text_tokenizer import TextTokenizer
from mosstalk.models.voices import save_voice
from mosstalk.numerics.fp8 import Fp8Linear, Fp8Weight
from mosstalk.offline.pipeline import Pipeline
from mosstalk.plan.fit import Wish, plan_of
from mosstalk.plan.sizes import Configs
from mosstalk.prepared.machine import Peaks, host_peak_bytes, machine_facts
from mosstalk.reply_options import SoundRequest
from mosstalk.runtime.device import pick_device
from mosstalk.session.commands import (
    Context,
    ContextPolicy,
    CreateResponse,
    CreateText,
    ReplyLimits,
    Sampling,
    SessionSettings,
)
from mosstalk.session.events import ErrorRaised, ResponseDone
from mosstalk.session.host import Host, HostOptions
from mosstalk.synthesis.sizes import NAMED, Sizes
from mosstalk.synthesis.small_parts import write_tokenizer
from mosstalk.synthesis.weights import random_codec, random_voice, scale_of

CAP_BYTES = int(23.5 * 2**30)
ROWS = 8192
VOICE_S = 6.8
REPLY_ROWS = 75
ROOM_ROWS = 250
"""For two replies, the spoken turn, and what opens and closes turns."""
LOOK_S = 0.005
GIB = 2**30


def ballast() -> None:
    """Hold all but ``CAP_BYTES`` of the card; say the least that was left, once stdin closes."""
    free, _ = torch.cuda.mem_get_info()
    held = torch.empty(max(0, free - CAP_BYTES), dtype=torch.uint8, device="cuda")
    free, _ = torch.cuda.mem_get_info()
    print(free, flush=True)
    least = free
    while not select.select([sys.stdin], [], [], LOOK_S)[0]:
        least = min(least, torch.cuda.mem_get_info()[0])
    print(min(least, torch.cuda.mem_get_info()[0]), flush=True)
    del held


@dataclass
class Cap:
    """Bytes that were free before, and the least that was free afterwards."""

    free: int
    least: int = 0

    @property
    def peak(self) -> int:
        """The most that everything else took of the card: context, graphs, libraries, tensors."""
        return self.free - self.least


@contextmanager
def capped(wanted: bool) -> Iterator[Cap | None]:
    """Run the block in ``CAP_BYTES`` of the card, and know the most that it took."""
    if not wanted:
        yield None
        return
    words = [sys.executable, __file__, "--ballast"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        cap = Cap(int(other.stdout.readline()))
        try:
            yield cap
        finally:
            other.stdin.write("end\n")
            other.stdin.close()
            cap.least = int(other.stdout.readline())


def drawn(name: str, weight: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Random values for a parameter made on the meta device."""
    scale, offset = scale_of(name, tuple(weight.shape))
    return torch.empty(weight.shape, device=device, dtype=dtype).normal_(offset, scale)


def random_model(sizes: Sizes, device: torch.device, precision: str) -> LanguageModel:
    """In bf16, or with the shared block's products in FP8, which never are in bf16 all at once."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    record = Quantization() if precision == "fp8" else None
    config = LanguageModelConfig.from_dict(sizes.model)
    model = empty_model(config).eval().requires_grad_(requires_grad=False)
    if record:
        for name in record.linears(config):
            shape = model.get_submodule(name).get_parameter("weight")
            weight = Fp8Weight.of(drawn(f"{name}.weight", shape, device, dtype))
            replace_linear(model, name, Fp8Linear.holding(weight))
    for name, parameter in list(model.named_parameters()):
        if parameter.is_meta:
            owner, _, leaf = name.rpartition(".")
            value = torch.nn.Parameter(drawn(name, parameter, device, dtype), requires_grad=False)
            model.get_submodule(owner).register_parameter(leaf, value)
    return model


def pipeline_of(sizes: Sizes, device: torch.device, precision: str, folder: Path) -> Pipeline:
    """Model, tokenizer and codec, none of them from a file but the tokenizer."""
    write_tokenizer(folder, sizes.model)
    model = random_model(sizes, device, precision)
    tokenizer = TextTokenizer.from_folder(folder, model.config.vocab_size)
    ids = SpecialIds.of(model.config, tokenizer.special)
    return Pipeline(model, tokenizer, random_codec(sizes, device), ids)


def host_of(pipeline: Pipeline, precision: str, embeddings: str, folder: Path) -> Host:
    """For one session, with memory for one conversation and one voice."""
    codec, device = pipeline.codec, pipeline.model.device
    voice = folder / "voice.safetensors"
    save_voice(random_voice(codec, VOICE_S), voice)
    configs = Configs(
        pipeline.model.config, codec.tokenizer.config, codec.flow.config, codec.vocoder.config
    )
    plan = plan_of(configs, Wish(CAP_BYTES, precision, 1, ROWS, VOICE_S + 0.4, embeddings))
    memory = plan.flow_memory_mib if device.type == "cuda" else None
    print(f"plan: {plan.needed_bytes / GIB:.2f} GiB for {ROWS} rows, fits: {plan.fits}")
    options = HostOptions(
        1,
        context_rows=ROWS,
        engine=EngineOptions(limits=SchedulerLimits(slots=1)),
        decoder=DecoderOptions.of(SoundRequest(memory_mib=memory), device, 1),
        voices={"default": voice},
    )
    budget = ROWS * bytes_per_row(pipeline.model.config, pipeline.model.dtype)
    return Host.around(pipeline, options, memory_bytes=budget)


async def talk(host: Host) -> ResponseDone:
    """Fill the conversation, then one spoken turn."""
    await host.warm_up()
    settings = SessionSettings(
        input_rate=RATE,
        instructions="",
        turn_detection=None,
        sampling=Sampling(seed=1),
        limits=ReplyLimits(longest_s=60.0),
        context=Context(ContextPolicy.REFUSE),
        script=f"speech:{REPLY_ROWS}",
    )
    async with await host.open(settings) as session:
        client = Client(session)
        client.do(CreateText("user", "a" * (ROWS - ROOM_ROWS)))
        client.do(CreateResponse())  # a first answer, so that all of it has been read
        await client.wait(ResponseDone)
        done = await client.turn(speech(QUESTION))
        rows = len(session.conversation_rows())
    errors = [event for event in client.events if isinstance(event, ErrorRaised)]
    assert not errors, errors
    assert 0.99 * ROWS < rows <= ROWS, rows
    assert done.usage.output_audio, done
    print(f"{rows} rows in the end; {done.usage}")
    return done


async def run(host: Host) -> ResponseDone:
    """Start and stop around a talk."""
    async with host:
        return await talk(host)


def measure(chosen: argparse.Namespace, cap: Cap | None, started: float) -> dict[str, object]:
    """Draw, start, talk; print and return figures."""
    device, sizes = pick_device(chosen.device), NAMED[chosen.size]
    peaks = Peaks(device)
    with tempfile.TemporaryDirectory() as folder:
        pipeline = pipeline_of(sizes, device, chosen.precision, Path(folder))
        peaks.look()
        print(f"weights drawn after {time.perf_counter() - started:.1f} s")
        if chosen.embeddings == "host":
            keep_table_on_host(pipeline.model)
        host = host_of(pipeline, chosen.precision, chosen.embeddings, Path(folder))
        done = asyncio.run(run(host))
    peaks.look()
    timings = done.timings
    settings = machine_facts(device, "synthetic") | {
        "precision": chosen.precision,
        "embeddings": chosen.embeddings,
        "cap_gib": "none" if cap is None else f"{cap.free / GIB:.2f}, held by another process",
    }
    figures: dict[str, object] = {
        "commit_to_first_audio_ms": timings.commit_to_first_audio_ms,
        "real_time_factor": timings.real_time_factor,
        "torch_peak_gib": None if cap is None else torch.cuda.max_memory_reserved() / GIB,
        "host_peak_gib": (host_peak_bytes() or 0) / GIB,
        "layers": type(host.engine.core.runner.layers).__name__,
    }
    return {"format": WHOLE, "weights": "synthetic", "settings": settings} | figures


def main() -> None:
    """Cap, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--precision", choices=("bf16", "fp8"), default="bf16")
    parser.add_argument("--embeddings", choices=("device", "host"), default="device")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--size", choices=sorted(NAMED), default="full")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--ballast", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.ballast:
        ballast()
        return
    started = time.perf_counter()
    with capped(chosen.device.startswith("cuda")) as cap:
        found = measure(chosen, cap, started)
    found["device_peak_gib"] = cap.peak / GIB if cap else None
    found["seconds"] = time.perf_counter() - started
    for name, value in found.items():
        print(f"{name:<26} {value}")
    if chosen.json:
        write_document(chosen.json, found)


if __name__ == "__main__":
    main()
