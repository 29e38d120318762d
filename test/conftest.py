import os
import random

import numpy as np
import pytest
import torch

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def pytest_configure() -> None:
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported, for test/fused
    torch.set_num_threads(1)  # tensors are small; on a busy machine threads wait 40 ms a kernel for each other


def _can_compile() -> bool:
    """Whether torch.compile can build kernels for the CPU, which takes a C++ compiler on this machine."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        return bool(get_cpp_compiler())
    except InvalidCxxCompiler:
        return False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("compiler")]
    if marked and not _can_compile():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="torch.compile finds no C++ compiler on this machine"))


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(autouse=True)
def seed() -> int:
    """Every test starts from the same generators, whichever tests ran before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    return 0
