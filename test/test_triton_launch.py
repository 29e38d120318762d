"""Kernels are compiled once a key and device, and get all their arguments. What is compiled needs a GPU: test/fused."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")
triton_launch = pytest.importorskip("lowbit_optim.triton_launch")


class Kernel:
    """Remembers what it was compiled for and launched with."""

    def __init__(self) -> None:
        self.compiled: list[tuple[Any, ...]] = []
        self.launched: list[tuple[Any, ...]] = []

    def warmup(self, *args: Any, grid: tuple[int, ...], **options: Any) -> Any:
        self.compiled.append((grid, args, options))
        number = len(self.compiled)
        kernel = self

        class Compiled:
            def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
                return lambda *args: kernel.launched.append((number, grid, args))

        return Compiled()


@pytest.fixture
def current_device(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    device = [0]
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    active = SimpleNamespace(get_current_device=lambda: device[0])  # Triton's own looks for a GPU
    monkeypatch.setattr(triton_launch, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(triton_launch, "_compiled", {})
    return device


def test_a_kernel_is_compiled_once_a_key_and_device(current_device: list[int]) -> None:
    kernel, other = Kernel(), Kernel()
    for each, device, key, grid, args in [
        (kernel, 0, ("a", True), (5,), (1, 2.0)),
        (kernel, 0, ("a", True), (6,), (3, 4.0)),
        (kernel, 0, ("a", False), (5, 2), (1, 2.0)),
        (kernel, 1, ("a", True), (5,), (1, 2.0)),
        (other, 0, ("a", True), (5,), (1, 2.0)),
    ]:
        current_device[0] = device
        triton_launch.launch(each, grid, key, *args, num_warps=4)
    assert kernel.compiled == [((5,), (1, 2.0), {"num_warps": 4})] + [
        (grid, (1, 2.0), {"num_warps": 4}) for grid in [(5, 2), (5,)]
    ]
    assert kernel.launched == [
        (1, (5, 1, 1), (1, 2.0)),
        (1, (6, 1, 1), (3, 4.0)),
        (2, (5, 2, 1), (1, 2.0)),
        (3, (5, 1, 1), (1, 2.0)),
    ]
    assert len(other.compiled) == len(other.launched) == 1


def test_alignments_are_those_that_triton_specialises_on() -> None:
    x = torch.zeros(64, dtype=torch.uint8)
    start = -x.data_ptr() % 16
    tensors = [x[start:], x[start + 8 :], x[start + 16 :]]
    assert triton_launch.alignments(*tensors, None, 16) == (True, False, True, False, False)
