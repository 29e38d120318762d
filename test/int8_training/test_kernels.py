"""The Triton kernels compute what the definitions in PyTorch do, bit for bit: on a GPU, or in Triton's interpreter."""

import numpy as np
import pytest
import torch
from torch import Tensor

from lowbit_optim.int8_training import matmul, quantize

triton = pytest.importorskip("triton")
kernels = pytest.importorskip("lowbit_optim.int8_training.kernels")

INTERPRETED = triton.knobs.runtime.interpret
DEVICE = "cpu" if INTERPRETED else "cuda"
# Triton 3.6's interpreter makes integers of arrays in a way that NumPy no longer allows.
CANNOT_LOOP = triton.__version__.startswith("3.6") and np.lib.NumpyVersion(np.__version__) >= "2.4.0"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 16), (5, 7), (64, 128), (70, 1000), (300, 33)]
CONFIGS = [
    kernels.MatmulConfig(64, 64, 64, 3, 4),
    kernels.MatmulConfig(128, 32, 32, 3, 4, group_m=2, parts=1),
    kernels.MatmulConfig(64, 64, 64, 3, 4, group_m=2, resident=1, parts=4),
    kernels.MatmulConfig(64, 64, 32, 3, 4, group_m=2, descriptors=False),
]


@pytest.fixture(autouse=True)
def _can_loop() -> None:
    if INTERPRETED and CANNOT_LOOP:
        pytest.skip("this version of Triton's interpreter does not work with this one of NumPy")


def same(a: Tensor, b: Tensor) -> bool:
    """Equal in every bit, where NaN has only one."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


def difficult(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Rows of zeros, of numbers that are not finite and of many magnitudes, and ties between codes."""
    x = torch.randn(shape) * torch.rand(shape[0], 1) ** 6
    x[shape[0] // 2 :] = (x[shape[0] // 2 :] * 20).round() / 2
    if shape[0] > 4:
        x[1, 2], x[2, 3], x[3] = torch.nan, -torch.inf, 0
    if shape[0] > 60 and not (INTERPRETED and dtype is torch.bfloat16):  # it converts subnormal bfloat16 wrongly
        x[10] *= 1e-42
        x[11] *= 1e-37
        x[12] *= 1e30
    return x.to(dtype)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes with NumPy
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_quantisation_is_the_defined_one(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = difficult(shape, dtype).to(DEVICE)
    row_codes, row_scale, codes, scale = quantize._quantize_rows_and_columns(x)

    alone = [torch.full_like(row_codes, 99), torch.full_like(row_scale, 99)]
    kernels.quantize_rows(x, *alone)
    columns_alone = [torch.full_like(codes, 99), torch.full_like(scale, 99)]
    kernels.quantize_columns(x, *columns_alone)
    both = [torch.full_like(t, 99) for t in (codes, scale, row_codes, row_scale)]
    kernels.quantize_columns(x, *both)

    expected = [codes, scale, row_codes, row_scale]
    for got, right in zip([*columns_alone, *alone, *both], expected * 2, strict=True):
        assert same(got, right)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_row_longer_than_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_WIDEST_ROW", 256)
    x = difficult((9, 700), torch.float32).to(DEVICE)
    x[:, 600] *= 5
    codes, scale = (torch.full_like(t, 99) for t in quantize._quantize_rows(x))
    kernels.quantize_rows(x, codes, scale)
    assert same(codes, quantize._quantize_rows(x)[0])
    assert same(scale, quantize._quantize_rows(x)[1])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 8, 16), (130, 70, 48), (129, 264, 144), (300, 33, 16)])
def test_the_matmul_is_the_defined_one(m: int, n: int, k: int, config: object) -> None:
    a, b = (torch.randint(-127, 128, (rows, k), dtype=torch.int8, device=DEVICE) for rows in (m, n))
    a_scale, b_scale = torch.rand(m, device=DEVICE) / 9, torch.rand(n, device=DEVICE)
    for dtype, bias in (
        (torch.float32, None),
        (torch.float32, torch.randn(n, device=DEVICE).bfloat16()),
        (torch.float16, torch.randn(n, device=DEVICE)),
        (torch.bfloat16, None),
    ):
        out = torch.full((m, n), 99.0, dtype=dtype, device=DEVICE)
        kernels.scaled_matmul(a, b, a_scale, b_scale, bias, out, config, config.resident * 3)
        expected = matmul._scaled_matmul(a, b, a_scale, b_scale, bias, dtype)
        if INTERPRETED and dtype is torch.bfloat16:  # its conversion to bfloat16 truncates
            torch.testing.assert_close(out, expected, rtol=2**-7, atol=0)
        else:
            assert same(out, expected)


def test_sums_of_the_largest_codes_are_exact() -> None:
    a = torch.full((3, 2048), 127, dtype=torch.int8, device=DEVICE)
    ones, out = torch.ones(3, device=DEVICE), torch.empty(3, 3, device=DEVICE)
    for config in CONFIGS:
        kernels.scaled_matmul(a, -a, ones, ones, None, out, config, config.resident * 3)
        assert out.tolist() == [[-2048 * 127.0**2] * 3] * 3
