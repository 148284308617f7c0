"""The kernels around attention keep what ``lm_attend_claims.py`` says, interpreted or compiled."""

from pathlib import Path

import pytest
from claims_rig import outcomes_of, require_kept

CLAIMS = "lm_attend_claims.py"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_interpreted_kernels_keep_their_claims(tmp_path: Path) -> None:
    require_kept(outcomes_of(CLAIMS, tmp_path, interpret=True))


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_compiled_kernels_keep_their_claims(tmp_path: Path) -> None:
    require_kept(outcomes_of(CLAIMS, tmp_path, interpret=False))
