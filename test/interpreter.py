"""Makes Triton's interpreter give what a GPU would, where there is no GPU."""

import numpy as np


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
