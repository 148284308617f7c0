"""The kernels that draw tokens compile for three cards, at the published sizes, without a card."""

from pathlib import Path

import pytest
import torch
from lm_pick_cases import AUDIO_IDS, TEXT_IDS, draws
from test_kernels_compiled import MOST_SPILLED_BYTES, SHARED_KIB, compiled, usage

from mosstalk.ops import sampling
from mosstalk.ops.launch import Launch
from mosstalk.ops.sampling_parts import AUDIO, TEXT, DrawState

triton = pytest.importorskip("triton", reason="Triton is there on Linux alone")

CPU = torch.device("cpu")


def launches(vocabulary: int, channel: int, dtype: torch.dtype) -> dict[str, Launch]:
    """All that a step launches for a channel."""
    case = draws(2, vocabulary, dtype, CPU, channel=channel)
    mode = torch.zeros(len(case.state.seen), dtype=torch.int8)
    state = DrawState(case.state.seen, case.state.latest, mode)
    best, pick = sampling.sample.launches(
        case.logits, state, case.settings, case.tokens, case.bad,
        channel=channel, last_token=vocabulary - 1, masked=True,
    )  # fmt: skip
    settle = sampling.update_modes.plan(
        state,
        case.settings.slots,
        torch.zeros(2, 2, dtype=torch.bool),
        torch.tensor([3, 5]),
        sampling.ModeTokens(sosp=6, eosp=7, modality_pad=8, audio_pad=9),
        deferred=True,
    )
    return {"topk_candidates": best, "sampling": pick, "update_modes": settle}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("capability", "dtype"),
    [
        *((capability, torch.bfloat16) for capability in SHARED_KIB),
        (90, torch.float32),
        *(pytest.param(n, torch.float32, marks=pytest.mark.faults) for n in (80, 89)),
    ],
    ids=str,
)
@pytest.mark.parametrize(("vocabulary", "channel"), [(AUDIO_IDS, AUDIO), (TEXT_IDS, TEXT)])
def test_kernels_that_draw_fit_the_card(
    capability: int, vocabulary: int, channel: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path / "cache")
        for name, launch in launches(vocabulary, channel, dtype).items():
            kernel = compiled(launch, capability, dependent=capability >= 90)
            found = usage(kernel.asm["cubin"], tmp_path)
            print(f"{name:20} shared {kernel.metadata.shared:6} {found}")
            assert kernel.metadata.shared <= SHARED_KIB[capability] * 1024, name
            assert found["STACK"] + found["LOCAL"] <= MOST_SPILLED_BYTES, (name, found)
