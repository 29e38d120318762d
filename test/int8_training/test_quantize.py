import math

import pytest
import torch
from emulation import quantized
from torch import Tensor

from lowbit_optim.int8_training.quantize import quantize, quantize_columns, quantize_rows

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 1), (3, 16), (17, 33), (64, 100), (130, 257)]


def decode(codes: Tensor, scale: Tensor, columns: int) -> Tensor:
    return (codes.double() * scale.double()[:, None])[:, :columns]


def rows_of_many_magnitudes(shape: tuple[int, int], dtype: torch.dtype, device: str = "cpu") -> Tensor:
    low = -13 if dtype is torch.float16 else -60
    return (torch.randn(shape) * torch.logspace(low, 10, shape[0], base=2)[:, None]).to(dtype).to(device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_codes_and_scales_are_those_of_float64(shape: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    x = rows_of_many_magnitudes(shape, dtype, device)
    codes, scale = quantize_rows(x)

    assert codes.dtype is torch.int8
    assert scale.dtype is torch.float32
    assert codes.shape == (shape[0], math.ceil(shape[1] / 16) * 16)
    assert not codes[:, shape[1] :].any()
    torch.testing.assert_close(scale.double(), x.double().abs().amax(1) / 127, rtol=2**-24, atol=0)
    steps = (decode(codes, scale, shape[1]) - quantized(x)) / scale[:, None]
    # One code apart where fp32 rounds onto a tie, which is rare.
    assert steps.abs().max() < 1.001
    assert (steps.abs() > 0.001).sum() <= max(1, x.numel() // 1000)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_value_comes_back_within_half_a_step(dtype: torch.dtype, device: str) -> None:
    x = rows_of_many_magnitudes((64, 200), dtype, device)
    codes, scale = quantize_rows(x)
    error = (decode(codes, scale, 200) - x.double()).abs() / scale[:, None]
    assert error.max() <= 0.5 * (1 + 1e-4)


def test_ties_go_to_even(device: str) -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5]], device=device)
    assert quantize_rows(x)[0][0, :7].tolist() == [127, 0, 2, 2, 0, -2, -2]


def test_the_largest_element_has_the_largest_code_however_small_it_is(device: str) -> None:
    x = torch.tensor([[2e-36, -2e-37], [-3e38, 1e38], [1e-6, 0.0]], device=device)
    assert quantize_rows(x)[0][:, :2].tolist() == [[127, -13], [-127, 42], [127, 0]]


def test_zeros_and_numbers_below_the_smallest_scale(device: str) -> None:
    x = torch.tensor([[0.0, 0.0], [1e-44, 0.0], [1e-38, -1e-38]], device=device)
    codes, scale = quantize_rows(x)
    assert scale.tolist() == [torch.finfo(torch.float32).tiny] * 3
    assert codes[:, :2].tolist() == [[0, 0], [0, 0], [1, -1]]


def test_a_row_that_is_not_finite_spoils_itself_alone(device: str) -> None:
    x = torch.randn(4, 32, device=device)
    x[1, 3], x[2, 5] = torch.nan, -torch.inf
    codes, scale = quantize_rows(x)
    assert not codes[1:3].any()
    assert scale[1].isnan()
    assert scale[2].isinf()
    kept = quantize_rows(x[[0, 3]])
    assert torch.equal(codes[[0, 3]], kept[0])
    assert torch.equal(scale[[0, 3]], kept[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES, (0, 5), (5, 0)])
def test_columns_are_the_rows_of_the_transposed(shape: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    x = torch.randn(shape, device=device).to(dtype)
    expected_rows, expected_columns = quantize_rows(x), quantize_rows(x.t())
    rows, columns = quantize(x, by_rows=True, by_columns=True)
    for got, expected in ((rows, expected_rows), (columns, expected_columns), (quantize_columns(x), expected_columns)):
        assert got is not None
        assert torch.equal(got[0], expected[0])
        assert torch.equal(got[1], expected[1])


def test_only_what_is_asked_for() -> None:
    x = torch.randn(4, 8)
    assert quantize(x, by_rows=False, by_columns=False) == (None, None)
    assert quantize(x, by_rows=True, by_columns=False)[1] is None
    assert quantize(x, by_rows=False, by_columns=True)[0] is None


def test_the_input_stays_as_it_is_and_may_have_any_strides(device: str) -> None:
    x = torch.randn(40, 24, device=device)
    before = x.clone()
    for view in (x.t(), x[::2], x[:, 3:], x[:1].expand(5, -1)):
        got, expected = quantize(view, by_rows=True, by_columns=True), quantize_rows(view.clone())
        assert torch.equal(got[0][0], expected[0])
    assert torch.equal(x, before)


@pytest.mark.parametrize("shape", [(6, 20), (48, 16), (0, 5)])
@pytest.mark.parametrize("name", ["quantize_rows", "quantize_columns", "quantize_rows_and_columns"])
def test_the_ops_are_what_torch_compile_wants_of_ops(name: str, shape: tuple[int, int], device: str) -> None:
    op = getattr(torch.ops.lowbit_optim, name).default
    torch.library.opcheck(op, (torch.randn(shape, device=device),))
    torch.library.opcheck(op, (torch.randn(shape[::-1], device=device).t(),))
