"""A few hundred steps of the soak; CONTRIBUTING.md says how thousands are run by hand."""

import pytest
from soak import EVENTS, soak


@pytest.mark.parametrize(("mode", "steps"), [pytest.param("compiled", 200, marks=pytest.mark.compiler), ("fused", 100)])
@pytest.mark.filterwarnings("ignore:no parameter has a gradient")
def test_a_soak(mode: str, steps: int) -> None:
    if mode == "fused":
        pytest.importorskip("triton")
    happened = soak(steps, mode)
    assert happened["steps"] == steps
    assert len(set(happened) & set(EVENTS)) >= len(EVENTS) - 2, "nearly every event happened"
