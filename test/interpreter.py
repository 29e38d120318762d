"""Makes Triton's interpreter give what a GPU would, where there is no GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest


@contextmanager
def fused_on(device_type: str) -> Iterator[None]:
    """The optimizer takes the fused step on such a device, wherever nothing but the device is against it."""
    from lowbit_optim import optimizer

    if device_type == "cpu":
        mend()
    why_not_fused = optimizer._why_not_fused

    def but_for_the_device(p: Any, group: Any) -> str | None:
        reason = why_not_fused(p, group)
        return None if reason and "needs CUDA" in reason else reason

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizer, "_why_not_fused", but_for_the_device)
        yield


def mend() -> None:
    """Once a process. TRITON_INTERPRET=1 must have been set before Triton was first imported."""
    import triton
    from triton.runtime import interpreter

    from lowbit_optim.fused import launch

    def create_fma(self, x, y, z):
        """The interpreter's own rounds twice. Exact in float64 for the numbers that the kernel has here."""
        exact = x.data.astype(np.float64) * y.data + z.data
        return interpreter.TensorHandle(exact.astype(x.data.dtype), z.dtype.scalar)

    assert triton.knobs.runtime.interpret, "set before Triton is first imported, in test/conftest.py"
    interpreter.InterpreterBuilder.create_fma = create_fma
    launch._PROGRAM_NUMEL = 4096  # a program takes the interpreter as long, however large it is
