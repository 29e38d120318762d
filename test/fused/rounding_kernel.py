"""A kernel around the fused step's rounding alone, to give it numbers that a step does not meet on a CPU."""

import triton
import triton.language as tl

from lowbit_optim.fused.kernel import _stochastic_round


@triton.jit
def round_to_bfloat16(x, noise, out, N: tl.constexpr):
    i = tl.arange(0, N)
    rounded = _stochastic_round(tl.load(x + i), tl.load(noise + i), tl.bfloat16)
    tl.store(out + i, rounded.to(tl.int16, bitcast=True))
