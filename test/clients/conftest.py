import sys
from collections.abc import Iterator

import pytest
import torch
import torchvision_names  # noqa: F401  # before any client

import lowbit_optim  # noqa: F401


@pytest.fixture(autouse=True)
def eager_step() -> Iterator[None]:
    """As compiled, and sooner done; the compiled step is tested elsewhere."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.fixture
def released_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No gradient waits for the step; those of a small model would."""
    monkeypatch.setattr(sys.modules["lowbit_optim.gradient_release"], "_MAX_WAITING_BYTES", 0)
