"""The kernel compiles for a GPU, shown where there is none: Triton's interpreter takes what its compiler refuses."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

# Whether Triton interprets is settled when it is imported, so a process of its own compiles.
PROGRAM = """
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lowbit_optim.fused.kernel import lion_kernel

POINTERS = {"table": "*i64", "inverse_grad_scale": "*fp32", "found_inf": "*fp32"}
CASES = [
    (tl.bfloat16, True, True, 0), (tl.float16, True, False, 0), (tl.float32, False, False, 0),
    (tl.bfloat16, True, True, 8), (tl.bfloat16, False, False, 16), (tl.float16, False, False, 8),
    (tl.float16, False, True, 16),
]
for dtype, stochastic, on_device, residual_bits in CASES:
    signature = dict.fromkeys(lion_kernel.arg_names, "fp32") | POINTERS | {"n_tensors": "i32", "step": "i32"}
    if on_device:
        signature |= {"step": "*i64", "lr": "*fp32", "decay": "*fp32"}
    constants = {
        "STEP_ON_DEVICE": on_device, "LR_ON_DEVICE": on_device, "LR_MAY_BE_ZERO": on_device, "PARAM": dtype,
        "GRAD": dtype, "STOCHASTIC": stochastic, "RESIDUAL_BITS": residual_bits,
        "BLOCK": 64, "WIDTH": 64, "ROWS": 8, "UNEVEN_ROWS": 2, "KINDS": 15,
    }
    source = ASTSource(lion_kernel, signature | dict.fromkeys(constants, "constexpr"), constants)
    options = {"num_warps": 1, "enable_fp_fusion": False}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert compiled.asm["cubin"]
"""


def test_every_kind_of_tensor_compiles_for_a_gpu() -> None:
    pytest.importorskip("triton")
    paths = [str(Path(__file__).parent.parent.parent), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(paths)}
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
