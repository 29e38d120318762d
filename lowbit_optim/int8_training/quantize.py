"""Row-wise and column-wise int8 quantisation: its definition in PyTorch, and the ops that models call.

A row's scale is its largest absolute value over 127, in fp32; its codes are ``row * (1 / scale)`` rounded to the
nearest integer, ties to even. Every operation is correctly rounded, so that all devices give the same codes.

The smallest scale is the smallest normal fp32 number, so that rows of zeros need no case of their own. A row with a NaN
or an infinity has codes 0 and that scale, so every product with it is NaN.

A row of codes is padded with zeros to a multiple of 16 (:data:`ROW_MULTIPLE`): they add nothing to a sum, and hardware
wants aligned rows whatever the number of tokens.
"""

import importlib.util

import torch
import torch.nn.functional as F
from torch import Tensor

ROW_MULTIPLE = 16
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
HAS_TRITON = importlib.util.find_spec("triton") is not None

library = torch.library.Library("lowbit_optim", "FRAGMENT")
library.define("quantize_rows(Tensor x) -> (Tensor codes, Tensor scale)")
library.define("quantize_columns(Tensor x) -> (Tensor codes, Tensor scale)")
library.define("quantize_rows_and_columns(Tensor x) -> (Tensor, Tensor, Tensor, Tensor)")

Quantized = tuple[Tensor, Tensor]


def quantize_rows(x: Tensor) -> Quantized:
    """Codes, int8 ``(m, n')``, and scales, fp32 ``(m,)``, of fp32, bf16 or fp16 ``x``, ``(m, n)``.

    ``n'`` is ``n`` rounded up to a multiple of 16.
    """
    return torch.ops.lowbit_optim.quantize_rows(x)


def quantize_columns(x: Tensor) -> Quantized:
    """The same of ``x.T``: codes ``(n, m')`` and scales ``(n,)``."""
    return torch.ops.lowbit_optim.quantize_columns(x)


def quantize(x: Tensor, *, by_rows: bool, by_columns: bool) -> tuple[Quantized | None, Quantized | None]:
    """What :func:`quantize_rows` and :func:`quantize_columns` give, None for what is not asked for.

    Both together read ``x`` once less than one after the other.
    """
    if by_rows and by_columns:
        codes, scale, column_codes, column_scale = torch.ops.lowbit_optim.quantize_rows_and_columns(x)
        return (codes, scale), (column_codes, column_scale)
    return quantize_rows(x) if by_rows else None, quantize_columns(x) if by_columns else None


# --- Definition ------------------------------------------------------------------------------------------------------


def _quantize_rows(x: Tensor) -> Quantized:
    if x.numel() == 0:
        codes, scale = _empty_rows(x)
        return codes.zero_(), scale.fill_(SMALLEST_SCALE)
    x = x.float().contiguous()
    # torch would multiply by the reciprocal of a number of the host's
    scale = (x.abs().amax(1) / torch.full((), 127.0, device=x.device)).clamp(min=SMALLEST_SCALE)
    codes = (x * (1.0 / scale)[:, None]).round_()
    codes = codes.masked_fill_(~scale.isfinite()[:, None], 0).to(torch.int8)
    return F.pad(codes, (0, -codes.shape[1] % ROW_MULTIPLE)), scale


def _quantize_columns(x: Tensor) -> Quantized:
    return _quantize_rows(x.t().contiguous())


def _quantize_rows_and_columns(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return *_quantize_rows(x), *_quantize_columns(x)


# --- Triton ----------------------------------------------------------------------------------------------------------


def _quantize_rows_triton(x: Tensor) -> Quantized:
    if x.numel() == 0:
        return _quantize_rows(x)
    from . import kernels

    codes, scale = _empty_rows(x)
    kernels.quantize_rows(x.contiguous(), codes, scale)
    return codes, scale


def _quantize_columns_triton(x: Tensor) -> Quantized:
    if x.numel() == 0:
        return _quantize_columns(x)
    from . import kernels

    codes, scale = _empty_columns(x)
    kernels.quantize_columns(x.contiguous(), codes, scale)
    return codes, scale


def _quantize_rows_and_columns_triton(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if x.numel() == 0:
        return _quantize_rows_and_columns(x)
    from . import kernels

    (row_codes, row_scale), (codes, scale) = _empty_rows(x), _empty_columns(x)
    kernels.quantize_columns(x.contiguous(), codes, scale, row_codes, row_scale)
    return row_codes, row_scale, codes, scale


# --- Registration ----------------------------------------------------------------------------------------------------


def _empty_rows(x: Tensor) -> Quantized:
    """Room for the codes and scales of the rows of ``x``."""
    return _empty(x, *x.shape)


def _empty_columns(x: Tensor) -> Quantized:
    return _empty(x, x.shape[1], x.shape[0])


def _empty(x: Tensor, rows: int, columns: int) -> Quantized:
    padded = (columns + ROW_MULTIPLE - 1) // ROW_MULTIPLE * ROW_MULTIPLE
    return x.new_empty(rows, padded, dtype=torch.int8), x.new_empty(rows, dtype=torch.float32)


def _empty_rows_and_columns(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return *_empty_rows(x), *_empty_columns(x)


for _name, _torch, _triton, _fake in (
    ("quantize_rows", _quantize_rows, _quantize_rows_triton, _empty_rows),
    ("quantize_columns", _quantize_columns, _quantize_columns_triton, _empty_columns),
    (
        "quantize_rows_and_columns",
        _quantize_rows_and_columns,
        _quantize_rows_and_columns_triton,
        _empty_rows_and_columns,
    ),
):
    library.impl(_name, _torch, "CompositeExplicitAutograd")
    if HAS_TRITON:
        library.impl(_name, _triton, "CUDA")
    torch.library.register_fake(f"lowbit_optim::{_name}", _fake, lib=library)
