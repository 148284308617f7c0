"""A plan from configs and a wish."""

from functools import cache

from mosstalk.engine.memory import MARGIN
from mosstalk.plan.fit import Costs, Item, Plan, Wish, with_fp8, with_table_on_host
from mosstalk.plan.measured import measured
from mosstalk.plan.sizes import (
    Configs,
    Part,
    Rates,
    codec_on_meta,
    codec_parts,
    language_parts,
    text_table_bytes,
)


def plan_of(configs: Configs, wish: Wish) -> Plan:
    """What ``wish`` takes of a GPU, with this model and codec."""
    plan = Plan(wish, _costs(configs))
    plan = with_fp8(plan) if wish.precision == "fp8" else plan
    return with_table_on_host(plan) if wish.embeddings == "host" else plan


@cache
def _costs(configs: Configs) -> Costs:
    language = language_parts(configs.model, "bf16")
    saved = sum(part.bytes for part in language) - sum(
        part.bytes for part in language_parts(configs.model, "fp8")
    )
    parts = [*language, *codec_parts(codec_on_meta(configs))]
    rooms = tuple(Item(room.name, room.bytes, room.basis) for room in measured().rooms)
    return Costs(
        tuple(map(_item, parts)),
        rooms,
        **vars(Rates.of(configs)),
        margin=MARGIN,
        trunk_saved=saved,
        text_table=text_table_bytes(configs.model),
    )


def _item(part: Part) -> Item:
    return Item(part.name, part.bytes, f"{part.weights / 1e6:,.1f} M weights")
