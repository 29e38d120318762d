"""Triton kernels: quantisation by rows and by columns, and the int8 matmul with its two scales.

They repeat, bit for bit, the PyTorch definitions in ``quantize.py`` and ``matmul.py``. All are launched with
``enable_fp_fusion=False``: a contracted multiply-add rounds once where the definition rounds twice.

Sizes that change with the number of tokens are not specialised on, so that a new length compiles nothing. Rows of
codes are multiples of 16 bytes long; kernels get these lengths in units of 16, which tells the compiler so. Codes and
scales that are written begin on 16 bytes, since the ops allocate them: keys of launches leave them out.
"""

# The parameters of Triton functions, pointers and tiles, have no Python types.
# mypy: disallow-untyped-defs=False

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from lowbit_optim.triton_launch import alignments, launch

_WIDEST_ROW = 16384  # elements of a row that one program holds
_TILE_ROWS, _TILE_COLUMNS = 64, 128
_TILES = 4  # one below the other, whose columns the first pass reduces at a time

_SMALLEST_SCALE = tl.constexpr(torch.finfo(torch.float32).tiny)
_ROUNDER = tl.constexpr(1.5 * 2**23)  # added to a float below 2**22, leaves the nearest integer in its low bits


def _on_the_tensors_device(fill: Callable[..., None]) -> Callable[..., None]:
    """Triton launches on the current device, which may be another."""

    @functools.wraps(fill)
    def fill_there(x: Tensor, *args: Any, **kwargs: Any) -> None:
        with torch.cuda.device_of(x):
            fill(x, *args, **kwargs)

    return fill_there


def _cdiv(size: int, block: int) -> int:
    """As ``triton.cdiv``, which takes the host ten times as long."""
    return -(-size // block)


# --- Quantisation ----------------------------------------------------------------------------------------------------


@triton.jit
def _absolute_bits(x):
    """Integers that are ordered like the absolute values, NaN above all."""
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _scale(absmax_bits):
    scale = tl.div_rn(absmax_bits.to(tl.float32, bitcast=True), 127.0)
    return tl.where(scale < _SMALLEST_SCALE, _SMALLEST_SCALE, scale)


@triton.jit
def _codes(x, scale):
    """Codes of ``x``; ``scale`` broadcasts against it."""
    inverse = tl.div_rn(1.0, scale)
    rounded = (x.to(tl.float32) * inverse + _ROUNDER).to(tl.int32, bitcast=True)
    return tl.where(scale < float("inf"), rounded, 0).to(tl.int8)


@triton.jit(do_not_specialize=["rows"])
def rows_kernel(
    x_ptr, codes_ptr, scale_ptr, rows, columns, pitch_16, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr
):
    """Codes and scales of whole rows; a row longer than a block is read twice, the second time from the cache."""
    r = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    pitch = pitch_16 * 16
    row = r.to(tl.int64)[:, None]
    inside = (r < rows)[:, None]

    absmax = tl.zeros((BLOCK_ROWS,), tl.int32)
    for start in range(0, columns, BLOCK_COLUMNS):
        c = start + tl.arange(0, BLOCK_COLUMNS)[None, :]
        x = tl.load(x_ptr + row * columns + c, mask=inside & (c < columns), other=0.0)
        absmax = tl.maximum(absmax, tl.max(_absolute_bits(x), 1))
    scale = _scale(absmax)
    tl.store(scale_ptr + r, scale, mask=r < rows)

    for start in range(0, pitch, BLOCK_COLUMNS):
        c = start + tl.arange(0, BLOCK_COLUMNS)[None, :]
        x = tl.load(x_ptr + row * columns + c, mask=inside & (c < columns), other=0.0)
        tl.store(codes_ptr + row * pitch + c, _codes(x, scale[:, None]), mask=inside & (c < pitch))


@triton.jit(do_not_specialize=["rows"])
def absmax_kernel(
    x_ptr,
    bits_ptr,
    rows,
    columns,
    BY_ROWS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    TILES: tl.constexpr,
):
    """Largest absolute values of columns and, on request, behind them, of rows, as float bits, into zeroed memory."""
    c = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    column_bits = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.int32)
    for tile in range(TILES):
        r = (tl.program_id(0) * TILES + tile) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        inside = (r < rows)[:, None] & (c < columns)[None, :]
        x = tl.load(x_ptr + r.to(tl.int64)[:, None] * columns + c[None, :], mask=inside, other=0.0)
        bits = _absolute_bits(x)
        column_bits = tl.maximum(column_bits, bits)
        if BY_ROWS:
            tl.atomic_max(bits_ptr + columns + r, tl.max(bits, 1), mask=r < rows, sem="relaxed")
    tl.atomic_max(bits_ptr + c, tl.max(column_bits, 0), mask=c < columns, sem="relaxed")


@triton.jit(do_not_specialize=["rows", "column_pitch_16"])
def codes_kernel(
    x_ptr,
    bits_ptr,
    row_codes_ptr,
    row_scale_ptr,
    column_codes_ptr,
    column_scale_ptr,
    rows,
    columns,
    row_pitch_16,
    column_pitch_16,
    BY_ROWS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """The column-wise codes, transposed, and on request the row-wise ones, from one reading of a tile."""
    r = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    c = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    inside = (r < rows)[:, None] & (c < columns)[None, :]
    x = tl.load(x_ptr + r.to(tl.int64)[:, None] * columns + c[None, :], mask=inside, other=0.0)

    scale = _scale(tl.load(bits_ptr + c, mask=c < columns, other=0))
    codes = tl.trans(_codes(x, scale[None, :]))
    pitch = column_pitch_16 * 16
    target = column_codes_ptr + c.to(tl.int64)[:, None] * pitch + r[None, :]
    tl.store(target, codes, mask=(c < columns)[:, None] & (r < pitch)[None, :])
    if tl.program_id(0) == 0:
        tl.store(column_scale_ptr + c, scale, mask=c < columns)

    if BY_ROWS:
        scale = _scale(tl.load(bits_ptr + columns + r, mask=r < rows, other=0))
        pitch = row_pitch_16 * 16
        target = row_codes_ptr + r.to(tl.int64)[:, None] * pitch + c[None, :]
        tl.store(target, _codes(x, scale[:, None]), mask=(r < rows)[:, None] & (c < pitch)[None, :])
        if tl.program_id(1) == 0:
            tl.store(row_scale_ptr + r, scale, mask=r < rows)


@_on_the_tensors_device
def quantize_rows(x: Tensor, codes: Tensor, scale: Tensor) -> None:
    """Fill ``codes`` and ``scale`` from ``x``, contiguous and not empty."""
    rows, columns = x.shape
    block_columns = min(_WIDEST_ROW, 1 << (codes.shape[1] - 1).bit_length())
    block_rows = max(1, _WIDEST_ROW // 4 // block_columns)
    launch(
        rows_kernel,
        (_cdiv(rows, block_rows),),
        (x.dtype, *alignments(x), columns, block_rows, block_columns),
        x,
        codes,
        scale,
        rows,
        columns,
        codes.shape[1] // 16,
        block_rows,
        block_columns,
        num_warps=8 if block_columns > 4096 else 4,
        enable_fp_fusion=False,
    )


@_on_the_tensors_device
def quantize_columns(
    x: Tensor, codes: Tensor, scale: Tensor, row_codes: Tensor | None = None, row_scale: Tensor | None = None
) -> None:
    """Fill the column-wise ``codes`` and ``scale``, and the row-wise ones if given, from ``x``, contiguous."""
    rows, columns = x.shape
    by_rows = row_codes is not None
    bits = torch.zeros(columns + (rows if by_rows else 0), dtype=torch.int32, device=x.device)
    tiles = _cdiv(rows, _TILE_ROWS), _cdiv(columns, _TILE_COLUMNS)
    key = (x.dtype, *alignments(x), columns, by_rows, _TILE_ROWS, _TILE_COLUMNS)
    launch(
        absmax_kernel,
        (_cdiv(tiles[0], _TILES), tiles[1]),
        (*key, _TILES),
        x,
        bits,
        rows,
        columns,
        by_rows,
        _TILE_ROWS,
        _TILE_COLUMNS,
        _TILES,
        enable_fp_fusion=False,
    )
    launch(
        codes_kernel,
        tiles,
        key,
        x,
        bits,
        row_codes,
        row_scale,
        codes,
        scale,
        rows,
        columns,
        0 if row_codes is None else row_codes.shape[1] // 16,
        codes.shape[1] // 16,
        by_rows,
        _TILE_ROWS,
        _TILE_COLUMNS,
        enable_fp_fusion=False,
    )


# --- Matmul ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MatmulConfig:
    """How a matmul is cut into tiles.

    Args:
        block_m, block_n, block_k: of the tile that a program computes, and of what it loads at a time.
        stages: loads in flight.
        warps: of 32 threads, that compute a tile.
        group_m: tiles, one below the other, that are computed in a row for the cache's sake.
        descriptors: load and store through tensor descriptors, from compute capability 9.0 on. The rest is for these.
        parts: 1, 2 or 4 that a tile is stored in, one after the other, which takes so much less shared memory.
        resident: programs on each multiprocessor, which go from tile to tile; 0 for one program a tile. Of no account
            beside collectives: they take multiprocessors, on which such programs would only begin when others end.
    """

    block_m: int
    block_n: int
    block_k: int
    stages: int
    warps: int
    group_m: int = 8
    descriptors: bool = True
    parts: int = 2
    resident: int = 0


@triton.jit
def _tile_position(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Row and column of a tile: column by column within each group of rows."""
    per_group = GROUP_M * tiles_n
    first_m = tile // per_group * GROUP_M
    group_m = tl.minimum(tiles_m - first_m, GROUP_M)
    return first_m + tile % per_group % group_m, tile % per_group // group_m


@triton.jit
def _apply_scales(sums, a_scale_ptr, b_scale_ptr, bias_ptr, i, j, m, n, HAS_BIAS: tl.constexpr):
    """fp32 results of the int32 ``sums`` at rows ``i`` and columns ``j``."""
    result = sums.to(tl.float32) * tl.load(a_scale_ptr + i, mask=i < m, other=0.0)[:, None]
    result *= tl.load(b_scale_ptr + j, mask=j < n, other=0.0)[None, :]
    if HAS_BIAS:
        result += tl.load(bias_ptr + j, mask=j < n, other=0.0).to(tl.float32)[None, :]
    return result


@triton.jit
def _store(
    out, sums, a_scale_ptr, b_scale_ptr, bias_ptr, first_i, first_j, m, n,
    PARTS: tl.constexpr, HAS_BIAS: tl.constexpr, BY_DESCRIPTOR: tl.constexpr, OUT_DTYPE: tl.constexpr,
):  # fmt: skip
    if PARTS > 1:
        rows: tl.constexpr = sums.shape[0]
        columns: tl.constexpr = sums.shape[1] // 2
        left, right = tl.split(tl.permute(tl.reshape(sums, (rows, 2, columns)), (0, 2, 1)))
        _store(
            out, left, a_scale_ptr, b_scale_ptr, bias_ptr, first_i, first_j, m, n,
            PARTS // 2, HAS_BIAS, BY_DESCRIPTOR, OUT_DTYPE,
        )  # fmt: skip
        _store(
            out, right, a_scale_ptr, b_scale_ptr, bias_ptr, first_i, first_j + columns, m, n,
            PARTS // 2, HAS_BIAS, BY_DESCRIPTOR, OUT_DTYPE,
        )  # fmt: skip
    else:
        i = first_i + tl.arange(0, sums.shape[0])
        j = first_j + tl.arange(0, sums.shape[1])
        result = _apply_scales(sums, a_scale_ptr, b_scale_ptr, bias_ptr, i, j, m, n, HAS_BIAS).to(OUT_DTYPE)
        if BY_DESCRIPTOR:
            out.store([first_i, first_j], result)
        else:
            tl.store(out + i.to(tl.int64)[:, None] * n + j[None, :], result, mask=(i < m)[:, None] & (j < n)[None, :])


@triton.jit(do_not_specialize=["m", "k_16"])
def descriptor_kernel(
    a_desc, b_desc, out, a_scale_ptr, b_scale_ptr, bias_ptr, m, n, k_16,
    HAS_BIAS: tl.constexpr, BY_DESCRIPTOR: tl.constexpr, OUT_DTYPE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, PARTS: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """``out = (a @ b.T) * a_scale[:, None] * b_scale + bias``; every ``PROGRAMS``-th tile, 0 meaning one alone."""
    tiles_m, tiles_n = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    steps = tl.cdiv(k_16 * 16, BLOCK_K)
    first = tl.program_id(0)
    last = tiles_m * tiles_n if PROGRAMS else first + 1
    for tile in tl.range(first, last, PROGRAMS if PROGRAMS else 1, flatten=PROGRAMS > 0):
        tile_m, tile_n = _tile_position(tile, tiles_m, tiles_n, GROUP_M)
        i, j = tile_m * BLOCK_M, tile_n * BLOCK_N
        sums = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
        for step in range(steps):
            a = a_desc.load([i, step * BLOCK_K])
            b = b_desc.load([j, step * BLOCK_K])
            sums = tl.dot(a, b.T, sums, out_dtype=tl.int32)
        _store(
            out, sums, a_scale_ptr, b_scale_ptr, bias_ptr, i, j, m, n,
            PARTS, HAS_BIAS, BY_DESCRIPTOR, OUT_DTYPE,
        )  # fmt: skip


@triton.jit(do_not_specialize=["m", "k_16"])
def pointer_kernel(
    a_ptr,
    b_ptr,
    out_ptr,
    a_scale_ptr,
    b_scale_ptr,
    bias_ptr,
    m,
    n,
    k_16,
    HAS_BIAS: tl.constexpr,
    OUT_DTYPE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """The same without tensor descriptors."""
    tile_m, tile_n = _tile_position(tl.program_id(0), tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N), GROUP_M)
    i = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    j = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = k_16 * 16
    offsets = tl.arange(0, BLOCK_K)
    # Rows beyond the end read the first ones again, without a mask; their results are not stored.
    a_ptrs = a_ptr + (i % m).to(tl.int64)[:, None] * k + offsets[None, :]
    b_ptrs = b_ptr + (j % n).to(tl.int64)[None, :] * k + offsets[:, None]
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    for start in range(0, k, BLOCK_K):
        a = tl.load(a_ptrs + start, mask=(start + offsets < k)[None, :], other=0)
        b = tl.load(b_ptrs + start, mask=(start + offsets < k)[:, None], other=0)
        sums = tl.dot(a, b, sums, out_dtype=tl.int32)
    result = _apply_scales(sums, a_scale_ptr, b_scale_ptr, bias_ptr, i, j, m, n, HAS_BIAS).to(OUT_DTYPE)
    tl.store(out_ptr + i.to(tl.int64)[:, None] * n + j[None, :], result, mask=(i < m)[:, None] & (j < n)[None, :])


_TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@_on_the_tensors_device
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
    """Fill ``out``, all tensors contiguous and not empty, by ``programs`` that go from tile to tile; 0: one a tile."""
    (m, k), n = a.shape, b.shape[0]
    tiles = _cdiv(m, config.block_m) * _cdiv(n, config.block_n)
    by_descriptor = config.descriptors and n * out.itemsize % 16 == 0
    key = config, out.dtype, n, bias is None or bias.dtype, *alignments(a_scale, b_scale, bias, out)
    rest = a_scale, b_scale, bias, m, n, k // 16, bias is not None
    blocks = config.block_m, config.block_n, config.block_k, config.group_m
    options = dict(num_stages=config.stages, num_warps=config.warps, enable_fp_fusion=False)
    dtype = _TRITON_DTYPES[out.dtype]
    if not config.descriptors:
        key = *key, *alignments(a, b)
        launch(pointer_kernel, (tiles,), key, a, b, out, *rest, dtype, *blocks, **options)
        return
    launch(
        descriptor_kernel,
        (min(programs, tiles) if programs else tiles,),
        (*key, programs),
        _descriptor(a, config.block_m, config.block_k),
        _descriptor(b, config.block_n, config.block_k),
        _descriptor(out, config.block_m, config.block_n // config.parts) if by_descriptor else out,
        *rest,
        by_descriptor,
        dtype,
        *blocks,
        config.parts,
        programs,
        **options,
    )


def _descriptor(x: Tensor, *block: int) -> TensorDescriptor:
    return TensorDescriptor(x, x.shape, x.stride(), list(block))
