"""The optimizer around the step: options, groups, state, errors, and the protocols that trainers speak.

Everything here runs uncompiled; test_compiled.py holds that this makes no difference.
"""

import ast
import copy
import inspect
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from reference import lion_reference
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from lowbit_optim import Lion, Lion8bit
from lowbit_optim.subclasses import OptimState8bit
from lowbit_optim.subclasses.blockwise import dequantize

pytestmark = pytest.mark.filterwarnings("error")

ROOT = Path(__file__).parent.parent
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def eager() -> Iterator[None]:
    with torch.compiler.set_stance("force_eager"):
        yield


def weight(*shape: int, device: str = "cpu", dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Parameter:
    generator = torch.Generator().manual_seed(seed)
    return nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float32).to(device, dtype))


def step(optimizer: torch.optim.Optimizer, steps: int = 1, first: int = 0) -> None:
    """With random gradients for all that requires one; the same each time this is called alike."""
    for i in range(first, first + steps):
        generator = torch.Generator().manual_seed(1000 + i)
        for group in optimizer.param_groups:
            for p in group["params"]:
                grad = torch.randn(p.shape, generator=generator, dtype=torch.float32)
                p.grad = grad.to(p.device, p.dtype) if p.requires_grad else None
        optimizer.step()


def is_8bit(optimizer: torch.optim.Optimizer, p: Tensor) -> bool:
    return isinstance(optimizer.state[p]["exp_avg"], OptimState8bit)


def same_momentum(a: torch.optim.Optimizer, p: Tensor, b: torch.optim.Optimizer, q: Tensor) -> bool:
    return torch.equal(dequantize(a.state[p]["exp_avg"]), dequantize(b.state[q]["exp_avg"]))


# --- The signature is a contract ------------------------------------------------------------------------------------


def test_the_signature_stays() -> None:
    """Report 80: arguments came and went from release to release. Order, names and defaults are fixed."""
    parameters = list(inspect.signature(Lion8bit).parameters.values())
    assert [(p.name, p.default) for p in parameters[:4]] == [
        ("params", inspect.Parameter.empty),
        ("lr", 1e-4),
        ("betas", (0.9, 0.99)),
        ("weight_decay", 0.0),
    ]
    assert all(p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for p in parameters[:4])
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in parameters[4:])
    assert {p.name: p.default for p in parameters[4:]} == {
        "quantize": True,
        "block_size": 64,
        "min_quantized_numel": 4096,
        "master_weight_bits": None,
        "stochastic_rounding": True,
        "seed": 0,
        "decouple_lr": False,
        "maximize": False,
        "offload_state": False,
        "fused": None,
    }


def test_lion_is_lion8bit_with_another_default() -> None:
    p = weight(4, 4)
    assert Lion([p]).defaults == {**Lion8bit([p]).defaults, "quantize": False}
    positional = ("params", "lr", "betas", "weight_decay")
    assert tuple(inspect.signature(Lion).parameters)[:4] == positional
    assert Lion([p], 1e-3, (0.8, 0.9), 0.2).defaults == Lion8bit([p], 1e-3, (0.8, 0.9), 0.2, quantize=False).defaults


def test_docs_name_the_defaults_of_the_code() -> None:
    """Report 92: the docs said betas (0.9, 0.999), the signature (0.9, 0.99)."""
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", readme, re.MULTILINE))
    for name, parameter in inspect.signature(Lion8bit).parameters.items():
        assert re.search(rf"^        ([\w, ]*, )?{name}[,:]", Lion8bit.__doc__, re.MULTILINE), f"docstring: {name}"
        if parameter.default is not inspect.Parameter.empty:
            written = ast.literal_eval(rows[name].split(";")[0].strip("`"))
            assert written == parameter.default, f"README: {name}"


@pytest.mark.parametrize("cls", [Lion, Lion8bit])
def test_defaults_build_the_same_optimizer(cls: type) -> None:
    options = {"lr": 3e-4, "betas": (0.8, 0.95), "weight_decay": 0.1, "block_size": 32, "seed": 7, "maximize": True}
    optimizer = cls([weight(4, 4)], **options)
    again = type(optimizer)([weight(4, 4)], **optimizer.defaults)
    assert again.defaults == optimizer.defaults
    assert again.defaults == {**cls([weight(4, 4)]).defaults, **options}


def test_it_is_an_optimizer() -> None:
    """Report 77: a wrapper that is no Optimizer, has no defaults, and fails on frozen parameters."""
    frozen, trained = weight(64, 64).requires_grad_(False), weight(64, 64)
    optimizer = Lion8bit([frozen, trained], lr=3e-4)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.defaults["lr"] == 3e-4
    before = frozen.detach().clone(), trained.detach().clone()
    step(optimizer)
    assert torch.equal(frozen, before[0])
    assert not torch.equal(trained, before[1])
    assert set(optimizer.state) == {trained}
    assert "Lion8bit" in repr(optimizer)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="offloads from a GPU")
def test_inside_torchaos_offloading() -> None:
    """Report 77: one Lion8bit a parameter, on CPU copies, gives the bits of Lion8bit on the GPU."""
    from torchao.optim import CPUOffloadOptimizer

    there, here = weight(64, 128, device="cuda"), weight(64, 128, device="cuda")
    offloaded, expected = CPUOffloadOptimizer([there], Lion8bit, lr=1e-2), Lion8bit([here], lr=1e-2)
    for _ in range(3):
        grad = torch.randn_like(here)
        here.grad = grad
        expected.step()
        (there * grad).sum().backward()
        offloaded.step()
        offloaded.zero_grad()
    torch.cuda.synchronize()
    assert torch.equal(there, here)


# --- Errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("as_group", [False, True])
@pytest.mark.parametrize(
    ("option", "value", "error", "allowed"),
    [
        ("lr", -1.0, ValueError, "at least 0"),
        ("lr", math.nan, ValueError, "finite"),
        ("lr", math.inf, ValueError, "finite"),
        ("lr", "1e-4", TypeError, "number"),
        ("lr", None, TypeError, "number"),
        ("lr", torch.tensor(-1.0), ValueError, "at least 0"),
        ("lr", torch.ones(2), ValueError, "one element"),
        ("betas", (0.9, 1.0), ValueError, "in [0, 1)"),
        ("betas", (-0.1, 0.9), ValueError, "in [0, 1)"),
        ("betas", (0.9,), ValueError, "two numbers"),
        ("betas", 0.9, ValueError, "two numbers"),
        ("weight_decay", -0.1, ValueError, "at least 0"),
        ("weight_decay", math.nan, ValueError, "finite"),
        ("quantize", 1, TypeError, "True or False"),
        ("block_size", 0, ValueError, "at least 16"),
        ("block_size", 64.0, TypeError, "integer"),
        ("block_size", math.inf, TypeError, "integer"),
        ("min_quantized_numel", -1, ValueError, "at least 0"),
        ("master_weight_bits", 16, ValueError, "None, 24 or 32"),
        ("stochastic_rounding", None, TypeError, "True or False"),
        ("decouple_lr", 0.1, TypeError, "True or False"),
        ("maximize", "no", TypeError, "True or False"),
    ],
)
def test_a_bad_argument_is_named(option: str, value: object, error: type, allowed: str, as_group: bool) -> None:
    """Report 79: arguments that were accepted and ignored. The error says the name, the value and what is allowed."""
    params = [weight(4, 4)]
    with pytest.raises(error) as caught:
        Lion8bit([{"params": params, option: value}]) if as_group else Lion8bit(params, **{option: value})
    message = str(caught.value)
    assert option in message
    assert allowed in message
    if not isinstance(value, (Tensor, tuple)):
        assert repr(value) in message


@pytest.mark.parametrize(
    ("option", "value", "error", "allowed"),
    [
        ("seed", 1.5, TypeError, "integer"),
        ("fused", "yes", TypeError, "None, True or False"),
        ("offload_state", 1, TypeError, "True or False"),
    ],
)
def test_a_bad_argument_of_the_whole_optimizer_is_named(option: str, value: object, error: type, allowed: str) -> None:
    with pytest.raises(error, match=f"{option}={value!r}.*{allowed}"):
        Lion8bit([weight(4, 4)], **{option: value})
    with pytest.raises(ValueError, match=f"{option} .*constructor"):
        Lion8bit([{"params": [weight(4, 4)], option: value}])
    live = Lion8bit([weight(4, 4)])
    Lion8bit(live.param_groups)  # its groups carry the defaults


@pytest.mark.parametrize("option", ["eps", "foreach", "is_paged", "optim_bits", "amsgrad", "min_8bit_size"])
def test_options_of_other_optimizers_are_refused(option: str) -> None:
    """Reports 79, 80 and 85: an option that would have no effect raises, to the constructor and in a group."""
    with pytest.raises(TypeError, match=option):
        Lion8bit([weight(4, 4)], **{option: 1})
    with pytest.raises(ValueError, match=f"{option}=1.*quantize=False"):
        Lion8bit([{"params": [weight(4, 4)], option: 1}])


def test_fused_may_be_left_to_the_optimizer() -> None:
    """Report 85: what asks for no fused step can be passed."""
    for fused in (None, False):
        step(Lion8bit([weight(64, 64)], fused=fused))


def test_no_parameters_are_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        Lion8bit([])


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.float8_e4m3fn])
def test_a_parameter_that_cannot_be_stepped_is_refused_by_the_constructor(dtype: torch.dtype, device: str) -> None:
    """Report 82: the constructor was content, and the first step failed."""
    unusable = nn.Parameter(torch.zeros(2, 3, device=device).to(dtype))
    for groups in ([weight(64, 64, device=device), unusable], [{"params": weight(4)}, {"params": unusable}]):
        with pytest.raises(TypeError, match=rf"\(2, 3\) is {dtype}.*float32, bfloat16 or float16"):
            Lion8bit(groups)


def test_a_sparse_gradient_is_refused_with_the_parameter_and_the_way_out() -> None:
    embedding = nn.Embedding(100, 64, sparse=True)
    optimizer = Lion8bit([weight(4, 4), embedding.weight])
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match=r"parameter 1 of shape \(100, 64\).*sparse=False"):
        optimizer.step()


def test_other_keys_of_a_group_are_metadata() -> None:
    """Trainers name their groups."""
    optimizer = Lion8bit([{"params": [weight(4, 4)], "name": "embeddings", "layer": 3}])
    step(optimizer)
    assert optimizer.param_groups[0]["name"] == "embeddings"


# --- State ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "options", "expected"),
    [
        ((64, 64), {}, True),
        ((63, 65), {}, False),  # 4095 elements
        ((4096,), {}, False),  # one dimension
        ((512, 8), {}, False),  # rows too short
        ((256, 16), {}, True),
        ((64, 16, 3, 3), {}, True),  # a convolution: rows of 144
        ((8192, 1, 1, 4), {}, False),
        ((64, 64), {"quantize": False}, False),
        ((4, 16), {"min_quantized_numel": 0}, True),
        ((1000, 1000), {"min_quantized_numel": 10**9}, False),
        ((256, 16), {"block_size": 1024}, True),
    ],
)
def test_what_is_quantised(shape: tuple[int, ...], options: dict, expected: bool, device: str) -> None:
    """Report 61: a size threshold that was ignored. Shape and options of the group alone decide."""
    p = weight(*shape, device=device)
    optimizer = Lion8bit([p], **options)
    step(optimizer)
    assert is_8bit(optimizer, p) == expected
    exp_avg = optimizer.state[p]["exp_avg"]
    assert exp_avg.shape == p.shape
    assert exp_avg.dtype == torch.float32
    assert exp_avg.device == p.device


@pytest.mark.parametrize("order", [1, -1])
def test_groups_choose_their_precision(order: int, device: str) -> None:
    """Report 62: an override for some parameters had no effect."""
    groups = [
        {"params": [weight(64, 64, device=device)], "quantize": False},
        {"params": [weight(64, 64, device=device)]},
        {"params": [weight(8, 64, device=device)], "min_quantized_numel": 100},
        {"params": [weight(64, 256, device=device)], "block_size": 256},
    ]
    optimizer = Lion8bit(groups[::order])
    step(optimizer)
    states = [optimizer.state[g["params"][0]]["exp_avg"] for g in groups]
    assert type(states[0]) is Tensor
    assert [s.block_size for s in states[1:]] == [64, 64, 256]
    assert states[3].scale.shape == (64, 1)


def test_named_parameters(device: str) -> None:
    model = nn.Linear(64, 64).to(device)
    optimizer = Lion8bit(model.named_parameters())
    step(optimizer)
    assert optimizer.param_groups[0]["param_names"] == ["weight", "bias"]
    assert is_8bit(optimizer, model.weight)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_model_of_matrices_takes_one_byte_a_parameter(dtype: torch.dtype, device: str) -> None:
    """Report 71: "not seeing much memory saving". All that the state holds is 1.04 bytes a parameter at most."""
    params = [weight(256, 320, device=device, dtype=dtype), weight(64, 3, 7, 7, device=device, dtype=dtype)]
    optimizer = Lion8bit(params)
    step(optimizer)
    saved = optimizer.state_dict()["state"]
    tensors = [t for state in saved.values() for exp_avg in state.values() for t in exp_avg.values()]
    assert all(set(state) == {"exp_avg"} for state in optimizer.state.values())
    assert sum(t.untyped_storage().nbytes() for t in tensors) <= 1.04 * sum(p.numel() for p in params)


def bytes_of_state(optimizer: torch.optim.Optimizer) -> int:
    tensors = [t for state in optimizer.state.values() for t in state.values()]
    parts = [part for t in tensors for part in ((t.codes, t.scale) if isinstance(t, OptimState8bit) else (t,))]
    return sum(part.untyped_storage().nbytes() for part in parts)


@pytest.mark.parametrize("dtype", DTYPES)
def test_after_ten_steps_state_takes_a_quarter_of_32_bit_lions(dtype: torch.dtype, device: str) -> None:
    """Report 72: the saving was "not that significant". test_compiled.py has the peak, where a device reports it."""
    shapes = [(256, 320), (128, 75), (64, 16, 3, 3), (320,)]
    optimizers = [cls([weight(*shape, device=device, dtype=dtype) for shape in shapes]) for cls in (Lion8bit, Lion)]
    for optimizer in optimizers:
        step(optimizer, 10)
        assert all(state.keys() == {"exp_avg"} for state in optimizer.state.values())
    assert bytes_of_state(optimizers[0]) <= 0.27 * bytes_of_state(optimizers[1])


def test_many_tiny_tensors_take_no_more_state_than_in_32_bits(device: str) -> None:
    """Report 73: the convolutions and norms of a ResNet took more memory than before. The time is in test_compiled."""
    params = [weight(*shape, device=device) for shape in [(64,), (16, 3, 3, 3), (24, 16), (64, 63)] * 75]
    optimizer = Lion8bit(params)
    step(optimizer)
    assert bytes_of_state(optimizer) == 4 * sum(p.numel() for p in params)


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_default_dtype_does_not_matter(dtype: torch.dtype, default: torch.dtype, device: str) -> None:
    """Report 69: state that inherits another dtype. Small parameters have fp32 momentum, and all bits are the same."""

    def train() -> tuple[Lion8bit, list[nn.Parameter]]:
        params = [weight(64, 65, device=device, dtype=dtype), weight(10, device=device, dtype=dtype)]
        optimizer = Lion8bit(params, lr=1e-2, weight_decay=0.1)
        step(optimizer, 3)
        return optimizer, params

    expected_optimizer, expected = train()
    torch.set_default_dtype(default)
    try:
        optimizer, params = train()
    finally:
        torch.set_default_dtype(torch.float32)
    assert optimizer.state[params[1]]["exp_avg"].dtype == torch.float32
    for p, q in zip(params, expected, strict=True):
        assert torch.equal(p, q)
        assert same_momentum(optimizer, p, expected_optimizer, q)


def test_the_first_step_allocates_for_all(device: str) -> None:
    """Ranks and later loads agree on what state there is, whichever parameters had a gradient."""
    used, unused = weight(64, 64, device=device), weight(64, 64, device=device)
    optimizer = Lion8bit([used, unused])
    used.grad = torch.ones_like(used)
    optimizer.step()
    assert set(optimizer.state) == {used, unused}
    assert torch.equal(unused, weight(64, 64, device=device))


def test_parameters_come_and_go(device: str) -> None:
    """Frozen parameters stay as they are, momentum included; unfrozen and added ones start from zero momentum."""
    first, second, third = (weight(64, 64, device=device, seed=i) for i in range(3))
    second.requires_grad_(False)
    optimizer = Lion8bit([first, second], lr=1e-2)
    step(optimizer)
    assert set(optimizer.state) == {first}

    first.requires_grad_(False)
    second.requires_grad_(True)
    frozen, momentum = first.detach().clone(), dequantize(optimizer.state[first]["exp_avg"])
    optimizer.add_param_group({"params": [third], "lr": 1e-1})
    step(optimizer, first=1)
    assert torch.equal(first, frozen)
    assert torch.equal(dequantize(optimizer.state[first]["exp_avg"]), momentum)
    for p, seed, lr in ((second, 1, 1e-2), (third, 2, 1e-1)):
        expected = weight(64, 64, device=device, seed=seed).detach() - lr * p.grad.sign()
        torch.testing.assert_close(p.detach(), expected)

    first.requires_grad_(True)
    step(optimizer, first=2)
    assert not torch.equal(first, frozen)


def test_a_frozen_parameter_that_has_a_gradient_moves(device: str) -> None:
    """As in torch.optim, the gradient decides."""
    p = weight(64, 64, device=device).requires_grad_(False)
    p.grad = torch.ones_like(p)
    before = p.clone()
    Lion8bit([p], lr=1e-2).step()
    torch.testing.assert_close(p, before - 1e-2)


def test_parameters_swapped_after_construction(device: str) -> None:
    """Report 43: FSDP2's preparation replaces ``param_groups["params"]`` after the optimizer was built."""
    model = nn.Linear(64, 64).to(device)
    optimizer = Lion8bit(model.parameters(), lr=1e-2)
    swapped = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    optimizer.param_groups[0]["params"] = swapped
    expected = Lion8bit([nn.Parameter(p.detach().clone()) for p in swapped], lr=1e-2)
    step(optimizer, 2)
    step(expected, 2)
    for p, q in zip(swapped, expected.param_groups[0]["params"], strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", ["transposed", "channels_last", "expanded_grad", "strided_grad", "sliced"])
def test_memory_layout_does_not_matter(case: str, dtype: torch.dtype, device: str) -> None:
    """Report 57: parameters and gradients that are not contiguous give the bits of contiguous ones, and stay so."""
    values = weight(64, 3, 7, 7, device=device, dtype=dtype).detach()
    if case != "channels_last":
        values = values.reshape(64, 147)
    odd = {
        "transposed": lambda: values.t().contiguous().t(),
        "channels_last": lambda: values.contiguous(memory_format=torch.channels_last),
        "sliced": lambda: values.repeat(1, 2)[:, :147],
    }.get(case, values.clone)()
    p, q = nn.Parameter(odd), nn.Parameter(values.clone())
    strides = p.stride()
    optimizer, expected = (Lion8bit([x], lr=1e-2, weight_decay=0.1) for x in (p, q))
    for i in range(3):
        grad = weight(*values.shape, device=device, dtype=dtype, seed=i + 1).detach()
        if case == "expanded_grad":
            grad = grad[:1].expand_as(grad)
        elif case in ("transposed", "strided_grad"):
            grad = grad.t().contiguous().t()
        elif case == "channels_last":
            grad = grad.contiguous(memory_format=torch.channels_last)
        p.grad, q.grad = grad, grad.contiguous()
        optimizer.step()
        expected.step()
    assert torch.equal(p, q)
    assert same_momentum(optimizer, p, expected, q)
    assert p.stride() == strides


@pytest.mark.parametrize("name", ["Int8MixedPrecisionTrainingLinearWeight", "Int8QuantizedTrainingLinearWeight"])
def test_a_tensor_subclass_keeps_its_type_and_has_plain_state(name: str, device: str) -> None:
    """Reports 89 and 90: torchao's int8 training weights; ``zeros_like(p)`` would have made int8 momentum of them."""
    training = pytest.importorskip("torchao.prototype.quantized_training")
    from torchao.quantization import quantize_

    config = {
        "Int8MixedPrecisionTrainingLinearWeight": training.int8_mixed_precision_training,
        "Int8QuantizedTrainingLinearWeight": training.int8_weight_only_quantized_training,
    }[name]
    model = nn.Linear(64, 128, bias=False).to(device)
    quantize_(model, config())
    p = model.weight
    assert type(p.data).__name__ == name
    optimizer = Lion8bit(model.parameters(), lr=1e-1)
    identity, before = torch.eye(64, device=device), model(torch.eye(64, device=device)).detach()
    p.grad = torch.randn(p.shape, device=device)
    optimizer.step()
    moved = (model(identity) - before).t()
    assert (moved * p.grad < 0).float().mean() > 0.95, "the weight moves against its gradient"
    optimizer.step()
    assert model.weight is p
    assert type(p.data).__name__ == name
    assert type(optimizer.state[p]["exp_avg"]) is OptimState8bit
    assert type(optimizer.state[p]["exp_avg"].codes) is Tensor


# --- Learning rate and decay ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"decouple_lr": True}])
@pytest.mark.parametrize("zero", [0.0, 0, torch.tensor(0.0), torch.tensor([0.0])])
def test_lr_zero_changes_no_weight_and_does_not_count(
    zero: float | Tensor, options: dict, dtype: torch.dtype, device: str
) -> None:
    """Report 21: DCP runs a hidden step with a float lr of 0 to create state."""
    params = [weight(64, 64, device=device, dtype=dtype), weight(10, device=device, dtype=dtype)]
    optimizer = Lion8bit(params, lr=1e-2, weight_decay=0.5, **options)
    step(optimizer)
    before = [p.detach().clone() for p in params]
    optimizer.param_groups[0]["lr"] = zero.to(device) if isinstance(zero, Tensor) else zero
    step(optimizer, first=1)
    assert all(torch.equal(p, b) for p, b in zip(params, before, strict=True))
    assert optimizer.param_groups[0]["step"] == 1
    optimizer.param_groups[0]["lr"] = 1e-2
    step(optimizer, first=2)
    assert optimizer.param_groups[0]["step"] == 2
    assert all(p.isfinite().all() for p in params)


def test_decouple_lr_scales_decay_by_the_share_of_the_initial_lr(device: str) -> None:
    """decay = wd lr / initial_lr, each group with its own initial lr; a scheduler's lr counts as lr."""
    a, b = weight(64, 64, device=device), weight(64, 64, device=device)
    optimizer = Lion8bit([{"params": [a], "lr": 1e-1}, {"params": [b]}], lr=1e-3, weight_decay=0.01, decouple_lr=True)
    scheduler = LambdaLR(optimizer, lambda i: 0.5**i)
    for share in (1.0, 0.5, 0.25):
        old = [p.detach().double() for p in (a, b)]
        for p in (a, b):
            p.grad = torch.zeros_like(p)
        optimizer.step()
        for p, before in zip((a, b), old, strict=True):
            torch.testing.assert_close(p.detach().double(), before * (1 - 0.01 * share), rtol=2e-7, atol=0)
        scheduler.step()
    assert [g["initial_lr"] for g in optimizer.param_groups] == [1e-1, 1e-3]


def test_decouple_lr_in_one_group(device: str) -> None:
    a, b = weight(64, 64, device=device), weight(64, 64, device=device)
    optimizer = Lion8bit([{"params": [a], "decouple_lr": True}, {"params": [b]}], lr=0.5, weight_decay=0.01)
    for p in (a, b):
        p.grad = torch.zeros_like(p)
    optimizer.step()
    expected = weight(64, 64, device=device).detach()
    torch.testing.assert_close(a.detach(), expected * 0.99)
    torch.testing.assert_close(b.detach(), expected * 0.995)


def test_decouple_lr_needs_an_initial_lr() -> None:
    """Built with lr 0 there is nothing to take a share of: an error that says so, not an infinite decay."""
    p = weight(64, 64)
    optimizer = Lion8bit([p], lr=0.0, weight_decay=0.1, decouple_lr=True)
    step(optimizer)
    assert torch.equal(p, weight(64, 64))
    optimizer.param_groups[0]["lr"] = 1e-3
    with pytest.raises(ValueError, match=r"initial_lr is 0 while lr is 0\.001"):
        step(optimizer)
    optimizer.param_groups[0]["initial_lr"] = 1e-3
    step(optimizer)


def test_float_lrs_with_groups_and_schedulers(device: str) -> None:
    """Report 48: a group's float lr beside a scheduler, lr set by hand, and a group added later."""
    params = [weight(64, 64, device=device, seed=i) for i in range(3)]
    optimizer = Lion8bit([{"params": params[:1], "lr": 1e-3}, {"params": params[1:2]}], lr=1e-4)
    scheduler = LambdaLR(optimizer, lambda i: 1 / (i + 1))
    step(optimizer)
    scheduler.step()
    assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([5e-4, 5e-5])
    optimizer.param_groups[0]["lr"] = 5e-2
    optimizer.add_param_group({"params": params[2:], "lr": 1e-1})
    old = [p.detach().clone() for p in params]
    step(optimizer, first=1)
    for p, before, lr in zip(params, old, (5e-2, 5e-5, 1e-1), strict=True):
        moved = (p.detach() - before).abs()
        torch.testing.assert_close(moved, torch.full_like(moved, lr), rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("lr", [1e-3, torch.tensor(1e-3)])
def test_lr_can_be_logged(lr: float | Tensor) -> None:
    """Report 84: lr not visible in TensorBoard, or the same tensor at each step."""
    optimizer = Lion8bit([weight(4, 4)], lr=lr)
    scheduler, seen = LambdaLR(optimizer, lambda i: 1 / (i + 1)), []
    for _ in range(3):
        seen.append(copy.copy(scheduler.get_last_lr()[0]))
        step(optimizer)
        scheduler.step()
    assert [json.loads(json.dumps(float(x))) for x in seen] == pytest.approx([1e-3, 5e-4, 1e-3 / 3])


# --- Rounding noise -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_seed_fixes_the_rounding_and_torchs_generators_are_untouched(dtype: torch.dtype, device: str) -> None:
    """Same seed, same bits; other seeds, other bits; nothing is drawn from the global generators."""

    def train(**options: int) -> Tensor:
        p = weight(64, 64, device=device, dtype=dtype)
        step(Lion8bit([p], lr=1e-4, **options), 3)
        return p.detach()

    before = torch.get_rng_state(), torch.cuda.get_rng_state_all() if device == "cuda" else []
    results = [train(), train(seed=1), train(seed=-1), train(seed=2**40)]
    assert torch.equal(before[0], torch.get_rng_state())
    if device == "cuda":
        assert all(map(torch.equal, before[1], torch.cuda.get_rng_state_all()))
    torch.manual_seed(123)
    assert torch.equal(train(), results[0])
    assert all(not torch.equal(a, b) for i, a in enumerate(results) for b in results[:i])


def test_rounding_differs_between_parameters_and_not_between_groupings(device: str) -> None:
    """The noise depends on a parameter's number over all groups: replicas agree, equal parameters do not move alike."""

    def params() -> list[nn.Parameter]:
        return [weight(64, 64, device=device, dtype=torch.bfloat16) for _ in range(3)]

    together, split = params(), params()
    optimizers = Lion8bit(together, lr=1e-4), Lion8bit([{"params": split[:1]}, {"params": split[1:]}], lr=1e-4)
    for _ in range(3):
        for p in (*together, *split):
            p.grad = torch.ones_like(p)
        for optimizer in optimizers:
            optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(together, split, strict=True))
    assert not torch.equal(together[0], together[1])
    assert not torch.equal(together[1], together[2])


# --- The protocols of trainers --------------------------------------------------------------------------------------


def test_a_closure_is_evaluated_with_gradients_and_its_loss_returned(device: str) -> None:
    p, q = weight(64, 64, device=device), weight(64, 64, device=device)
    with_closure, without = Lion8bit([p], lr=1e-2), Lion8bit([q], lr=1e-2)

    def closure() -> Tensor:
        with_closure.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    for _ in range(2):
        loss = with_closure.step(closure)
        expected = q.square().sum()
        without.zero_grad()
        expected.backward()
        assert without.step() is None
        assert torch.equal(loss, expected)
    assert torch.equal(p, q)


def test_grad_scaler_skips_overflowing_steps(device: str) -> None:
    """GradScaler's protocol: unscaled gradients reach the step, and a step with an infinity does not happen at all."""
    p, q = weight(64, 64, device=device), weight(64, 64, device=device)
    scaled, plain = Lion8bit([p], lr=1e-2, weight_decay=0.1), Lion8bit([q], lr=1e-2, weight_decay=0.1)
    scaler = torch.amp.GradScaler(device, init_scale=1024.0)
    for i in range(5):
        x = weight(64, 64, device=device, seed=i).detach()
        scaled.zero_grad()
        scaler.scale((p * x).sum()).backward()
        if i == 2:
            p.grad[3, 3] = math.inf
        scaler.step(scaled)
        scaler.update()
        if i != 2:
            plain.zero_grad()
            (q * x).sum().backward()
            plain.step()
        assert torch.equal(p, q)
    assert scaler.get_scale() == 512
    assert same_momentum(scaled, p, plain, q)
    assert scaled.param_groups[0]["step"] == plain.param_groups[0]["step"] == 4


def test_grad_scaler_unscales_before_clipping(device: str) -> None:
    p, q = weight(64, 64, device=device), weight(64, 64, device=device)
    scaled, plain = Lion8bit([p], lr=1e-2), Lion8bit([q], lr=1e-2)
    scaler = torch.amp.GradScaler(device, init_scale=1024.0)
    scaler.scale(p.square().sum()).backward()
    scaler.unscale_(scaled)
    q.square().sum().backward()
    for x in (p, q):
        nn.utils.clip_grad_norm_([x], 1.0)
    scaler.step(scaled)
    plain.step()
    assert torch.equal(p, q)
    assert same_momentum(scaled, p, plain, q)


# --- Small models ---------------------------------------------------------------------------------------------------


def train_bigrams(make: Callable[[nn.Embedding, nn.Linear], torch.optim.Optimizer], device: str) -> float:
    """Cross-entropy of a two-layer bigram model of Zipf-distributed tokens, averaged over the last of 300 steps."""
    torch.manual_seed(0)
    vocabulary, width = 256, 32
    embedding, head = nn.Embedding(vocabulary, width).to(device), nn.Linear(width, vocabulary).to(device)
    nn.init.normal_(embedding.weight, std=0.1)
    optimizer = make(embedding, head)
    scheduler = LambdaLR(optimizer, lambda i: 1 - i / 300)
    frequency = 1 / torch.arange(1, vocabulary + 1)
    following = torch.stack([frequency[torch.randperm(vocabulary)] ** 1.5 for _ in range(vocabulary)])
    losses = []
    for _ in range(300):
        tokens = torch.multinomial(frequency, 256, replacement=True)
        targets = torch.multinomial(following[tokens], 1).squeeze(1)
        loss = F.cross_entropy(head(embedding(tokens.to(device))), targets.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return sum(losses[-100:]) / 100


@pytest.fixture(scope="module")
def fp32_losses() -> dict[str, float]:
    return {}


@pytest.mark.parametrize("quantize_embedding", [True, False])
def test_a_small_language_model_trains_as_with_32_bits(
    quantize_embedding: bool, device: str, fp32_losses: dict[str, float]
) -> None:
    """Reports 63 and 86: Zipf tokens, embedding in 8 bits or excluded; within 1 % of the loss of fp32 Lion."""
    options = {"lr": 3e-3, "weight_decay": 0.01, "block_size": 32}

    def make(embedding: nn.Embedding, head: nn.Linear) -> torch.optim.Optimizer:
        groups = [{"params": embedding.parameters(), "quantize": quantize_embedding}, {"params": head.parameters()}]
        return Lion8bit(groups, **options)

    if device not in fp32_losses:
        fp32_losses[device] = train_bigrams(lambda e, h: Lion([*e.parameters(), *h.parameters()], **options), device)
    expected = fp32_losses[device]
    assert expected < 4, "it learns: their frequencies alone would give 5.08"
    assert train_bigrams(make, device) == pytest.approx(expected, rel=0.01)


class OtherState(OptimState8bit):
    pass


class OtherLion(Lion8bit):
    state_class = OtherState


def test_the_fused_kernel_is_not_let_at_state_of_another_class() -> None:
    p = nn.Parameter(torch.randn(8, 64))
    p.grad = torch.randn(8, 64)
    optimizer = OtherLion([p], min_quantized_numel=0)
    optimizer.step()
    assert type(optimizer.state[p]["exp_avg"]) is OtherState
    with pytest.raises(RuntimeError, match="the kernel does not know OtherState"):
        OtherLion([p], fused=True).step()


# --- On a bare machine ----------------------------------------------------------------------------------------------


def test_weights_on_the_cpu_take_a_learning_rate_from_any_device(device: str) -> None:
    """Report 76: an 8-bit optimizer for offloaded weights, quantised on the CPU, whatever holds the learning rate."""
    p, other = weight(64, 96), weight(96)
    optimizer = Lion8bit([p, other], lr=torch.tensor(1e-2, device=device), weight_decay=0.1)
    step(optimizer)
    assert is_8bit(optimizer, p)
    for i in range(1, 4):
        optimizer.param_groups[0]["lr"].fill_(1e-2 / i)
        before = [(q.detach().double(), dequantize(optimizer.state[q]["exp_avg"]).double()) for q in (p, other)]
        step(optimizer, first=i)
        for q, (old_p, old_m) in zip((p, other), before, strict=True):
            new_p, new_m = lion_reference(old_p, q.grad.double(), old_m, 1e-2 / i, 0.9, 0.99, 0.1)
            torch.testing.assert_close(q.detach().double(), new_p, rtol=1e-6, atol=1e-8)
            momentum = optimizer.state[q]["exp_avg"]
            assert momentum.device.type == "cpu"
            assert (dequantize(momentum) - new_m).abs().max() <= (0.009 if q is p else 1e-6) * new_m.abs().max()


def test_no_triton_and_no_compiler_are_needed(tmp_path: Path) -> None:
    """Report 81: a native library that was missing, or built for another machine. Here is none, and no compiler."""
    program = f"""
import sys, warnings
sys.modules["triton"] = None  # an import of it raises
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "test")!r}]
from test_optimizer import *
p = weight(64, 75)
optimizer = Lion8bit([p], lr=1e-2)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    step(optimizer, 2)
assert sum("runs uncompiled" in str(w.message) for w in caught) == 1, [str(w.message) for w in caught]
assert "triton" not in [name for name, module in sys.modules.items() if module]
torch.save([p.detach(), optimizer.state[p]["exp_avg"].codes], {str(tmp_path / "bits.pt")!r})
"""
    keep = {k: v for k, v in os.environ.items() if k not in ("CC", "CXX", "CUDA_HOME", "TRITON_INTERPRET")}
    env = {**keep, "PATH": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    subprocess.run([sys.executable, "-c", program], env=env, check=True, timeout=300)
    p = weight(64, 75)
    optimizer = Lion8bit([p], lr=1e-2)
    step(optimizer, 2)
    bare_p, bare_codes = torch.load(tmp_path / "bits.pt")
    assert torch.equal(bare_p, p)
    assert torch.equal(bare_codes, optimizer.state[p]["exp_avg"].codes)


# --- The tests themselves -------------------------------------------------------------------------------------------


def test_no_test_file_is_skipped_as_a_whole() -> None:
    """Report 91: all low-bit tests were skipped on a platform though the code was pure PyTorch. Kernels aside.

    So are the clients, which are other packages.
    """
    skipped = re.compile(r'^(pytest\.skip|pytest\.importorskip(?!\("triton"\))|pytestmark.*skip)', re.M)
    tests = Path(__file__).parent
    for path in tests.rglob("test_*.py"):
        if path.parent != tests / "clients":
            assert not skipped.search(path.read_text()), path.name
