"""The same step by other means: plain torch in a CUDA graph or compiled, and transformers.

Letters: B sessions, N new rows of each, S rows seen by the last, C hidden_size, V ids.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mosstalk.bench.timed import Timed, run_timed
from mosstalk.conversation import Mode
from mosstalk.errors import BenchError, OptionError
from mosstalk.models.language_model import DecoderLayer, LanguageModel
from mosstalk.numerics.rope import rotary_tables, rotate
from mosstalk.plan.limits import Load
from mosstalk.runtime.graphs import STEPPING, captured

NAMES = ("graph", "compile", "transformers")
_WARM_UPS = 3
APART = 0.05
"""Relative norm of a difference between two runs: the sums of libraries need not be repeatable."""


class PlainStep:
    """Trunk, one block and its head in plain torch over a cache that lies still.

    The cache begins with random keys and values: only its size matters here. Each run reads the
    same rows at the same positions. ``kept`` (layers, 2, B, KV heads, S, d) is the cache.
    """

    def __init__(self, model: LanguageModel, load: Load) -> None:
        config, self._model = model.config, model
        backbone, audio = model.model, load.mode is Mode.AUDIO
        block = backbone.audio_block if audio else backbone.text_block
        layers = [*backbone.shared_block.layers, *block.layers]
        self._layers = [layer for layer in layers if isinstance(layer, DecoderLayer)]
        self._norm = backbone.audio_norm if audio else backbone.text_norm
        self._head = model.audio_lm_head if audio else model.text_lm_head
        seen = load.kept + load.new
        shape = (len(layers), 2, load.sessions, config.num_key_value_heads, seen, config.head_dim)
        self.kept = torch.randn(shape, device=model.device).to(model.dtype)
        text = config.modality_pad_token_id if audio else 0
        row = torch.tensor([text, 0], device=model.device)
        self._rows = row.expand(load.sessions, load.new, 2).contiguous()
        positions = torch.arange(load.kept, seen, device=model.device)
        self._new = slice(load.kept, seen)
        self._tables = rotary_tables(positions, config.head_dim, config.rope_theta)
        self._mask = torch.arange(seen, device=model.device)[None] <= positions[:, None]

    @torch.no_grad()  # torch.compile does not take views of tensors in inference mode
    def compute(self) -> Tensor:
        """Logits (B, V) that follow each session's last row."""
        x = self._model.embed(self._rows)
        for layer, kept in zip(self._layers, self.kept, strict=True):
            x = x + self._attend(layer, layer.input_layernorm(x), kept)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        logits: Tensor = self._head(self._norm(x[:, -1]))
        return logits

    def _attend(self, layer: DecoderLayer, x: Tensor, kept: Tensor) -> Tensor:
        attention = layer.self_attn
        size = attention.head_dim

        def heads(y: Tensor) -> Tensor:
            return y.unflatten(-1, (-1, size)).transpose(1, 2)

        query = rotate(attention.q_norm(heads(attention.q_proj(x))), self._tables)
        key = rotate(attention.k_norm(heads(attention.k_proj(x))), self._tables)
        keys, values = kept
        keys[:, :, self._new] = key
        values[:, :, self._new] = heads(attention.v_proj(x))
        mask = None if x.shape[1] == 1 else self._mask
        mixed = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)
        out: Tensor = attention.o_proj(mixed.transpose(1, 2).flatten(2))
        return out


def require_baseline(name: str, device: torch.device) -> None:
    """Check, before anything is timed, that a baseline can be measured on ``device``.

    Raises:
        OptionError: there is none of that name, or it needs a GPU.
    """
    if name not in NAMES:
        raise OptionError(f"--baseline {name}: choose of {', '.join(NAMES)}")
    if name != "transformers" and device.type != "cuda":
        raise OptionError(f"--baseline {name} needs an NVIDIA GPU; here there is transformers")


def measure_baseline(name: str, model: LanguageModel, load: Load, runs: int) -> Timed:
    """A baseline of ``NAMES`` that ``require_baseline`` let through.

    Raises:
        OptionError: it needs transformers.
    """
    makers: dict[str, Callable[[LanguageModel, Load], Callable[[], Tensor]]] = {
        "graph": _in_a_graph,
        "compile": _compiled,
        "transformers": _transformers,
    }
    work = makers[name](model, load)
    first = run_timed(work, model.device)
    expected = first.output.clone()
    for _ in range(_WARM_UPS):
        work()
    times, wrong = list[float](), list[str]()
    for _ in range(runs):
        run = run_timed(work, model.device)
        times.append(run.ms)
        apart = float((run.output - expected).double().norm() / expected.double().norm())
        if not apart <= APART:
            wrong.append(f"logits {apart:.1e} of their size from those of an untimed run")
    return Timed(f"{load.name}, {name}", first.ms, _WARM_UPS, tuple(times), tuple(wrong))


def _in_a_graph(model: LanguageModel, load: Load) -> Callable[[], Tensor]:
    step, found = PlainStep(model, load), list[Tensor]()

    def compute() -> None:
        found[:] = [step.compute()]

    graph = captured(compute, model.device, STEPPING, None)

    def replay(_held: PlainStep = step) -> Tensor:
        graph.replay()
        return found[0]

    return replay


def _compiled(model: LanguageModel, load: Load) -> Callable[[], Tensor]:
    step = PlainStep(model, load)
    # It is written to, and stays where it is: a graph can be captured around that.
    torch._dynamo.mark_static_address(step.kept)
    compiled: Callable[[], Tensor] = torch.compile(
        step.compute, mode="reduce-overhead", dynamic=False
    )
    return compiled


def _transformers(model: LanguageModel, load: Load) -> Callable[[], Tensor]:
    """Its Qwen3 layers, as many as trunk and block, with random weights of their own."""
    try:
        from transformers import DynamicCache, Qwen3Config, Qwen3Model
    except ImportError as error:
        raise OptionError("--baseline transformers needs: pip install transformers") from error
    config = model.config
    layers = config.num_shared_layers + config.num_modality_layers
    theirs = Qwen3Config(
        vocab_size=8,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        max_position_embeddings=config.max_position_embeddings,
    )
    network = _random_network(lambda: Qwen3Model(theirs), model)
    head = model.audio_lm_head if load.mode is Mode.AUDIO else model.text_lm_head
    shape = (load.sessions, config.num_key_value_heads, load.kept, config.head_dim)
    cache: Any = DynamicCache()
    for layer in range(layers if load.kept else 0):
        kept = torch.randn(2, *shape, device=model.device).to(model.dtype)
        cache.update(kept[0], kept[1], layer)
    new = torch.randn(load.sessions, load.new, config.hidden_size, device=model.device)
    rows = new.to(model.dtype)

    @torch.inference_mode()
    def run() -> Tensor:
        given = cache if load.kept else DynamicCache()
        found = network(inputs_embeds=rows, past_key_values=given, use_cache=True)
        logits: Tensor = head(found.last_hidden_state[:, -1])
        if load.kept:
            cache.crop(load.kept)
        return logits

    return run


@torch.inference_mode()
def _random_network(make: Callable[[], nn.Module], model: LanguageModel) -> nn.Module:
    with torch.device("meta"):
        network = make()
    network = network.to(model.dtype).to_empty(device=model.device).eval()
    for name, weight in network.named_parameters():
        if weight.dim() == 1:
            weight.fill_(1.0)
        else:
            weight.normal_(0.0, 0.02)
        if not weight.is_floating_point():
            raise BenchError(f"transformers' {name} is not a number with a fraction")
    rotary: Any = network.get_submodule("rotary_emb")
    with torch.device(model.device):
        network.rotary_emb = type(rotary)(config=rotary.config)
    return network
