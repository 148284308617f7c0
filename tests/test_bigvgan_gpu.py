"""BigVGAN on a GPU: the CPU's sound, in company too."""

import copy

import pytest
import torch
from test_bigvgan import flow_mel, small

from mosstalk.codec.bigvgan_stream import BatchedBigVgan, BigVganOptions
from mosstalk.runtime.device import pick_device

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("which", ["22 kHz/80", "24 kHz/100"])
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-4), ("float16", 0.05)])
def test_sound_is_the_cpus_in_company_too(which: str, dtype: str, bound: float) -> None:
    device = pick_device("cuda")
    here = BatchedBigVgan(small(which), BigVganOptions(replies=3))
    there = BatchedBigVgan(copy.deepcopy(small(which)).to(device), BigVganOptions(dtype, replies=3))
    heard = []
    for bigvgan in (here, there):
        replies, sound = [bigvgan.open() for _ in range(3)], list[torch.Tensor]()
        for call in range(3):
            mels = [flow_mel(20, call + n).to(bigvgan.device) for n in range(3)]
            work = [(reply, mel, call == 2) for reply, mel in zip(replies, mels, strict=True)]
            sound.append(torch.stack(bigvgan.push(work)).cpu())
        heard.append(torch.cat(sound, dim=1))
    expected, found = heard
    assert float((found - expected).norm() / expected.norm()) < bound
