"""What one step computes, eager and compiled, quantised and not, against the paper's formula in fp64."""

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from reference import lion_reference
from torch import Tensor

from lowbit_optim import Lion8bit
from lowbit_optim.subclasses import OptimState8bit
from lowbit_optim.subclasses.blockwise import dequantize

pytestmark = [
    pytest.mark.filterwarnings("error"),
    pytest.mark.filterwarnings("ignore:.*bf16 and fp16 are mixed:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),  # torch's own, in its first compile
]

ALIGNED, RAGGED = (64, 128), (37, 75)  # rows of whole blocks, and with a short last block
BETAS = (0.9, 0.99)
HALF_DTYPES = (torch.bfloat16, torch.float16)


@pytest.fixture(params=["eager", pytest.param("compiled", marks=pytest.mark.compiler)], autouse=True)
def mode(request: pytest.FixtureRequest) -> Iterator[str]:
    with torch.compiler.set_stance("force_eager" if request.param == "eager" else "default"):
        yield request.param


def make(p: Tensor, m: Tensor | None = None, *, quantize: bool = True, **options) -> tuple[Tensor, Lion8bit]:
    """A parameter with the values of ``p``, and an optimizer of it whose momentum is ``m``, or ``m`` in 8 bits."""
    p = p.clone().requires_grad_()
    optimizer = Lion8bit([p], quantize=quantize, min_quantized_numel=0, **options)
    if m is not None:
        optimizer.state[p]["exp_avg"] = OptimState8bit.from_float(m) if quantize else m.clone()
    return p, optimizer


def step(p: Tensor, optimizer: Lion8bit, g: Tensor) -> None:
    p.grad = g.clone()
    optimizer.step()


def momentum(p: Tensor, optimizer: Lion8bit) -> Tensor:
    return dequantize(optimizer.state[p]["exp_avg"])


def uniform(low: float, high: float, shape: tuple[int, ...], device: str) -> Tensor:
    """Of both signs, with magnitudes in low ... high."""
    magnitude = torch.rand(shape, device=device) * (high - low) + low
    return torch.where(torch.rand(shape, device=device) < 0.5, -magnitude, magnitude)


# --- The formula ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantize", [True, False])
@pytest.mark.parametrize("shape", [ALIGNED, RAGGED])
def test_one_step_is_the_closed_form_in_fp64(shape: tuple[int, int], quantize: bool, device: str) -> None:
    """Report 59: large decay, tiny gradient, beta1 != beta2, momentum nonzero; fp32 weights within 1e-6 of |p|.

    Decay uses the previous weight, the update the previous momentum, as it is when decoded.
    """
    lr, weight_decay = 1e-3, 300.0
    p0, g = uniform(0.1, 10, shape, device), uniform(0, 1e-5, shape, device)
    m0 = 1e-6 * torch.randn(shape, device=device)
    p, optimizer = make(p0, m0, quantize=quantize, lr=lr, weight_decay=weight_decay, betas=BETAS)
    old_m = momentum(p, optimizer).double()
    step(p, optimizer, g)

    expected_p, expected_m = lion_reference(p0.double(), g.double(), old_m, lr, *BETAS, weight_decay)
    terms = torch.stack([BETAS[0] * old_m, (1 - BETAS[0]) * g.double()])
    decided = terms.sum(0).abs() > 4 * 2.0**-24 * terms.abs().sum(0)
    assert decided.float().mean() > 0.999
    error = (p.double() - expected_p).abs() / p0.double().abs()
    assert error[decided].max() <= 1e-6

    new_m = momentum(p, optimizer).double()
    if quantize:  # half a step of the code, at most 0.85 % of a scale that is the block's maximum
        assert ((new_m - expected_m).abs() <= 0.009 * expected_m.abs().amax(1, keepdim=True)).all()
        assert (new_m - expected_m).norm() <= 0.02 * expected_m.norm()
    else:
        assert ((new_m - expected_m).abs() <= 4 * 2.0**-24 * (old_m.abs() + g.double().abs())).all()


@pytest.mark.parametrize("quantize", [True, False])
def test_many_steps_of_unquantised_lion_are_the_reference(quantize: bool, device: str) -> None:
    """Signs follow the reference step after step: exactly in 32 bits, and in 8 bits for nearly all weights."""
    lr, weight_decay = 1e-3, 0.1
    expected_p, expected_m = torch.randn(ALIGNED, device=device).double(), torch.zeros(ALIGNED, device=device).double()
    p, optimizer = make(expected_p.float(), quantize=quantize, lr=lr, weight_decay=weight_decay, betas=BETAS)
    for _ in range(20):
        g = torch.randn(ALIGNED, device=device)
        step(p, optimizer, g)
        expected_p, expected_m = lion_reference(expected_p, g.double(), expected_m, lr, *BETAS, weight_decay)
    same_path = (p.double() - expected_p).abs() < 0.1 * lr
    assert same_path.double().mean() >= (0.8 if quantize else 0.9999)


@pytest.mark.parametrize("quantize", [True, False])
def test_decay_stays_out_of_the_sign(quantize: bool, device: str) -> None:
    """Report 58: with g = 1e-6, p = 10, wd = 0.1 a coupled decay would decide every sign."""
    lr, weight_decay = 1e-2, 0.1
    p0 = uniform(10, 11, ALIGNED, device)
    g = uniform(1e-6, 2e-6, ALIGNED, device)
    p, optimizer = make(p0, quantize=quantize, lr=lr, weight_decay=weight_decay)
    step(p, optimizer, g)
    expected = p0.double() * (1 - lr * weight_decay) - lr * g.double().sign()
    torch.testing.assert_close(p.detach().double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("quantize", [True, False])
def test_the_update_sees_the_old_momentum(quantize: bool, device: str) -> None:
    """The gradient overturns the momentum in this step, and the sign with the next one alone."""
    size = uniform(1, 2, ALIGNED, device)
    p, optimizer = make(torch.zeros(ALIGNED, device=device), size, quantize=quantize, lr=1.0, betas=(0.9, 0.5))
    step(p, optimizer, -5 * size)  # 0.9 - 0.5 > 0; with the new momentum it would be 0.9 (-2) - 0.5 < 0
    assert torch.equal(p, -size.sign())
    step(p, optimizer, torch.zeros_like(size))
    assert torch.equal(p, torch.zeros_like(size))


@pytest.mark.parametrize(("lr", "weight_decay"), [(1e-4, 1e-3), (0.1, 0.3), (0.7, 0.9)])
@pytest.mark.parametrize("quantize", [True, False])
def test_decay_is_one_rounded_subtraction(lr: float, weight_decay: float, quantize: bool, device: str) -> None:
    """Equal in every bit to fl(p - fl(c p)), with c = lr wd formed in fp64 and rounded once."""
    p0 = torch.randn(256, 128, device=device)
    p, optimizer = make(p0, quantize=quantize, lr=lr, weight_decay=weight_decay)
    step(p, optimizer, torch.zeros_like(p0))
    values = p0.cpu().numpy()
    expected = values - np.float32(lr * weight_decay) * values
    assert expected.dtype == np.float32
    assert np.array_equal(p.detach().cpu().numpy(), expected)


def test_a_decay_of_a_millionth_is_not_lost(device: str) -> None:
    """fp32 weights lose lr wd = 1e-6 of themselves within 1 %, summed over normal weights.

    ``p (1 - lr wd)`` is 1.3 % off, since fp32 has few numbers next to 1.
    """
    p0 = torch.randn(1024, 1024, device=device)
    p, optimizer = make(p0, lr=1e-3, weight_decay=1e-3)
    step(p, optimizer, torch.zeros_like(p0))
    lost = (p0.double().abs() - p.detach().double().abs()).sum() / p0.double().abs().sum()
    assert lost.item() == pytest.approx(1e-6, rel=0.01)


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_narrow_weights_are_rounded_once(dtype: torch.dtype, device: str) -> None:
    """Decay and update happen in fp32; only their result is rounded to the weight's dtype."""
    lr, weight_decay = 1e-3, 0.1
    p0 = torch.randn(ALIGNED, device=device).to(dtype)
    g = torch.randn(ALIGNED, device=device).to(dtype)
    p, optimizer = make(p0, lr=lr, weight_decay=weight_decay, stochastic_rounding=False)
    step(p, optimizer, g)
    wide = p0.float().cpu()
    wide = wide - torch.tensor(lr * weight_decay) * wide
    expected = (wide - torch.tensor(lr) * g.float().cpu().sign()).to(dtype)
    assert torch.equal(p.detach().cpu(), expected)


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_stochastic_rounding_goes_to_a_neighbour_and_is_right_on_average(dtype: torch.dtype, device: str) -> None:
    """The stored weight is one of the two values around the fp32 result, whose mean it keeps."""
    lr, n = 1e-4, 1 << 18
    p0 = torch.full((n // 64, 64), 0.1, device=device).to(dtype)
    p, optimizer = make(p0, lr=lr)
    step(p, optimizer, torch.ones_like(p0))
    exact = p0[0, 0].double() - lr
    values, counts = p.detach().unique(return_counts=True)
    assert len(values) == 2
    below, above = values.double()
    assert below < exact < above
    assert values.view(torch.int16).diff().tolist() == [1]
    up = ((exact - below) / (above - below)).item()
    assert counts[1].item() / n == pytest.approx(up, abs=5 * math.sqrt(up * (1 - up) / n))


@pytest.mark.parametrize("dtype", [torch.float32, *HALF_DTYPES])
@pytest.mark.parametrize("quantize", [True, False])
def test_maximize_is_the_negated_gradient(dtype: torch.dtype, quantize: bool, device: str) -> None:
    """All bits of weights and momentum are those of minimising with -g."""
    p0 = torch.randn(ALIGNED, device=device).to(dtype)
    up, ascent = make(p0, quantize=quantize, lr=1e-2, weight_decay=0.1, maximize=True)
    down, descent = make(p0, quantize=quantize, lr=1e-2, weight_decay=0.1)
    for _ in range(5):
        g = torch.randn(ALIGNED, device=device).to(dtype)
        step(up, ascent, g)
        step(down, descent, -g)
    assert torch.equal(up, down)
    assert torch.equal(momentum(up, ascent), momentum(down, descent))


# --- What users have met elsewhere ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weight_dtype", "grad_dtype"),
    [(torch.float32, d) for d in (torch.float32, *HALF_DTYPES)] + [(d, d) for d in HALF_DTYPES],
)
@pytest.mark.parametrize("columns", [32, 1024, 4097])
def test_bitsandbytes_protocol(
    columns: int, weight_dtype: torch.dtype, grad_dtype: torch.dtype, device: str, mode: str
) -> None:
    """50 steps beside fp32 Lion, weights made equal after each: few updates differ, and by little on average.

    Harder than bitsandbytes' own test in that the reference keeps its fp32 momentum. All 1024 rows where that is fast.
    """
    is_fast = mode == "compiled" and (device == "cuda" or grad_dtype == torch.float32)
    lr, rows, steps = 1e-4, (1024 if is_fast else 16), 50
    is_wide = weight_dtype == torch.float32
    expected_p = (0.1 * torch.randn(rows, columns, device=device)).to(weight_dtype).float()
    expected_m = torch.zeros_like(expected_p)
    p, optimizer = make(expected_p.to(weight_dtype), lr=lr, weight_decay=0.1)
    p.grad_dtype = grad_dtype
    grads = (0.01 * torch.randn(rows + steps, columns, device=device)).to(grad_dtype)
    for i in range(steps):
        g = grads[i : i + rows]
        step(p, optimizer, g)
        expected_p, expected_m = lion_reference(expected_p, g.float(), expected_m, lr, *BETAS, 0.1)
        error = (p.detach().float() - expected_p).abs()
        assert error.mean() < (1.7e-4 if weight_dtype == torch.bfloat16 else 6e-5)
        if is_wide:
            assert (error > lr).float().mean() <= 0.02
        expected_p = expected_p.to(weight_dtype).float()
        with torch.no_grad():
            p.copy_(expected_p)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("quantize", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bad_gradient_element_harms_itself_alone(dtype: torch.dtype, quantize: bool, bad: float, device: str) -> None:
    """Report 65: one NaN or infinite element; 10 clean steps later all else is as if it had been masked.

    The weight moves as in fp32 Lion (not at all by NaN, by lr against an infinity), and the state stays finite.
    """
    lr, where = 2.0**-7, (3, 70)
    p0 = torch.ones(RAGGED, device=device, dtype=dtype)
    hit, hit_optimizer = make(p0, quantize=quantize, lr=lr)
    masked, masked_optimizer = make(p0, quantize=quantize, lr=lr)
    for i in range(14):
        g = torch.randn(RAGGED, device=device).to(dtype)
        if i == 3:
            g[where] = 0
            before = hit.detach().clone()
        step(masked, masked_optimizer, g)
        if i == 3:
            g[where] = bad
        step(hit, hit_optimizer, g)
        if i == 3:
            moved = (hit - before)[where].item()
            assert moved == (0 if math.isnan(bad) else -math.copysign(lr, bad))
    elsewhere = torch.ones(RAGGED, dtype=torch.bool, device=device)
    elsewhere[where] = False
    assert torch.equal(hit[elsewhere], masked[elsewhere])
    assert hit.isfinite().all()
    assert momentum(hit, hit_optimizer).isfinite().all()
    assert torch.equal(momentum(hit, hit_optimizer), momentum(masked, masked_optimizer))


def test_small_updates_of_bf16_weights_count(device: str) -> None:
    """Report 70: weights at 1.0, 1000 steps of 1e-4: rounded to nearest they stay, stochastically they reach 0.9."""
    p0 = torch.ones(128, 64, device=device, dtype=torch.bfloat16)
    stuck, nearest = make(p0, lr=1e-4, stochastic_rounding=False)
    moving, stochastic = make(p0, lr=1e-4)
    for _ in range(1000):
        step(stuck, nearest, torch.ones_like(p0))
        step(moving, stochastic, torch.ones_like(p0))
    assert torch.equal(stuck, p0)
    assert moving.double().mean().item() == pytest.approx(0.9, abs=1e-3)
    assert 0 < moving.double().std() < 0.05  # elements are rounded apart from each other


def test_momentum_of_a_bf16_bias_reaches_a_small_gradient(device: str) -> None:
    """Report 69: momentum that inherits bf16 from its parameter stalls below the gradient it averages."""
    p, optimizer = make(torch.zeros(10, device=device, dtype=torch.bfloat16), lr=1e-4)
    g = torch.full((10,), 1e-3, device=device, dtype=torch.bfloat16)
    for _ in range(1000):
        step(p, optimizer, g)
    exp_avg = optimizer.state[p]["exp_avg"]
    assert exp_avg.dtype == torch.float32
    torch.testing.assert_close(exp_avg, g.float(), rtol=1e-4, atol=0)
