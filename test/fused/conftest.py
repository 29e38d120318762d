"""The kernel runs on the GPU where there is one, else on the CPU in Triton's interpreter."""

import numpy as np
import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="session", autouse=True)
def _interpreter():
    triton = pytest.importorskip("triton")
    if DEVICE == "cuda":
        return
    from triton.runtime import interpreter

    def create_fma(self, x, y, z):
        """The interpreter's own rounds twice. Exact in float64 for the numbers that the kernel has here."""
        exact = x.data.astype(np.float64) * y.data + z.data
        return interpreter.TensorHandle(exact.astype(x.data.dtype), z.dtype.scalar)

    assert triton.knobs.runtime.interpret, "set before Triton is first imported, in test/conftest.py"
    interpreter.InterpreterBuilder.create_fma = create_fma

    from lowbit_optim.fused import launch

    launch._PROGRAM_NUMEL = 4096  # a program takes the interpreter as long, however large it is


@pytest.fixture
def fused_device(monkeypatch: pytest.MonkeyPatch) -> str:
    """Where the optimizer uses the kernel."""
    if DEVICE == "cpu":
        monkeypatch.setattr("lowbit_optim.optimizer._why_not_fused", lambda p, group: None)
    return DEVICE
