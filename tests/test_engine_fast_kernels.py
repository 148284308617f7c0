"""The fast layers keep what ``fast_claims.py`` says of them where Triton interprets."""

from pathlib import Path

import pytest
from claims_rig import outcomes_of, require_kept


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_is_claimed_of_fast_layers_holds_in_the_interpreter(tmp_path: Path) -> None:
    require_kept(outcomes_of("fast_claims.py", tmp_path, interpret=True, limit_s=600))
