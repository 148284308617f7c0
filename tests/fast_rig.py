"""What tests of the layers share: conversations half read, the layers, and the truth."""

from collections.abc import Sequence as Several
from dataclasses import dataclass, replace
from random import Random

import torch
from engine_rig import EOSP, PAD, SILENT
from torch import Tensor

from mosstalk.conversation import Row
from mosstalk.engine.block_pool import BlockPool
from mosstalk.engine.kv_store import KVStore
from mosstalk.engine.layers import NOT_SEEN, LayerOptions, Layers
from mosstalk.engine.sequence import Part, Sequence
from mosstalk.engine.step_plan import QuerySpan
from mosstalk.models.language_model import Block, KVCache, LanguageModel
from mosstalk.numerics.rope import rotary_tables
from mosstalk.ops.sampling_parts import AUDIO

SLOTS = 4
Span = tuple[int, int]


@dataclass(frozen=True)
class Scene:
    """Spans of conversations whose earlier rows have been read, and what was left of them.

    What nobody may read is NaN. ``wanted`` are some of the packed rows.
    """

    spans: list[QuerySpan]
    rows: list[Row]
    wanted: list[int]
    store: KVStore
    latest: Tensor

    @classmethod
    def of(
        cls, model: LanguageModel, given: Several[Span], *, block_rows: int = 4, seed: int = 0
    ) -> "Scene":
        """Conversations of ``end`` rows each, read up to ``start``, for (start, end) in ``given``.

        Their blocks lie in any order.
        """
        random = Random(seed)
        pool = BlockPool(sum(-(-end // block_rows) for _, end in given) + 5, block_rows)
        blocks = list(range(pool.size))
        random.shuffle(blocks)
        generator = torch.Generator(model.device).manual_seed(seed)
        store = KVStore.allocate(model.config, pool, model.device, model.dtype)
        for part in (store.keys, store.values, store.hidden):
            part.fill_(float("nan"))
        spans = []
        for start, end in given:
            sequence = Sequence(pool, PAD, [(1, SILENT)] * end)
            sequence.table = [blocks.pop() for _ in range(-(-end // block_rows))]
            spans.append(QuerySpan(sequence, start, end))
            before = QuerySpan(sequence, 0, start).places()
            _draw_into(store, before, generator)
        count = sum(map(len, spans))
        rows = [_random_row(random) for _ in range(count)]
        latest = torch.tensor([(random.randrange(25), 3)] * SLOTS, device=model.device)
        wanted = sorted(random.sample(range(count), random.randint(1, count)))
        return cls(spans, rows, wanted, store, latest)

    def own(self) -> "Scene":
        """The same with a store of its own."""
        store = replace(
            self.store,
            keys=self.store.keys.clone(),
            values=self.store.values.clone(),
            hidden=self.store.hidden.clone(),
        )
        return replace(self, store=store)

    def plain(self, model: LanguageModel) -> "PlainNetwork":
        """The truth over this store."""
        return PlainNetwork(model, self.store, self.latest)

    def fast(self, model: LanguageModel, options: LayerOptions | None = None) -> Layers:
        """Layers with padded passes over this store, whether kernels run there or not."""
        options = replace(options or LayerOptions(), kernels=True)
        return Layers(model, self.store, self.latest, options)

    def exact(self, model: LanguageModel, options: LayerOptions | None = None) -> Layers:
        """Layers whose passes have the rows that there are, over this store."""
        options = replace(options or LayerOptions(), kernels=False)
        return Layers(model, self.store, self.latest, options)

    @property
    def places(self) -> list[int]:
        """Places of the rows that are read."""
        return [place for s in self.spans for place in s.places(s.start)]

    def foreign(self) -> list[Tensor]:
        """What lies in the store at all other places."""
        others = torch.ones(len(self.store.hidden), dtype=torch.bool)
        others[self.places] = False
        return [self.store.keys[:, others], self.store.values[:, others], self.store.hidden[others]]

    def written(self) -> list[Tensor]:
        """What lies in the store at the places of the rows that are read."""
        here = self.places
        return [self.store.keys[:, here], self.store.values[:, here], self.store.hidden[here]]


@dataclass(frozen=True)
class PlainNetwork:
    """What layers do, by the network of ``models``: one sequence after the other, in its cache."""

    model: LanguageModel
    store: KVStore
    latest: Tensor

    def trunk(self, step: int, rows: list[Row], spans: list[QuerySpan]) -> None:
        """See ``Layers``."""
        del step
        first = 0
        for span in spans:
            given = torch.tensor(rows[first : first + len(span)], device=self.model.device)
            unseen = given[:, 0] == NOT_SEEN
            given[unseen] = self.latest[given[unseen, 1]]
            hidden = self._run(self.model.model.shared_block, self.model.embed(given[None]), span)
            self.store.hidden[span.places(span.start)] = hidden
            first += len(span)

    def block(self, step: int, part: Part, spans: list[QuerySpan], wanted: list[int]) -> Tensor:
        """See ``Layers``."""
        del step
        backbone, text = self.model.model, part is Part.TEXT
        block = backbone.text_block if text else backbone.audio_block
        hidden = [self._run(block, self.store.hidden[s.places(s.start)][None], s) for s in spans]
        normed: Tensor = (backbone.text_norm if text else backbone.audio_norm)(torch.cat(hidden))
        return normed[wanted]

    def logits(self, channel: int, hidden: Tensor) -> Tensor:
        """See ``Layers``."""
        head = self.model.audio_lm_head if channel == AUDIO else self.model.text_lm_head
        found: Tensor = head(hidden)
        return found

    def _run(self, block: Block, hidden: Tensor, span: QuerySpan) -> Tensor:
        """Rows (1, T, C) of a span through a block; its K and V go into the store."""
        config, cache = self.model.config, KVCache(self.model.config.num_kv_layers)
        layers = range(block.first, block.first + len(block.layers))
        before = span.places()[: span.start]
        both = self.store.keys, self.store.values
        for layer in layers:
            cache.write(layer, *(part[layer, before].transpose(0, 1)[None] for part in both))
        cache.advance(span.start)
        positions = torch.arange(span.start, span.end, device=hidden.device)
        mask = torch.arange(span.end, device=hidden.device)[None] <= positions[:, None]
        tables = rotary_tables(positions, config.head_dim, config.rope_theta)
        found: Tensor = block(hidden, tables, mask, cache)[0]
        here, none = (
            span.places(span.start),
            hidden.new_empty(1, config.num_key_value_heads, 0, config.head_dim),
        )
        cache.advance(len(span))
        for layer in layers:
            for part, kept in zip(both, cache.write(layer, none, none), strict=True):
                part[layer, here] = kept[0, :, span.start :].transpose(0, 1)
        return found


def _draw_into(store: KVStore, places: list[int], generator: torch.Generator) -> None:
    for part in (store.keys.transpose(0, 1), store.values.transpose(0, 1), store.hidden):
        shape = (len(places), *part.shape[1:])
        drawn = torch.randn(shape, generator=generator, device=part.device)
        part[places] = drawn.to(part.dtype)


def _random_row(random: Random) -> Row:
    kind = random.random()
    if kind < 0.2:
        return (NOT_SEEN, random.randrange(SLOTS))
    return (PAD, random.randrange(EOSP + 1)) if kind < 0.6 else (random.randrange(25), SILENT)


@torch.inference_mode()
def read(layers: Layers | PlainNetwork, scene: Scene, step: int = 1) -> list[Tensor]:
    """Run all three parts; outputs (W, C) of the text and of the audio block."""
    layers.trunk(step, scene.rows, scene.spans)
    return [layers.block(step, part, scene.spans, scene.wanted) for part in (Part.TEXT, Part.AUDIO)]


def same(found: Several[Tensor], expected: Several[Tensor]) -> bool:
    """Whether all are equal bit for bit, NaN included."""
    pairs = zip(found, expected, strict=True)
    return all(torch.equal(_bits(one), _bits(other)) for one, other in pairs)


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)
