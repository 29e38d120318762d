"""The int8 matmul: its definition in PyTorch, the op that models call, and the table of tile configurations.

``scaled_matmul`` is ``((a @ b.T) * a_scale[:, None]) * b_scale + bias``: int32 sums, exact; then fp32, every operation
correctly rounded, in this order; then rounded to the result's dtype.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from .quantize import HAS_TRITON, library

if TYPE_CHECKING:
    from .kernels import MatmulConfig

# Longer sums could leave int32 if all codes were ±127. They are cut, and the parts added in fp32.
LONGEST_SUM = 1 << 17
HOPPER_SHARED_MEMORY = 232_448  # bytes that a program can have

library.define(
    "scaled_matmul(Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, Tensor? bias, ScalarType dtype) -> Tensor"
)


def scaled_matmul(
    a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """Product of two quantised matrices.

    Args:
        a, b: codes, int8 ``(m, k)`` and ``(n, k)``, ``k`` a multiple of 16; and scales, fp32 ``(m,)`` and ``(n,)``.
        dtype: of the result: fp32, bf16 or fp16.
        bias: any of these, ``(n,)``.

    Returns:
        ``(m, n)``
    """
    return torch.ops.lowbit_optim.scaled_matmul(a[0], b[0], a[1], b[1], bias, dtype)


_Matmul = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None, torch.dtype], Tensor]


def _with_long_sums(matmul: _Matmul) -> _Matmul:
    """``matmul`` for any ``k``."""

    @functools.wraps(matmul)
    def scaled_matmul(
        a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        if a.shape[1] <= LONGEST_SUM:
            return matmul(a, b, a_scale, b_scale, bias, dtype)
        parts = zip(a.split(LONGEST_SUM, 1), b.split(LONGEST_SUM, 1), strict=True)
        out = torch.zeros(a.shape[0], b.shape[0], dtype=torch.float32, device=a.device)
        for p, q in parts:
            out += matmul(p.contiguous(), q.contiguous(), a_scale, b_scale, None, torch.float32)
        return (out if bias is None else out.add_(bias)).to(dtype)

    return scaled_matmul


# --- Definition ------------------------------------------------------------------------------------------------------


@_with_long_sums
def _scaled_matmul(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    out = int32_matmul(a, b).float().mul_(a_scale[:, None]).mul_(b_scale)
    return (out if bias is None else out.add_(bias)).to(dtype)


def int32_matmul(a: Tensor, b: Tensor) -> Tensor:
    """Exact ``a @ b.T`` of int8 ``(m, k)`` and ``(n, k)``: int32 ``(m, n)``."""
    (m, k), n = a.shape, b.shape[0]
    if a.device.type == "cpu":
        return torch._int_mm(a, b.t()) if _cpu_matmul_is_exact() else _matmul_by_parts(a, b)
    if a.device.type != "cuda" or 0 in (m, n, k):
        return _matmul_by_parts(a, b)
    # cuBLAS wants more than 16 rows, and columns in eights.
    a, b = F.pad(a, (0, 0, 0, max(0, 17 - m))), F.pad(b, (0, 0, 0, -n % 8))
    return torch._int_mm(a, b.t())[:m, :n]


@functools.cache
def _cpu_matmul_is_exact() -> bool:
    """Whether ``torch._int_mm`` keeps large products: on CPUs without VNNI pairs of them saturate at 16 bits."""
    a = torch.full((16, 64), 127, dtype=torch.int8)
    b = a * torch.tensor([1, -1], dtype=torch.int8).repeat_interleave(8)[:, None]
    return torch.equal(torch._int_mm(a, b.t()).long(), a.long() @ b.long().t())


def _matmul_by_parts(a: Tensor, b: Tensor) -> Tensor:
    """In fp32, 1024 products at a time: their sum is an integer below 2**24 at every moment, hence exact."""
    out = torch.zeros(a.shape[0], b.shape[0], dtype=torch.int32, device=a.device)
    with torch.autocast(a.device.type, enabled=False):  # it would round the sums
        for p, q in zip(a.split(1024, 1), b.split(1024, 1), strict=True):
            out += (p.float() @ q.float().t()).int()
    return out


# --- Triton ----------------------------------------------------------------------------------------------------------

# Architecture -> the fewest multiplications, m * n * k, for which int8 pays.
# sm90: whole training steps were faster on an H200 from 9.4e10 on, and slower up to 9.0e10, where the host took longer
# than the device. The others are estimates by their rates.
smallest_products = {"cpu": 0, "sm100": 200_000_000_000, "sm90": 92_000_000_000, "sm80": 30_000_000_000}


@functools.cache
def configurations() -> dict[tuple[str, str, int], "MatmulConfig"]:
    """The table of tile configurations, by architecture, :func:`size_class` and bytes of a result's element.

    It may be changed, ``configurations()["sm90", "large", 2] = MatmulConfig(...)``: ``benchmarks/int8_linear.py
    --tune`` measures candidates and prints the lines to write.
    """
    from .kernels import MatmulConfig

    # sm90 was measured on an H200. Two programs on a multiprocessor compute while the other one stores or waits, for
    # which stores in four parts of fp32 leave room. The others are estimates.
    two = MatmulConfig(128, 128, 128, stages=3, warps=4, resident=2)
    large = MatmulConfig(128, 256, 128, stages=3, warps=8)
    small = MatmulConfig(128, 128, 128, stages=3, warps=4)
    return {
        ("sm100", "large", 2): large,
        ("sm100", "large", 4): large,
        ("sm100", "small", 2): small,
        ("sm100", "small", 4): small,
        ("sm90", "large", 2): two,
        ("sm90", "large", 4): replace(two, parts=4, group_m=16),
        ("sm90", "small", 2): MatmulConfig(64, 128, 128, stages=4, warps=4, parts=1, resident=2),
        ("sm90", "small", 4): MatmulConfig(64, 128, 128, stages=4, warps=4, resident=2),
        ("sm80", "large", 2): MatmulConfig(128, 128, 64, stages=3, warps=8, descriptors=False),
        ("sm80", "large", 4): MatmulConfig(128, 128, 64, stages=3, warps=8, descriptors=False),
        ("sm80", "small", 2): MatmulConfig(64, 128, 64, stages=4, warps=4, descriptors=False),
        ("sm80", "small", 4): MatmulConfig(64, 128, 64, stages=4, warps=4, descriptors=False),
    }


@_with_long_sums
def _scaled_matmul_triton(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    if a.numel() == 0 or b.numel() == 0:
        return _scaled_matmul(a, b, a_scale, b_scale, bias, dtype)
    from . import kernels

    out = a.new_empty(a.shape[0], b.shape[0], dtype=dtype)
    architecture, multiprocessors = gpu(a.device.index)
    config = configurations()[architecture, size_class(a.shape[0], b.shape[0], multiprocessors), out.itemsize]
    programs = 0 if has_collectives() else config.resident * multiprocessors
    kernels.scaled_matmul(a, b, a_scale, b_scale, bias, out, config, programs)
    return out


def has_collectives() -> bool:
    """Whether NCCL may compute beside a matmul, as it does for FSDP and DDP.

    With 16 of an H200's 132 multiprocessors held by another kernel, programs that go from tile to tile took 1.5 to 1.75
    times as long, and one program a tile, which alone is slower by 2 to 8 %, 1.06 to 1.08 times (docs/int8.md).
    """
    dist = torch.distributed
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def size_class(m: int, n: int, multiprocessors: int) -> str:
    """Whether tiles of 128 x 256 occupy the whole device, "large", or leave a part of it idle, "small"."""
    return "large" if -(-m // 128) * -(-n // 256) >= multiprocessors else "small"


@functools.cache
def gpu(index: int) -> tuple[str, int]:
    """Architecture, as the tables name it, and number of multiprocessors."""
    properties = torch.cuda.get_device_properties(index)
    # The smaller GPUs of later architectures have tensor descriptors, but not the memory that the tiles need.
    shared_memory = getattr(properties, "shared_memory_per_block_optin", 0)  # AMD's have no such figure
    has_descriptors = properties.major >= 9 and shared_memory >= HOPPER_SHARED_MEMORY
    architecture = "sm80" if not has_descriptors else "sm90" if properties.major == 9 else "sm100"
    return architecture, properties.multi_processor_count


@torch.compiler.assume_constant_result
def smallest_product(device: torch.device) -> int:
    """The fewest multiplications, ``m * n * k``, for which int8 pays on ``device``."""
    architecture = gpu(device.index)[0] if device.type == "cuda" else "cpu"
    return smallest_products[architecture]


# --- Registration ----------------------------------------------------------------------------------------------------


def _fake(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[0], dtype=dtype)


library.impl("scaled_matmul", _scaled_matmul, "CompositeExplicitAutograd")
if HAS_TRITON:
    library.impl("scaled_matmul", _scaled_matmul_triton, "CUDA")
torch.library.register_fake("lowbit_optim::scaled_matmul", _fake, lib=library)
