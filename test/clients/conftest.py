from collections.abc import Iterator

import pytest
import torch
import torchvision_names  # noqa: F401  # before any client


@pytest.fixture(autouse=True)
def eager_step() -> Iterator[None]:
    """As compiled, and sooner done; the compiled step is tested elsewhere."""
    with torch.compiler.set_stance("force_eager"):
        yield
