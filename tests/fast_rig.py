"""What tests of the fast layers share: conversations half read, and layers of both kinds."""

from collections.abc import Sequence as Several
from dataclasses import dataclass, replace
from random import Random

import torch
from engine_rig import EOSP, PAD, SILENT
from torch import Tensor

from mosstalk.conversation import Row
from mosstalk.engine.block_pool import BlockPool
from mosstalk.engine.fast_layers import FastLayers, FastOptions
from mosstalk.engine.kv_store import KVStore
from mosstalk.engine.layers import NOT_SEEN, Layers, PlainLayers
from mosstalk.engine.packed import QuerySpan
from mosstalk.engine.sequence import Part, Sequence
from mosstalk.models.language_model import LanguageModel

SLOTS = 4
Span = tuple[int, int]


@dataclass(frozen=True)
class Scene:
    """Stretches of conversations whose earlier rows have been read, and what was left of them.

    What nobody may read is NaN. ``wanted`` are some of the packed rows.
    """

    stretches: list[QuerySpan]
    rows: list[Row]
    wanted: list[int]
    store: KVStore
    latest: Tensor

    @classmethod
    def of(
        cls, model: LanguageModel, spans: Several[Span], *, block_rows: int = 4, seed: int = 0
    ) -> "Scene":
        """Conversations of ``end`` rows each, read up to ``start``, for (start, end) in ``spans``.

        Their blocks lie in any order.
        """
        random = Random(seed)
        pool = BlockPool(sum(-(-end // block_rows) for _, end in spans) + 5, block_rows)
        blocks = list(range(pool.size))
        random.shuffle(blocks)
        generator = torch.Generator(model.device).manual_seed(seed)
        store = KVStore.allocate(model.config, pool, model.device, model.dtype)
        for part in (store.keys, store.values, store.hidden):
            part.fill_(float("nan"))
        stretches = []
        for start, end in spans:
            sequence = Sequence(pool, PAD, [(1, SILENT)] * end)
            sequence.table = [blocks.pop() for _ in range(-(-end // block_rows))]
            stretches.append(QuerySpan(sequence, start, end))
            before = QuerySpan(sequence, 0, start).places()
            _draw_into(store, before, generator)
        count = sum(map(len, stretches))
        rows = [_random_row(random) for _ in range(count)]
        latest = torch.tensor([(random.randrange(25), 3)] * SLOTS, device=model.device)
        wanted = sorted(random.sample(range(count), random.randint(1, count)))
        return cls(stretches, rows, wanted, store, latest)

    def own(self) -> "Scene":
        """The same with a store of its own."""
        store = replace(
            self.store,
            keys=self.store.keys.clone(),
            values=self.store.values.clone(),
            hidden=self.store.hidden.clone(),
        )
        return replace(self, store=store)

    def plain(self, model: LanguageModel) -> PlainLayers:
        """Plain layers over this store."""
        return PlainLayers(model, self.store, self.latest)

    def fast(self, model: LanguageModel, options: FastOptions | None = None) -> FastLayers:
        """Fast layers over this store."""
        return FastLayers(model, self.store, self.latest, options)

    @property
    def places(self) -> list[int]:
        """Places of the rows that are read."""
        return [place for s in self.stretches for place in s.places(s.start)]

    def foreign(self) -> list[Tensor]:
        """What lies in the store at all other places."""
        others = torch.ones(len(self.store.hidden), dtype=torch.bool)
        others[self.places] = False
        return [self.store.keys[:, others], self.store.values[:, others], self.store.hidden[others]]

    def written(self) -> list[Tensor]:
        """What lies in the store at the places of the rows that are read."""
        here = self.places
        return [self.store.keys[:, here], self.store.values[:, here], self.store.hidden[here]]


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
def read(layers: Layers, scene: Scene, step: int = 1) -> list[Tensor]:
    """Run all three parts; outputs (W, C) of the text and of the audio block."""
    layers.trunk(step, scene.rows, scene.stretches)
    return [
        layers.block(step, part, scene.stretches, scene.wanted) for part in (Part.TEXT, Part.AUDIO)
    ]


def same(found: Several[Tensor], expected: Several[Tensor]) -> bool:
    """Whether all are equal bit for bit, NaN included."""
    pairs = zip(found, expected, strict=True)
    return all(torch.equal(_bits(one), _bits(other)) for one, other in pairs)


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)
