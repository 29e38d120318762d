"""The int8 matmul for Hopper, with its pipeline written out, in Gluon, Triton's lower-level language.

Triton's own pipeliner waits for each int8 product of blocks before it starts the next one: for bf16 and fp8 it lets
two overlap, for int8 it does not. Here they overlap, and the next tile's blocks arrive while a tile is stored.
"""

# mypy: disallow-untyped-defs=False

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .kernels import MatmulConfig

# Triton 3.7 and later have shorter names.
_start_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_start_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@gluon.jit
def _tile_corner(tile, tiles_m, tiles_n, GROUP_M: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """First row and column of a tile, in the order of ``kernels._tile_position``."""
    per_group = GROUP_M * tiles_n
    first_m = tile // per_group * GROUP_M
    group_m = gl.minimum(tiles_m - first_m, GROUP_M)
    return (first_m + tile % per_group % group_m) * BLOCK_M, tile % per_group // group_m * BLOCK_N


@gluon.jit
def _load(a_desc, b_desc, a_buffers, b_buffers, ready, load, steps, tiles_m, tiles_n,
          GROUP_M: gl.constexpr, STAGES: gl.constexpr, PROGRAMS: gl.constexpr):  # fmt: skip
    """Start this program's load number ``load``, if there are that many; a tile takes ``steps`` of them."""
    tile = gl.program_id(0) + load // steps * PROGRAMS
    wanted = tile < tiles_m * tiles_n
    i, j = _tile_corner(tile, tiles_m, tiles_n, GROUP_M, a_desc.block_shape[0], b_desc.block_shape[0])
    k = load % steps * a_desc.block_shape[1]
    barrier = ready.index(load % STAGES)
    mbarrier.expect(barrier, a_desc.block_type.nbytes + b_desc.block_type.nbytes, pred=wanted)
    _start_load(a_desc, [i, k], barrier, a_buffers.index(load % STAGES), pred=wanted)
    _start_load(b_desc, [j, k], barrier, b_buffers.index(load % STAGES), pred=wanted)


@gluon.jit
def _store(out_desc, out_buffer, sums, a_scale_ptr, b_scale_ptr, bias_ptr, first_i, first_j, m, n,
           HAS_BIAS: gl.constexpr):  # fmt: skip
    """Scale a part of a tile, as ``kernels._apply_scales`` does, and start to store it."""
    layout: gl.constexpr = sums.type.layout
    i = first_i + gl.arange(0, sums.shape[0], layout=gl.SliceLayout(1, layout))
    j = first_j + gl.arange(0, sums.shape[1], layout=gl.SliceLayout(0, layout))
    result = sums.to(gl.float32) * gl.load(a_scale_ptr + i, mask=i < m, other=0.0)[:, None]
    result *= gl.load(b_scale_ptr + j, mask=j < n, other=0.0)[None, :]
    if HAS_BIAS:
        result += gl.load(bias_ptr + j, mask=j < n, other=0.0).to(gl.float32)[None, :]
    tma.store_wait(0)
    out_buffer.store(result.to(out_desc.dtype))
    fence_async_shared()
    _start_store(out_desc, [first_i, first_j], out_buffer)


@gluon.jit(do_not_specialize=["m", "k_16"])
def matmul_kernel(
    a_desc, b_desc, out_desc, a_scale_ptr, b_scale_ptr, bias_ptr, m, n, k_16,
    HAS_BIAS: gl.constexpr, GROUP_M: gl.constexpr, STAGES: gl.constexpr, PROGRAMS: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """``out = (a @ b.T) * a_scale[:, None] * b_scale + bias``; every ``PROGRAMS``-th tile.

    Loads run ahead of the products, over the end of a tile, so that the next tile's are there when it is stored.
    """
    BLOCK_M: gl.constexpr = a_desc.block_shape[0]
    BLOCK_N: gl.constexpr = b_desc.block_shape[0]
    BLOCK_K: gl.constexpr = a_desc.block_shape[1]
    # 128 columns are the most that Triton knows for int8 whose number is a power of two.
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, BLOCK_N if BLOCK_N < 128 else 128, 32]
    )
    a_buffers = gl.allocate_shared_memory(gl.int8, [STAGES, BLOCK_M, BLOCK_K], a_desc.layout)
    b_buffers = gl.allocate_shared_memory(gl.int8, [STAGES, BLOCK_N, BLOCK_K], b_desc.layout)
    out_buffer = gl.allocate_shared_memory(out_desc.dtype, out_desc.block_shape, out_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for each in gl.static_range(STAGES):
        mbarrier.init(ready.index(each), count=1)

    tiles_m, tiles_n = gl.cdiv(m, BLOCK_M), gl.cdiv(n, BLOCK_N)
    tiles = tiles_m * tiles_n
    steps = gl.cdiv(k_16 * 16, BLOCK_K)

    for load in gl.static_range(STAGES - 1):
        _load(a_desc, b_desc, a_buffers, b_buffers, ready, load, steps, tiles_m, tiles_n,
              GROUP_M, STAGES, PROGRAMS)  # fmt: skip
    product = 0
    for tile in range(gl.program_id(0), tiles, PROGRAMS):
        sums = gl.zeros((BLOCK_M, BLOCK_N), gl.int32, layout)
        for _ in range(steps):
            stage = product % STAGES
            mbarrier.wait(ready.index(stage), product // STAGES & 1)
            sums = warpgroup_mma(a_buffers.index(stage), b_buffers.index(stage).permute((1, 0)), sums, is_async=True)
            # The product before is done, so its buffers are free for a load.
            sums = warpgroup_mma_wait(num_outstanding=1, deps=(sums,))
            _load(a_desc, b_desc, a_buffers, b_buffers, ready, product + STAGES - 1, steps, tiles_m, tiles_n,
                  GROUP_M, STAGES, PROGRAMS)  # fmt: skip
            product += 1
        sums = warpgroup_mma_wait(num_outstanding=0, deps=(sums,))

        i, j = _tile_corner(tile, tiles_m, tiles_n, GROUP_M, BLOCK_M, BLOCK_N)
        left, right = sums.reshape((BLOCK_M, 2, BLOCK_N // 2)).permute((0, 2, 1)).split()
        _store(out_desc, out_buffer, left, a_scale_ptr, b_scale_ptr, bias_ptr, i, j, m, n, HAS_BIAS)
        _store(out_desc, out_buffer, right, a_scale_ptr, b_scale_ptr, bias_ptr, i, j + BLOCK_N // 2, m, n, HAS_BIAS)
    tma.store_wait(0)
    for each in gl.static_range(STAGES):
        mbarrier.invalidate(ready.index(each))


_DTYPES = {torch.int8: gl.int8, torch.float32: gl.float32, torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


def scaled_matmul(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    out: Tensor,
    config: MatmulConfig,
    programs: int,
) -> None:
    """Fill ``out``, whose rows are multiples of 16 bytes; all tensors contiguous and not empty."""
    (m, k), n = a.shape, b.shape[0]
    tiles = triton.cdiv(m, config.block_m) * triton.cdiv(n, config.block_n)
    matmul_kernel[(min(programs, tiles),)](
        _descriptor(a, config.block_m, config.block_k),
        _descriptor(b, config.block_n, config.block_k),
        _descriptor(out, config.block_m, config.block_n // 2),
        a_scale,
        b_scale,
        bias,
        m,
        n,
        k // 16,
        HAS_BIAS=bias is not None,
        GROUP_M=config.group_m,
        STAGES=config.stages,
        PROGRAMS=programs,
        num_warps=config.warps,
        enable_fp_fusion=False,
    )


def _descriptor(x: Tensor, *block: int) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout.get_default_for(list(block), _DTYPES[x.dtype])
    return TensorDescriptor(x, x.shape, x.stride(), list(block), layout)
