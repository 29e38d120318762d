"""What hypothesis draws: shapes, dtypes, options."""

import math
from typing import Any

import torch
from hypothesis import assume
from hypothesis import strategies as st

MAX_NUMEL = 10_000
# around blocks of 16, 32 and 64; below the row of 16 that is quantised at least
_LENGTHS = [16, 17, 64, 65, 128, 130, 15, 31, 32, 33, 48, 63, 75, 100]
_SMALL = [3, 2, 5, 7, 1, 0]


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, ...]:
    """0 to 5 dimensions, at most two of them long. Hypothesis likes the first of a list best."""
    ndim = draw(st.sampled_from([2, 3, 4, 5, 1, 0]))
    long = draw(st.sets(st.sampled_from(range(ndim)), min_size=1, max_size=2)) if ndim else set()
    shape = tuple(draw(st.sampled_from(_LENGTHS if dim in long else _SMALL)) for dim in range(ndim))
    assume(math.prod(shape) <= MAX_NUMEL)
    return shape


dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
seeds = st.integers(0, 2**31)
lrs = st.sampled_from([0.0, 1e-7, 1e-4, 1e-3, 0.3])
weight_decays = st.sampled_from([0.0, 1e-6, 0.1, 3.0])
betas = st.tuples(st.sampled_from([0.0, 0.9, 0.95]), st.sampled_from([0.0, 0.5, 0.99, 0.999]))


def group_options(stochastic_rounding: st.SearchStrategy[bool]) -> st.SearchStrategy[dict[str, Any]]:
    """What can be set for a group. A rate of 0 is not one to begin with where the decay is relative to that."""
    return st.fixed_dictionaries(
        {"lr": lrs.filter(bool), "min_quantized_numel": st.sampled_from([0, 0, 1000])},
        optional={
            "betas": betas,
            "weight_decay": weight_decays,
            "quantize": st.sampled_from([True, True, False]),
            "block_size": st.sampled_from([16, 32, 48, 64, 100, 128]),
            "stochastic_rounding": stochastic_rounding,
            "decouple_lr": st.booleans(),
            "master_weight_bits": st.sampled_from([None, 24, 32]),
            "maximize": st.booleans(),
        },
    )
