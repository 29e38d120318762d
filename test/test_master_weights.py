"""Weights of 24 and 32 bits: 16 in the model, 8 or 16 in the optimizer's state."""

import copy
import io
import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from reference import nearest_weight, ulp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from lowbit_optim import Lion8bit, codec
from lowbit_optim.checkpoint import float_state_dict
from lowbit_optim.subclasses.blockwise import dequantize

LOW_DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
BITS = pytest.mark.parametrize("bits", [24, 32])
INTEGERS = {torch.int8: torch.int8, torch.int16: torch.int16, torch.bfloat16: torch.int16, torch.float16: torch.int16}


@pytest.fixture(autouse=True)
def _eager() -> Iterator[None]:
    """test_compiled.py and test/fused hold the other steps to this one."""
    with torch.compiler.set_stance("force_eager"):
        yield


# --- Split and merge ------------------------------------------------------------------------------------------------

CHUNK = 2**25
LOWER_HALVES = [
    0,
    1,
    2,
    0x10,
    0x11,
    0x7F,
    0x80,
    0x81,
    0xFF,
    0x100,
    0xFFF,
    0x1000,
    0x1001,
    0x1FFF,
    0x2000,
    0x7F7F,
    0x7F80,
]
LOWER_HALVES += [0x7FFF, 0x8000, 0x8001, 0x807F, 0x8080, 0x8081, 0xF000, 0xFF7F, 0xFF80, 0xFF81, 0xFFFE, 0xFFFF]


def patterns(device: str) -> Iterator[Tensor]:
    """fp32 of all 2**32 bit patterns; on a CPU, where that takes minutes, of all upper halves and some lower ones."""
    if device == "cuda":
        for first in range(-(2**31), 2**31, CHUNK):
            yield torch.arange(first, first + CHUNK, dtype=torch.int32, device=device).view(torch.float32)
    else:
        upper = torch.arange(-(2**15), 2**15, dtype=torch.int32).unsqueeze(1) << 16
        lower = torch.cat([torch.tensor(LOWER_HALVES), torch.randint(0, 2**16, (19,))]).to(torch.int32)
        for part in (upper | lower).flatten().split(2**20):
            yield part.view(torch.float32)


def allowed_error(x: Tensor, dtype: torch.dtype, bits: int) -> Tensor:
    """What the docstring of ``split_weight`` says, below where it saturates."""
    half_of_last = ulp(x, dtype) / 2**9 if bits == 24 else 0.0
    return half_of_last + torch.where(x.abs() < 2.0**-14, 2.0**-38 if dtype == torch.float16 else 0.0, 0.0)


def faults(x: Tensor, dtype: torch.dtype, bits: int) -> dict[str, Tensor]:
    """Where splitting ``x`` and merging it again does not keep what is promised."""
    weight, residual = codec.split_weight(x, dtype, bits)
    merged = codec.merge_weight(weight, residual)
    finite = x.isfinite()
    exact, master = (torch.where(finite, each, 0.0).double() for each in (x, merged))
    largest = codec.MAX_MASTER[dtype, bits]
    error = (master - exact.clamp(-largest, largest)).abs()
    rounded = nearest_weight(master, dtype)
    overflow = 2.0**128 if dtype == torch.bfloat16 else 2.0**16
    rounded = torch.where(rounded.abs() >= overflow, rounded * math.inf, rounded)
    kept = (residual == 0) & same_number(merged, x) & same_number(weight.float(), x)
    return {
        "what is not finite": ~finite & ~kept,
        "what is finite": finite & ~merged.isfinite(),
        "error": ~(error <= allowed_error(exact, dtype, bits)),
        "sign": finite & (merged.signbit() != x.signbit()),
        "weight": finite & (weight.double() != rounded),
    }


def same_number(a: Tensor, b: Tensor) -> Tensor:
    return (a == b) | (a.isnan() & b.isnan())


@LOW_DTYPES
@BITS
def test_split_and_merge_over_all_patterns(dtype: torch.dtype, bits: int, device: str) -> None:
    total, count = dict.fromkeys(faults(torch.zeros(1), dtype, bits), 0), 0
    for x in patterns(device):
        count += x.numel()
        for name, wrong in faults(x, dtype, bits).items():
            total[name] += int(wrong.sum())
    print(f"{dtype}, {bits} bits, {count:,} patterns: {total}")
    assert total == dict.fromkeys(total, 0)


def test_32_bits_of_bfloat16_are_the_float_itself(device: str) -> None:
    """Infinite weights of finite masters included."""
    for x in patterns(device):
        merged = codec.merge_weight(*codec.split_weight(x, torch.bfloat16, 32))
        same = merged.view(torch.int32) == x.view(torch.int32)
        assert (same | x.isnan()).all()


@LOW_DTYPES
def test_the_largest_masters(dtype: torch.dtype) -> None:
    """By their bits, as they are documented."""
    expected = {torch.bfloat16: (0x7F7FFF00, 0x7F7FFFFF), torch.float16: (0x477FEFE0, 0x477FEFFF)}[dtype]
    for bits, largest in zip((24, 32), expected, strict=True):
        x = torch.tensor([codec.MAX_MASTER[dtype, bits], 3e38, torch.finfo(torch.float32).max])
        assert x[0].view(torch.int32) == largest
        merged = codec.merge_weight(*codec.split_weight(torch.cat([x, -x]), dtype, bits))
        top = x[0].item() if dtype == torch.float16 else merged[1].item()
        assert merged.tolist() == [x[0].item(), top, x[0].item(), -x[0].item(), -top, -x[0].item()]


@LOW_DTYPES
def test_24_bits_rounded_stochastically(dtype: torch.dtype, device: str) -> None:
    """Up with the probability of the fraction that is cut off: over the values that noise has, exactly."""
    dropped = {torch.bfloat16: 8, torch.float16: 5}[dtype]
    first = 2.0**-14 if dtype == torch.float16 else 2.0**-126
    x = (torch.rand(300, device=device) + 1) * torch.logspace(math.log10(first), 4, 300, device=device)
    x = torch.cat([x, -x])
    step = ulp(x, dtype) / 256
    below = (x.double().abs() / step).floor()
    ups = torch.zeros_like(below)
    for noise in range(2**dropped):
        noises = torch.full(x.shape, noise << (16 - dropped) | 1, dtype=torch.int32, device=device)
        steps = codec.merge_weight(*codec.split_weight(x, dtype, 24, noises)).double().abs() / step
        assert ((steps == below) | (steps == below + 1)).all()
        ups += steps - below
    assert torch.equal(ups / 2**dropped, x.double().abs() / step - below)


@LOW_DTYPES
def test_noise_does_not_reach_32_bits_infinity_or_nan(dtype: torch.dtype) -> None:
    x = torch.tensor([1.2345678, -1e-6, math.inf, -math.inf, math.nan])
    for noise in (0, 0x8000, 0xFFFF):
        noises = torch.full(x.shape, noise, dtype=torch.int32)
        for a, b in zip(codec.split_weight(x, dtype, 32, noises), codec.split_weight(x, dtype, 32), strict=True):
            assert torch.equal(a.nan_to_num(7), b.nan_to_num(7))
        weight, residual = codec.split_weight(x, dtype, 24, noises)
        assert weight[2:4].tolist() == [math.inf, -math.inf]
        assert weight[4].isnan()
        assert residual[2:].tolist() == [0, 0, 0]


@LOW_DTYPES
@BITS
def test_a_weight_that_was_set_to_zero_is_about_zero(dtype: torch.dtype, bits: int) -> None:
    """Pruning writes weights and knows of no residual; bfloat16's bits of zero less a residual would be a NaN."""
    limits = torch.iinfo(codec.RESIDUAL_DTYPES[bits])
    residual = torch.arange(limits.min, limits.max + 1).to(codec.RESIDUAL_DTYPES[bits])
    for zero in (0.0, -0.0):
        merged = codec.merge_weight(torch.full(residual.shape, zero, dtype=dtype), residual)
        assert (merged.abs() <= ulp(torch.zeros(1), dtype).float() / 2).all()


# --- Training -------------------------------------------------------------------------------------------------------


class Classifier(nn.Module):
    """Aligned rows, ragged rows and small tensors, some tied."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 64)
        self.hidden = nn.Linear(64, 75)
        self.back = nn.Linear(75, 64)
        self.norm = nn.LayerNorm(64)
        self.head = nn.Linear(64, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        return self.head(self.norm(x + self.back(self.hidden(x).relu())))


def classifier(dtype: torch.dtype = torch.bfloat16) -> Classifier:
    torch.manual_seed(0)
    return Classifier().to(dtype)


def backward(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 50, (16,), generator=generator)
    model.zero_grad()
    nn.functional.cross_entropy(model(tokens).float(), (tokens * 7 + 3) % 50).backward()


def bits_of(x: Tensor) -> Tensor:
    return x.detach().view(INTEGERS.get(x.dtype, torch.int32))


def masters(optimizer: Lion8bit) -> list[Tensor]:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return [codec.merge_weight(p.detach(), optimizer.state[p]["master_residual"]) for p in params]


OPTIONS = {"lr": 1e-3, "weight_decay": 0.1, "min_quantized_numel": 0}


@pytest.mark.parametrize("quantize", [True, False])
def test_32_bits_are_fp32_weights_whose_rounding_the_model_sees(quantize: bool) -> None:
    """In every bit, over 200 steps; the rounding is to nearest, ties away from zero."""
    model = classifier()
    optimizer = Lion8bit(model.parameters(), master_weight_bits=32, quantize=quantize, **OPTIONS)
    shadow = classifier()
    weights = [nn.Parameter(p.detach().float()) for p in shadow.parameters()]
    reference = Lion8bit(weights, quantize=quantize, **OPTIONS)
    for step in range(200):
        backward(model, step)
        optimizer.step()
        with torch.no_grad():
            for p, weight in zip(shadow.parameters(), weights, strict=True):
                p.copy_(nearest_weight(weight, torch.bfloat16))
        backward(shadow, step)
        for p, weight in zip(shadow.parameters(), weights, strict=True):
            weight.grad = p.grad.float()
        reference.step()
    assert step == 199
    for master, weight in zip(masters(optimizer), weights, strict=True):
        assert torch.equal(master.view(torch.int32), bits_of(weight))
    for p, weight in zip(model.parameters(), weights, strict=True):
        assert torch.equal(p.double(), nearest_weight(weight.detach(), torch.bfloat16))
        assert not torch.equal(weight, p.float())


LR_TIMES_DECAY = 1e-6
DECAY_STEPS = 500


def decay_applied(bits: int | None, stochastic_rounding: bool) -> float:
    """Of what exact arithmetic would have taken off in 500 steps, over so many weights that noise makes 0.3 % at most.

    Compiled, since that many take a minute one operation at a time.
    """
    p = nn.Parameter(torch.randn(2**22 if stochastic_rounding and bits is None else 2**17).to(torch.bfloat16))
    optimizer = Lion8bit(
        [p], lr=1e-5, weight_decay=0.1, master_weight_bits=bits, stochastic_rounding=stochastic_rounding
    )
    before = p.detach().double()
    p.grad = torch.zeros_like(p)
    with torch.compiler.set_stance("default"):
        for _ in range(DECAY_STEPS):
            optimizer.step()
    after = (masters(optimizer)[0] if bits else p.detach()).double()
    lost = ((before - after) * before).sum() / before.square().sum()
    return (lost / (1 - (1 - LR_TIMES_DECAY) ** DECAY_STEPS)).item()


@pytest.mark.compiler
@pytest.mark.parametrize(("bits", "stochastic_rounding"), [(None, True), (24, True), (32, True), (32, False)])
def test_weight_decay_is_applied(bits: int | None, stochastic_rounding: bool) -> None:
    """Within 1 % at lr * weight_decay = 1e-6."""
    assert abs(decay_applied(bits, stochastic_rounding) - 1) < 0.01


@pytest.mark.compiler
@pytest.mark.parametrize("bits", [None, 24])
def test_rounded_to_nearest_it_is_lost(bits: int | None) -> None:
    """What stochastic rounding, the default, is for."""
    assert decay_applied(bits, False) < 0.01


# --- State ----------------------------------------------------------------------------------------------------------


@BITS
def test_what_has_a_residual(bits: int) -> None:
    params = [nn.Parameter(torch.ones(8, 64, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16, torch.float16)]
    plain = nn.Parameter(torch.ones(8, 64, dtype=torch.bfloat16))
    groups = [{"params": params, "master_weight_bits": bits}, {"params": [plain]}]
    optimizer = Lion8bit(groups, lr=1e-3, min_quantized_numel=0)
    for p in [*params, plain]:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert ["master_residual" in optimizer.state[p] for p in [*params, plain]] == [False, True, True, False]
    for p in params[1:]:
        residual = optimizer.state[p]["master_residual"]
        assert (residual.shape, residual.dtype) == (p.shape, {24: torch.int8, 32: torch.int16}[bits])


@pytest.mark.parametrize(("bits", "limit"), [(None, 1.04), (24, 2.04), (32, 3.04)])
def test_bytes_of_state(bits: int | None, limit: float) -> None:
    p = nn.Parameter(torch.ones(1024, 1024, dtype=torch.bfloat16))
    optimizer = Lion8bit([p], lr=1e-3, master_weight_bits=bits)
    p.grad = torch.ones_like(p)
    optimizer.step()
    state = optimizer.state[p]
    tensors = [state["exp_avg"].codes, state["exp_avg"].scale, *([state["master_residual"]] if bits else [])]
    assert sum(t.numel() * t.element_size() for t in tensors) / p.numel() <= limit


@BITS
def test_a_learning_rate_of_zero_changes_nothing(bits: int) -> None:
    model = classifier()
    model.norm.weight.data[:2] = math.inf
    optimizer = Lion8bit(model.parameters(), master_weight_bits=bits, **OPTIONS)
    backward(model, 0)
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.0
    model.hidden.weight.data[0] = 0.0  # with residuals of both signs, which a step would make 0 where they are negative
    before = [bits_of(p).clone() for p in model.parameters()]
    fine = [residual.clone() for residual in residuals(optimizer)]
    backward(model, 1)
    optimizer.step()
    for p, expected in zip(model.parameters(), before, strict=True):
        assert torch.equal(bits_of(p), expected)
    for residual, expected in zip(residuals(optimizer), fine, strict=True):
        assert torch.equal(residual, expected)


def test_weights_changed_to_float32_are_refused() -> None:
    """What to do instead is in the error."""
    model = classifier()
    optimizer = Lion8bit(model.parameters(), master_weight_bits=24, **OPTIONS)
    backward(model, 0)
    optimizer.step()
    model.float()
    backward(model, 1)
    with pytest.raises(RuntimeError, match=r"parameter 0 of shape \(50, 64\) was changed to float32.*fp32_state_dict"):
        optimizer.step()


@pytest.mark.parametrize("changed", ["parameters", "option"])
def test_weights_without_a_residual_are_not_trained_as_if_there_were_one(changed: str) -> None:
    """After what the error says to do, they are master weights that start where they were."""
    model = classifier()
    model = model.float() if changed == "parameters" else model
    bits = 32 if changed == "parameters" else None
    optimizer = Lion8bit(model.parameters(), master_weight_bits=bits, **OPTIONS)
    backward(model, 0)
    optimizer.step()
    model.bfloat16()
    optimizer.param_groups[0]["master_weight_bits"] = 32
    optimizer.zero_grad()
    backward(model, 1)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match=r"parameter 0 .* master_weight_bits=32.*load_state_dict"):
        optimizer.step()
    assert all(map(torch.equal, model.parameters(), before))
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()
    masters = [codec.merge_weight(p.detach(), optimizer.state[p]["master_residual"]) for p in model.parameters()]
    assert any(not torch.equal(master, p) for master, p in zip(masters, model.parameters(), strict=True))


@BITS
def test_memory_layout_does_not_matter(bits: int) -> None:
    results = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        p = nn.Parameter(torch.randn(8, 16, 3, 3).to(torch.bfloat16).to(memory_format=memory_format))
        optimizer = Lion8bit([p], master_weight_bits=bits, **OPTIONS)
        for _ in range(3):
            p.grad = torch.randn(p.shape).to(torch.bfloat16)
            optimizer.step()
        results.append([p.detach().contiguous(), optimizer.state[p]["master_residual"]])
    for one, other in itertools.zip_longest(*results):
        assert torch.equal(one, other)


# --- Checkpoints ----------------------------------------------------------------------------------------------------


def trained(
    bits: int | None, steps: int = 5, dtype: torch.dtype = torch.bfloat16, **options
) -> tuple[nn.Module, Lion8bit]:
    model = classifier(dtype)
    optimizer = Lion8bit(model.named_parameters(), master_weight_bits=bits, **{**OPTIONS, **options})
    go_on(model, optimizer, 0, steps)
    return model, optimizer


def go_on(model: nn.Module, optimizer: Lion8bit, first: int, last: int) -> None:
    for step in range(first, last):
        backward(model, step)
        optimizer.step()


def residuals(optimizer: Lion8bit) -> list[Tensor]:
    return [state["master_residual"] for state in optimizer.state.values()]


def loaded(bits: int | None, model: nn.Module, optimizer: Lion8bit) -> tuple[nn.Module, Lion8bit]:
    """A model and an optimizer that went on from those, by way of a file."""
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    saved = torch.load(file)
    new = classifier(next(model.parameters()).dtype)
    new.load_state_dict(saved["model"])
    new_optimizer = Lion8bit(new.named_parameters(), master_weight_bits=bits, **OPTIONS)
    new_optimizer.load_state_dict(saved["optimizer"])
    return new, new_optimizer


@BITS
@LOW_DTYPES
def test_resuming_equals_not_stopping(dtype: torch.dtype, bits: int) -> None:
    model, optimizer = trained(bits, dtype=dtype)
    new, new_optimizer = loaded(bits, model, optimizer)
    go_on(model, optimizer, 5, 10)
    go_on(new, new_optimizer, 5, 10)
    for a, b in zip(model.parameters(), new.parameters(), strict=True):
        assert torch.equal(bits_of(a), bits_of(b))
    for a, b in zip(residuals(optimizer), residuals(new_optimizer), strict=True):
        assert torch.equal(a, b)


@BITS
def test_what_is_saved_of_a_residual(bits: int) -> None:
    """Of two bytes each by itself, which every backend sends from rank to rank."""
    model, optimizer = trained(bits)
    saved = optimizer.state_dict()["state"]
    for i, (p, residual) in enumerate(zip(model.parameters(), residuals(optimizer), strict=True)):
        [(key, x)] = saved[i]["master_residual"].items()
        assert type(x) is Tensor
        assert (key, x.dtype, x.shape) == {
            24: ("int8", torch.int8, p.shape),
            32: ("int16", torch.uint8, (*p.shape, 2)),
        }[bits]
        assert torch.equal(x.view(residual.dtype).view(p.shape), residual)
        assert residual.any()


def test_from_24_to_32_bits_nothing_is_lost() -> None:
    model, optimizer = trained(24)
    _, wider = loaded(32, model, optimizer)
    for a, b in zip(masters(optimizer), masters(wider), strict=True):
        assert torch.equal(a, b)
    for residual in residuals(wider):
        assert residual.dtype == torch.int16


def test_from_32_to_24_bits_the_weights_stay_and_the_rest_is_rounded() -> None:
    model, optimizer = trained(32)
    new, narrower = loaded(24, model, optimizer)
    for p, q in zip(model.parameters(), new.parameters(), strict=True):
        assert torch.equal(p, q)
    for fine, coarse in zip(residuals(optimizer), residuals(narrower), strict=True):
        assert coarse.dtype == torch.int8
        nearest = torch.sign(fine) * ((fine.double().abs() / 256 + 0.5).floor())
        tie_below = (fine.double() / 256 % 1 == 0.5) & (fine < 0)
        assert torch.equal(coarse.double(), (nearest + tie_below).clamp(max=127))


def test_a_checkpoint_without_residuals_starts_at_the_weights() -> None:
    model, optimizer = trained(None)
    _, new_optimizer = loaded(32, model, optimizer)
    for p, master in zip(model.parameters(), masters(new_optimizer), strict=True):
        assert torch.equal(master, p.float())


def test_an_optimizer_without_residuals_drops_them_with_one_warning() -> None:
    model, optimizer = trained(24)
    with pytest.warns(UserWarning, match=r"master_residual was not read.*fp32_state_dict") as warned:
        new, new_optimizer = loaded(None, model, optimizer)
    assert [warning.filename for warning in warned] == [__file__]
    assert all(set(state) == {"exp_avg"} for state in new_optimizer.state.values())
    go_on(new, new_optimizer, 5, 6)
    assert all(set(state) == {"exp_avg"} for state in float_state_dict(optimizer)["state"].values())


DAMAGED = {
    "of another dtype": (lambda r: {"int8": r["int8"].short()}, TypeError, "is torch.int16; allowed: torch.int8"),
    "of another shape": (lambda r: {"int8": r["int8"][:-1]}, ValueError, r"has shape \(74, 64\), not \(75, 64\)"),
    "of another key": (lambda r: {"int16": r["int8"]}, TypeError, "is torch.int8; allowed: torch.uint8"),
    "both": (lambda r: {"int16": r["int8"], **r}, ValueError, "is a dict of int16, int8, not a dict of either"),
    "empty": (lambda r: {}, ValueError, "is a dict of nothing"),
    "bare": (lambda r: r["int8"], ValueError, "is Tensor, not a dict of either int8 or int16"),
    "no tensor": (lambda r: {"int8": None}, TypeError, "is NoneType, not a tensor"),
}


@pytest.mark.parametrize(("damage", "error", "message"), DAMAGED.values(), ids=DAMAGED.keys())
def test_a_damaged_residual_is_refused_by_name(damage, error: type[Exception], message: str) -> None:
    _, optimizer = trained(24)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][1]["master_residual"] = damage(saved["state"][1]["master_residual"])
    before = [residual.clone() for residual in residuals(optimizer)]
    with pytest.raises(error, match=f"parameter 'hidden.weight': master_residual {message}"):
        optimizer.load_state_dict(saved)
    for a, b in zip(residuals(optimizer), before, strict=True):
        assert torch.equal(a, b)


# --- fp32 state dicts -----------------------------------------------------------------------------------------------


class Mixed(Classifier):
    """With buffers, and weights that the optimizer has no bits of: in fp32, frozen, or another optimizer's."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.rand(7, dtype=torch.bfloat16))
        self.register_buffer("count", torch.tensor(3))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.other = nn.Parameter(torch.randn(3))


def mixed(bits: int, steps: int = 3, dtype: torch.dtype = torch.bfloat16) -> tuple[Mixed, Lion8bit]:
    torch.manual_seed(0)
    model = Mixed().to(dtype)
    model.norm.float()
    params = [p for name, p in model.named_parameters() if name != "other"]
    optimizer = Lion8bit(params, master_weight_bits=bits, **OPTIONS)
    for step in range(steps):
        set_gradients(model, step)
        optimizer.step()
    return model, optimizer


def set_gradients(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for p in model.parameters():
        if p.requires_grad:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


@BITS
@LOW_DTYPES
def test_an_fp32_state_dict(dtype: torch.dtype, bits: int) -> None:
    model, optimizer = mixed(bits, dtype=dtype)
    state = optimizer.fp32_state_dict(model)
    assert list(state) == list(model.state_dict())
    assert {key: value.dtype for key, value in state.items() if value.dtype != torch.float32} == {
        "mean": dtype,
        "count": torch.int64,
    }
    for name, p in model.named_parameters():
        residual = optimizer.state.get(p, {}).get("master_residual")
        assert (residual is None) == (name in ("norm.weight", "norm.bias", "frozen", "other"))
        assert torch.equal(state[name], p.float() if residual is None else codec.merge_weight(p.detach(), residual))
        assert residual is None or not torch.equal(state[name], p)
        assert not state[name].requires_grad
    assert state["head.weight"] is state["embedding.weight"]
    assert torch.equal(state["mean"], model.mean)


@BITS
@LOW_DTYPES
@pytest.mark.parametrize("steps", [0, 2])
def test_an_fp32_state_dict_comes_back(dtype: torch.dtype, bits: int, steps: int) -> None:
    """Before the first step, too; and from fp32 weights of any origin, rounded to what there are bits for."""
    model, optimizer = mixed(bits, dtype=dtype)
    state = copy.deepcopy(optimizer.fp32_state_dict(model))
    new, new_optimizer = mixed(bits, steps, dtype)
    new_optimizer.load_fp32_state_dict(new, state)
    for (name, value), p in zip(model.state_dict().items(), new.state_dict().values(), strict=True):
        assert torch.equal(value, p), name
    for key, value in new_optimizer.fp32_state_dict(new).items():
        assert torch.equal(value, state[key]), key

    anything = {key: torch.randn_like(value.float()).to(value.dtype) for key, value in state.items()}
    anything["head.weight"] = anything["embedding.weight"]
    new_optimizer.load_fp32_state_dict(new, anything)
    found = new_optimizer.fp32_state_dict(new)
    for key in ("embedding.weight", "hidden.bias", "back.weight"):
        weight, residual = codec.split_weight(anything[key], dtype, bits)
        assert torch.equal(new.state_dict()[key], weight)
        assert torch.equal(found[key], codec.merge_weight(weight, residual))
    for key in ("frozen", "other", "mean"):
        assert torch.equal(new.state_dict()[key], anything[key].to(dtype))
    assert torch.equal(new.norm.weight, anything["norm.weight"])
    set_gradients(new, 0)
    new_optimizer.step()


@pytest.mark.parametrize("flatten", [False, True])
def test_after_fp32_weights_torchs_state_dicts_lose_no_momentum(flatten: bool) -> None:
    """They take it that all parameters have state as soon as one has, which only some groups need for a residual."""

    def make() -> tuple[nn.Module, Lion8bit]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).bfloat16()
        groups = [
            {"params": list(model[0].parameters()), "master_weight_bits": 24},
            {"params": list(model[1].parameters())},
        ]
        return model, Lion8bit(groups, lr=1e-2)

    model, optimizer = make()
    set_gradients(model, 0)
    optimizer.step()
    optimizer.zero_grad()
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    saved = get_optimizer_state_dict(model, optimizer, options=options)
    new, new_optimizer = make()
    new_optimizer.load_fp32_state_dict(new, optimizer.fp32_state_dict(model))
    set_optimizer_state_dict(new, new_optimizer, saved, options=options)
    for p, q in zip(model.parameters(), new.parameters(), strict=True):
        momentum, expected = new_optimizer.state[q]["exp_avg"], optimizer.state[p]["exp_avg"]
        assert torch.equal(dequantize(momentum), dequantize(expected))
        assert dequantize(expected).any()


def test_a_tied_weight_may_be_loaded_under_one_name() -> None:
    """As safetensors has it."""
    model, optimizer = mixed(24)
    state = copy.deepcopy(optimizer.fp32_state_dict(model))
    expected = state["embedding.weight"].clone()
    del state["head.weight"]
    model.head.weight.data.zero_()
    optimizer.load_fp32_state_dict(model, state)
    assert torch.equal(optimizer.fp32_state_dict(model)["head.weight"], expected)


def _drop(state: dict, *keys: str) -> None:
    for key in keys:
        del state[key]


UNFIT = {
    "missing": (lambda s: _drop(s, "hidden.bias"), ValueError, "lacks 'hidden.bias'"),
    "tied and missing": (lambda s: _drop(s, "head.weight", "embedding.weight"), ValueError, "'embedding.weight' and 1"),
    "unexpected": (lambda s: s.update(x=torch.ones(1)), ValueError, "the model has no 'x'"),
    "shape": (lambda s: s.update({"back.bias": torch.ones(63)}), ValueError, r"'back.bias' has shape \(63,\).*\(64,\)"),
    "shape of a buffer": (lambda s: s.update(mean=torch.ones(6)), ValueError, r"'mean' has shape \(6,\)"),
    "dtype": (lambda s: s.update(other=torch.ones(3).int()), TypeError, "'other' is torch.int32"),
    "no data": (lambda s: s.update(other=torch.ones(3, device="meta")), TypeError, "'other' is on the meta device"),
    "sparse": (lambda s: s.update(other=torch.ones(3).to_sparse()), TypeError, "'other' is torch.sparse_coo"),
    "no tensor": (lambda s: s.update(other=[1.0]), TypeError, "'other' is list"),
}


@pytest.mark.parametrize(("change", "error", "message"), UNFIT.values(), ids=UNFIT.keys())
def test_weights_that_do_not_fit_are_refused_and_change_nothing(change, error: type[Exception], message: str) -> None:
    model, optimizer = mixed(24)
    state = {key: value * 2 for key, value in optimizer.fp32_state_dict(model).items()}
    change(state)
    before = copy.deepcopy(model.state_dict())
    fine = [each.get("master_residual", torch.zeros(0)).clone() for each in optimizer.state.values()]
    with pytest.raises(error, match=f"{message}.*Load what optimizer.fp32_state_dict gave"):
        optimizer.load_fp32_state_dict(model, state)
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])
    for each, expected in zip(optimizer.state.values(), fine, strict=True):
        assert torch.equal(each.get("master_residual", torch.zeros(0)), expected)


# --- Weights that stall ---------------------------------------------------------------------------------------------


def a_step_moves(p: Tensor, lr: float, **options) -> float:
    """The share of weights that some of 64 steps up or down, each from the start, changed."""
    moved = torch.zeros(p.shape, dtype=torch.bool)
    for seed, sign in itertools.product(range(64 if options["stochastic_rounding"] else 1), (-1.0, 1.0)):
        q = nn.Parameter(p.detach().clone())
        optimizer = Lion8bit([q], lr=lr, seed=seed, **options)
        q.grad = torch.full_like(q, sign)
        optimizer.step()
        moved |= (q != p).detach()
        if "master_residual" in optimizer.state[q]:
            moved |= optimizer.state[q]["master_residual"] != 0
    return moved.float().mean().item()


@pytest.mark.parametrize("bits", [None, 24, 32])
@pytest.mark.parametrize("stochastic_rounding", [True, False])
@LOW_DTYPES
def test_the_stalled_fraction_is_what_steps_do_not_move(
    dtype: torch.dtype, stochastic_rounding: bool, bits: int | None
) -> None:
    """Magnitudes from 1e-6 to 1e4. With noise, of which there are 64 draws, the rarest moves are not seen."""
    options = {"stochastic_rounding": stochastic_rounding, "master_weight_bits": bits}
    p = nn.Parameter((10 ** (torch.rand(2000) * 10 - 6) * torch.randn(2000).sign()).clamp(-6e4, 6e4).to(dtype))
    for lr in (1e-2, 1e-5):
        stalled = Lion8bit([p], lr=lr, **options).stalled_fraction()
        unmoved = 1 - a_step_moves(p, lr, **options)
        assert unmoved == pytest.approx(stalled, abs=0.5 if stochastic_rounding and bits != 32 else 1e-6)
        assert stalled <= unmoved + 1e-6


def test_the_stalled_fraction_of_formats() -> None:
    """bfloat16 weights around 1 are 2**-7 apart, and half of that above and a quarter of that below 1 moves them."""
    ones = nn.Parameter(torch.ones(100, dtype=torch.bfloat16))
    expected = {(None, False): 2.0**-9, (24, False): 2.0**-17, (None, True): 2.0**-25, (24, True): 2.0**-25}
    expected |= {(32, True): 2.0**-25, (32, False): 2.0**-25}
    for (bits, rounding), smallest in expected.items():
        for lr, stalled in [(smallest * 0.99, 1.0), (smallest * 1.01, 0.0)]:
            optimizer = Lion8bit([ones], lr=lr, master_weight_bits=bits, stochastic_rounding=rounding)
            assert optimizer.stalled_fraction() == stalled, (bits, rounding, lr)


def test_the_stalled_fraction_of_groups() -> None:
    """fp32 and frozen weights do not count, and what is looked at stays as it is."""
    ones, frozen = (nn.Parameter(torch.ones(300, dtype=torch.bfloat16)) for _ in range(2))
    frozen.requires_grad_(False)
    small = nn.Parameter(torch.full((100,), 1e-3, dtype=torch.bfloat16))
    full = nn.Parameter(torch.ones(500))
    groups = [{"params": [ones, frozen, full]}, {"params": [small]}, {"params": [nn.Parameter(torch.ones(1))]}]
    optimizer = Lion8bit(groups, lr=1e-4, stochastic_rounding=False)
    assert optimizer.stalled_fraction() == 0.75
    assert [optimizer.stalled_fraction(group) for group in range(3)] == [1.0, 0.0, 0.0]
    for group in (3, -1):
        with pytest.raises(IndexError, match=rf"group={group}; parameter groups are numbered 0 \.\.\. 2"):
            optimizer.stalled_fraction(group)
    assert (ones == 1).all()


def test_the_stalled_fraction_needs_no_momentum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first step, there is none in memory."""
    monkeypatch.setattr(Lion8bit, "_new_momentum", lambda *args: pytest.fail("a momentum was made"))
    optimizer = Lion8bit([nn.Parameter(torch.ones(64, 128, dtype=torch.bfloat16))], lr=1e-6, master_weight_bits=24)
    assert optimizer.stalled_fraction() == 0.0
    assert not optimizer.state


def test_the_stalled_fraction_is_counted_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    p = nn.Parameter(torch.cat([torch.ones(70), torch.full((30,), 1e-3)]).to(torch.bfloat16))
    for bits in (None, 24):
        optimizer = Lion8bit([p], lr=1e-4 if bits is None else 1e-6, stochastic_rounding=False, master_weight_bits=bits)
        optimizer.load_fp32_state_dict(nn.ParameterDict({"p": p}), {"p": p.detach().float()})
        monkeypatch.setattr("lowbit_optim.weights._CHUNK_NUMEL", 9)
        assert optimizer.stalled_fraction() == 0.7
