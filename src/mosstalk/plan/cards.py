"""Published figures of cards: the vendor's own, dense, without sparsity."""

from dataclasses import dataclass

from mosstalk.errors import OptionError


@dataclass(frozen=True)
class Card:
    """A card as its vendor describes it.

    ``memory_gb`` and ``bandwidth_gb_s`` in 10^9 bytes; rates in 10^12 operations a second, sums in
    float32. ``fp8_tflops`` None: no FP8 products.
    """

    name: str
    memory_gb: float
    bandwidth_gb_s: float
    bf16_tflops: float
    fp8_tflops: float | None
    fp32_tflops: float
    source: str


_ADA = "NVIDIA Ada GPU architecture whitepaper, appendix A"
_HALVED = ", half of those with sparsity"
CARDS = {
    card.name: card
    for card in (
        Card("rtx-4090", 24, 1008, 165.2, 330.3, 82.6, _ADA),
        Card("l4", 24, 300, 121, 242.5, 30.3, f"NVIDIA L4 data sheet{_HALVED}"),
        Card("l40s", 48, 864, 362.05, 733, 91.6, "NVIDIA L40S data sheet"),
        Card("a100", 80, 2039, 312, None, 19.5, "NVIDIA A100 80GB data sheet (SXM)"),
        Card("h100", 80, 3350, 989.5, 1979, 67, f"NVIDIA H100 data sheet (SXM){_HALVED}"),
        Card("h200", 141, 4800, 989.5, 1979, 67, f"NVIDIA H200 data sheet (SXM){_HALVED}"),
    )
}
ALL = "all"


def cards(names: list[str]) -> list[Card]:
    """The cards of these names; ``all`` is every one.

    Raises:
        OptionError: a name that is not in the table.
    """
    for name in names:
        if name != ALL and name not in CARDS:
            raise OptionError(f"--gpu {name}: choose of {', '.join((*CARDS, ALL))}")
    return list(CARDS.values()) if ALL in names else [CARDS[name] for name in names]
