"""The kernel runs on the GPU where there is one, else on the CPU in Triton's interpreter."""

import interpreter
import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="session", autouse=True)
def _interpreter() -> None:
    pytest.importorskip("triton")
    if DEVICE == "cpu":
        interpreter.mend()


@pytest.fixture
def fused_device(monkeypatch: pytest.MonkeyPatch) -> str:
    """Where the optimizer uses the kernel."""
    if DEVICE == "cpu":
        monkeypatch.setattr("lowbit_optim.optimizer._why_not_fused", lambda p, group: None)
    return DEVICE
