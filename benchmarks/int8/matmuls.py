"""Matmuls alone: the int8 one beside others, candidates for its table of configurations, and quantisation."""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.int8.timing import attempt, milliseconds
from lowbit_optim.int8_training import matmul
from lowbit_optim.int8_training.quantize import quantize, quantize_columns, quantize_rows

Shape = tuple[int, int, int]  # m, n, k of (m, k) @ (n, k).T
# What an MLP of 4096 -> 14336 and attention compute for 8192 tokens, and layers a quarter of their size.
SHAPES: list[Shape] = [(8192, 14336, 4096), (8192, 4096, 14336), (14336, 4096, 8192), (8192, 4096, 4096)]
SMALL_SHAPES: list[Shape] = [(2048, 1024, 4096), (1024, 2048, 2048), (2048, 2048, 2048)]


class Operands:
    """Random matrices of one shape in each form that a contender takes."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        m, n, k = shape
        self.a = torch.randn(m, k, device=device).bfloat16()
        self.b = torch.randn(n, k, device=device).bfloat16()
        self.a_int8, self.b_int8 = quantize_rows(self.a), quantize_rows(self.b)


Prepare = Callable[[Operands], Callable[[], Tensor]]


# --- Beside others ---------------------------------------------------------------------------------------------------


def _bf16(x: Operands) -> Callable[[], Tensor]:
    return lambda: x.a @ x.b.t()


def _int_mm(x: Operands) -> Callable[[], Tensor]:
    return lambda: torch._int_mm(x.a_int8[0], x.b_int8[0].t())


def _torchao(x: Operands) -> Callable[[], Tensor]:
    from torchao.prototype.quantized_training.int8_mixed_precision import scaled_int8_mm

    (a, a_scale), (b, b_scale) = ((codes, scale.bfloat16()) for codes, scale in (x.a_int8, x.b_int8))
    return lambda: scaled_int8_mm(a, b.t(), a_scale, b_scale)


def _fp8(x: Operands) -> Callable[[], Tensor]:
    a, b = x.a.to(torch.float8_e4m3fn), x.b.to(torch.float8_e4m3fn)
    one = torch.ones((), device=a.device)
    return lambda: torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)


def _ours(x: Operands, dtype: torch.dtype = torch.bfloat16) -> Callable[[], Tensor]:
    return lambda: matmul.scaled_matmul(x.a_int8, x.b_int8, dtype)


CONTENDERS = {
    "cuBLAS bf16": _bf16,
    "torch._int_mm": _int_mm,
    "torchao": _torchao,
    "cuBLAS fp8": _fp8,
    "ours": _ours,
    "ours, fp32 result": lambda x: _ours(x, torch.float32),
}


def compare(shapes: list[Shape], device: torch.device) -> Iterator[dict[str, Any]]:
    """A row a shape and contender: milliseconds, TOPS, speed over the first contender, whether ours is exact."""
    for shape in shapes:
        operands = Operands(shape, device)
        first = None
        for name, prepare in CONTENDERS.items():
            row = attempt(partial(_measure_contender, prepare, operands, device))
            if "ms" in row:
                first = first or row["ms"]
                row |= {"TOPS": _tops(shape, row["ms"]), "× bf16": first / row["ms"]}
            if name.startswith("ours"):
                row |= attempt(partial(_check_contender, prepare, operands))
            yield {"m, n, k": shape, "matmul": name, **row}


def _measure_contender(prepare: Prepare, x: Operands, device: torch.device) -> dict[str, Any]:
    return {"ms": milliseconds(prepare(x), device)}


def _check_contender(prepare: Prepare, x: Operands) -> dict[str, Any]:
    return {"exact": _is_exact(prepare(x)(), x)}


def _is_exact(out: Tensor, x: Operands) -> bool:
    a, b = x.a_int8, x.b_int8
    return torch.equal(out, matmul._scaled_matmul(a[0], b[0], a[1], b[1], None, out.dtype))


def _tops(shape: Shape, ms: float) -> float:
    m, n, k = shape
    return 2e-9 * m * n * k / ms


# --- Candidates for the table ----------------------------------------------------------------------------------------


def candidates(architecture: str) -> list[Any]:
    """Configurations that may be the best for some class of shapes."""
    from lowbit_optim.int8_training.kernels import MatmulConfig

    if architecture == "sm80":
        tiles = [(128, 256, 64, 3, 8), (128, 128, 64, 3, 8), (128, 128, 64, 4, 4), (64, 128, 64, 4, 4),
                 (128, 64, 64, 4, 4), (64, 256, 64, 4, 8), (128, 128, 128, 3, 8), (64, 64, 128, 4, 4)]  # fmt: skip
        return [MatmulConfig(*tile, descriptors=False) for tile in tiles]
    large = [(128, 256, 128, 3, 8), (128, 256, 128, 4, 8), (256, 128, 128, 3, 8)]
    two_fit = [(128, 128, 128, 3, 4), (128, 64, 128, 4, 4), (64, 128, 128, 4, 4)]
    return [
        *(MatmulConfig(*tile, resident=resident) for tile in large for resident in (0, 1)),
        *(MatmulConfig(*tile, resident=2, parts=parts) for tile in two_fit for parts in (1, 2, 4)),
        *(MatmulConfig(*tile, parts=parts) for tile in two_fit for parts in (2, 4)),
        *(MatmulConfig(*two_fit[0], resident=2, parts=4, group_m=group_m) for group_m in (4, 16)),
    ]


def tune(shapes: list[Shape], device: torch.device) -> Iterator[dict[str, Any]]:
    """A row for each shape, result dtype and candidate; one that is not exact is no candidate."""
    architecture, multiprocessors = matmul.gpu(torch.device(device).index or 0)
    chosen = candidates(architecture)
    inputs = {shape: Operands(shape, device) for shape in shapes}
    for config, dtype in itertools.product(chosen, (torch.bfloat16, torch.float32)):
        for shape, x in inputs.items():
            size = matmul.size_class(shape[0], shape[1], multiprocessors)
            row = attempt(partial(_measure_candidate, config, dtype, shape, x, multiprocessors, device))
            yield {"m, n, k": shape, "class": (architecture, size, dtype.itemsize), "config": _text(config), **row}


def _measure_candidate(
    config: Any, dtype: torch.dtype, shape: Shape, x: Operands, multiprocessors: int, device: torch.device
) -> dict[str, Any]:
    from lowbit_optim.int8_training import kernels

    (a, a_scale), (b, b_scale) = x.a_int8, x.b_int8
    out = torch.full(shape[:2], torch.nan, dtype=dtype, device=device)

    def call() -> None:
        kernels.scaled_matmul(a, b, a_scale, b_scale, None, out, config, config.resident * multiprocessors)

    call()
    if not _is_exact(out, x):
        raise ValueError("the result is not exact")
    ms = milliseconds(call, device)
    return {"ms": ms, "TOPS": _tops(shape, ms)}


def best_lines(rows: list[dict[str, Any]]) -> list[str]:
    """A line of the table for each class: the candidate with the least time, relative to each shape's best, summed."""
    lines = []
    for key in dict.fromkeys(row["class"] for row in rows):
        group = [row for row in rows if row["class"] == key and "ms" in row]
        best = {row["m, n, k"]: min(r["ms"] for r in group if r["m, n, k"] == row["m, n, k"]) for row in group}
        loss: dict[str, list[float]] = {}
        for row in group:
            loss.setdefault(row["config"], []).append(row["ms"] / best[row["m, n, k"]])
        complete = {config: sum(ratios) for config, ratios in loss.items() if len(ratios) == len(best)}
        if complete:
            config = min(complete, key=complete.__getitem__)
            lines.append(f"({key[0]!r}, {key[1]!r}, {key[2]}): {config},  # within {max(loss[config]) - 1:.1%} of best")
    return lines


def _text(config: Any) -> str:
    """As it is written in the table."""
    text = f"MatmulConfig({config.block_m}, {config.block_n}, {config.block_k}, stages={config.stages}"
    text += f", warps={config.warps}"
    for name, default in (
        ("group_m", 8),
        ("descriptors", True),
        ("parts", 2),
        ("resident", 0),
    ):
        if (value := getattr(config, name)) != default:
            text += f", {name}={value}"
    return text + ")"


# --- Quantisation ----------------------------------------------------------------------------------------------------

_TILES = [(64, 128, 4), (64, 128, 8), (32, 128, 8), (64, 64, 8), (128, 64, 4), (128, 128, 4)]


def quantisation(shapes: list[tuple[int, int]], device: torch.device) -> Iterator[dict[str, Any]]:
    """Milliseconds and bandwidth, counting the bytes read, twice where there are columns, and written."""
    for shape in shapes:
        x = torch.randn(shape, device=device).bfloat16()
        yield {"matrix": shape, "form": "rows", **_bandwidth(partial(quantize_rows, x), 3 * x.numel(), device)}
        for tile in _TILES if device.type == "cuda" else [None]:
            with _tiles(tile):
                both = partial(quantize, x, by_rows=True, by_columns=True)
                for form, call, moved in ("columns", partial(quantize_columns, x), 5), ("both", both, 6):
                    row = attempt(partial(_bandwidth, call, moved * x.numel(), device))
                    yield {"matrix": shape, "form": form, "tile": tile, **row}


def _tiles(tile: tuple[int, int, int] | None) -> contextlib.AbstractContextManager[Any]:
    """The kernels with other tiles than their own."""
    if tile is None:
        return contextlib.nullcontext()
    names = dict(zip(("_TILE_ROWS", "_TILE_COLUMNS", "_TILES"), tile, strict=True))
    return mock.patch.multiple("lowbit_optim.int8_training.kernels", **names)


def _bandwidth(call: Callable[[], Any], moved: int, device: torch.device) -> dict[str, Any]:
    ms = milliseconds(call, device)
    return {"ms": ms, "TB/s": moved / ms / 1e9}
