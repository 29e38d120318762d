"""Kernels around the fused step's rounding alone, to give it numbers that a step does not meet, or not on a CPU."""

import triton
import triton.language as tl

from lowbit_optim.fused.kernel import _merge_weight, _split_weight, _stochastic_round


@triton.jit
def round_to_bfloat16(x, noise, out, N: tl.constexpr):
    i = tl.arange(0, N)
    rounded = _stochastic_round(tl.load(x + i), tl.load(noise + i), tl.bfloat16)
    tl.store(out + i, rounded.to(tl.int16, bitcast=True))


@triton.jit
def split_and_merge(
    x,
    noise,
    weight,
    residual,
    merged,
    N: tl.constexpr,
    PARAM: tl.constexpr,
    BITS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    i = tl.program_id(0) * N + tl.arange(0, N)
    noises = None
    if STOCHASTIC:
        noises = tl.load(noise + i)
    w, r = _split_weight(tl.load(x + i), noises, PARAM, BITS)
    tl.store(weight + i, w)
    tl.store(residual + i, r)
    tl.store(merged + i, _merge_weight(w, r, PARAM, BITS))
