"""Whatever the shape, dtype, options and gradients, a step is the paper's, and the same in every mode."""

from typing import Any

import pytest
import strategies
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from twins import DEVICE, POISONS, Twins

ROUNDS_TO_NEAREST = DEVICE == "cuda"  # Triton's interpreter does not


def run(mode: str, shapes: list[tuple[int, ...]], dtype: torch.dtype, seed: int, poison: Any, options: Any) -> None:
    """Two steps: the first from zero momentum, and none of the gradients of the first in the second."""
    twins = Twins(mode)
    twins.add_group(shapes, dtype, seed, **options)
    for number in range(2):
        twins.set_grads(seed + 1000 * number, poison=poison)
        twins.step()
    plans = twins.twins[1].optimizer._plans.values()
    assert any(plan.fused for plan in plans) == (mode == "fused")


@given(
    strategies.shapes(),
    strategies.dtypes,
    strategies.seeds,
    st.sampled_from([None, *POISONS]),
    strategies.group_options(st.booleans()),
)
@example((0, 64), torch.float32, 0, None, {"lr": 0.1, "min_quantized_numel": 0})
def test_a_step_is_the_papers(
    shape: tuple[int, ...], dtype: torch.dtype, seed: int, poison: float | None, options: dict[str, Any]
) -> None:
    run("eager", [shape], dtype, seed, poison, options)


@given(
    st.lists(strategies.shapes(), min_size=1, max_size=4),
    strategies.dtypes,
    strategies.seeds,
    st.sampled_from([None, *POISONS]),
    strategies.group_options(st.sampled_from([True, not ROUNDS_TO_NEAREST])),
)
def test_the_fused_step_changes_no_bit(
    shapes: list[tuple[int, ...]], dtype: torch.dtype, seed: int, poison: float | None, options: dict[str, Any]
) -> None:
    pytest.importorskip("triton")
    run("fused", shapes, dtype, seed, poison, options)
