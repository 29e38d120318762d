"""What reaches Triton, shown without a GPU: launches are bound and compiled for one, and not run.

Whether Triton interprets is settled when it is imported, so where it does, a process of its own compiles.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lowbit_optim.int8_training import matmul, quantize

pytest.importorskip("triton")

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime import driver

from lowbit_optim.int8_training import kernels

IN, OUT = 96, 80
LIMITS = {"sm80": 101_376, "sm90": matmul.HOPPER_SHARED_MEMORY}
INTERPRETED = knobs.runtime.interpret


@pytest.mark.skipif(not INTERPRETED, reason="this process compiles")
def test_the_other_tests_of_this_file_pass_where_triton_compiles() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__],
        env=os.environ | {"TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout
    assert " passed" in result.stdout  # rather than skipped


class Gpu:
    """As much of Triton's driver as compiling needs."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_device(self) -> int:
        return 1000 + self.capability  # kernels are kept by device, and there may be a real one

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[Any]]:
    """Given a compute capability, the list to which every launch from then on adds its kernel."""
    launched: list[Any] = []

    def pretend(capability: int) -> list[Any]:
        monkeypatch.setattr(driver, "_active", Gpu(capability))
        return launched

    monkeypatch.setattr(CompiledKernel, "__getitem__", lambda kernel, grid: lambda *args: launched.append(kernel))
    return pretend


def launch_all(tokens: int, config: kernels.MatmulConfig) -> None:
    """Everything that a layer does with one input, in bf16."""
    x = torch.randn(tokens, IN).bfloat16()
    rows, columns = quantize._empty_rows(x), quantize._empty_columns(x)
    kernels.quantize_rows(x, *rows)
    kernels.quantize_columns(x, *columns, *rows)
    weight, weight_scale = torch.zeros(OUT, IN, dtype=torch.int8), torch.ones(OUT)
    out = torch.empty(tokens, OUT, dtype=torch.bfloat16)
    kernels.scaled_matmul(rows[0], weight, rows[1], weight_scale, None, out, config, config.resident * 132)
    grad_columns = torch.zeros(OUT, columns[0].shape[1], dtype=torch.int8)
    weight_grad = torch.empty(OUT, IN)
    kernels.scaled_matmul(
        grad_columns, columns[0], weight_scale, columns[1], None, weight_grad, config, config.resident * 132
    )


@pytest.mark.skipif(INTERPRETED, reason="runs in a process of its own")
@pytest.mark.parametrize(("capability", "architecture"), [(80, "sm80"), (90, "sm90")])
def test_every_length_uses_the_same_kernels_which_fit(
    capability: int, architecture: str, compiled: Callable[[int], list[Any]]
) -> None:
    launched = compiled(capability)
    config = matmul.configurations()[architecture, "large", 4]
    launch_all(64, config)
    first = [kernel.hash for kernel in launched]
    assert len(set(first)) == len(first) == 5
    limit = LIMITS[architecture] // max(1, config.resident)
    assert all(kernel.metadata.shared <= limit for kernel in launched)
    for tokens in (1, 50, 1000, 4096):
        del launched[:]
        launch_all(tokens, config)
        assert [kernel.hash for kernel in launched] == first
