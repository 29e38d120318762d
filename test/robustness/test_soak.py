"""A few hundred steps of the soak; CONTRIBUTING.md says how thousands are run by hand."""

import pytest
from soak import EVENTS, soak


@pytest.mark.parametrize("mode", [pytest.param("compiled", marks=pytest.mark.compiler), "fused"])
def test_a_soak(mode: str) -> None:
    if mode == "fused":
        pytest.importorskip("triton")
    happened = soak(steps=200, mode=mode)
    assert set(happened) >= set(EVENTS), "every event happened"
