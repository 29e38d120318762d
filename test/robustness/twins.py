"""Two optimizers that live through the same events, stepped in different ways, and must stay equal in every bit."""

import copy
import functools
import io
import math
import pickle
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest import mock

import interpreter
import torch
from reference import lion_reference
from torch import Tensor, nn

from lowbit_optim import Lion8bit, codec
from lowbit_optim.subclasses import OptimState8bit
from lowbit_optim.subclasses.blockwise import dequantize

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
POISONS = (math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-45, 1e30)


@contextmanager
def eager() -> Iterator[None]:
    with torch.compiler.set_stance("force_eager"):
        yield


@contextmanager
def fused() -> Iterator[None]:
    """On a CPU in Triton's interpreter, for which TRITON_INTERPRET=1 must have been set before Triton was imported."""
    if DEVICE == "cuda":
        yield
        return
    _mend_interpreter()
    with mock.patch("lowbit_optim.optimizer._why_not_fused", return_value=None):
        yield


_mend_interpreter = functools.cache(interpreter.mend)

# the optimizer's `fused`, and what its steps run in
MODES: dict[str, tuple[bool | None, Callable[[], AbstractContextManager[None]]]] = {
    "eager": (False, eager),
    "compiled": (False, nullcontext),
    "fused": (None, fused),
}


class Twin:
    """An optimizer, and what it was built from."""

    def __init__(self, mode: str, **options: Any) -> None:
        is_fused, self.context = MODES[mode]
        self.options = {**options, "fused": is_fused}
        self.groups: list[dict[str, Any]] = []
        self.optimizer: Lion8bit | None = None

    def add_group(self, group: dict[str, Any]) -> None:
        self.groups.append(group)
        if self.optimizer is None:
            self.optimizer = Lion8bit([dict(group)], **self.options)
        else:
            self.optimizer.add_param_group(dict(group))

    @property
    def params(self) -> list[nn.Parameter]:
        return [p for group in self.groups for p in group["params"]]

    def momentum(self, p: Tensor) -> Tensor | None:
        return self.optimizer.state[p]["exp_avg"] if p in self.optimizer.state else None

    def weights(self, p: Tensor) -> Tensor:
        """float32, a copy: the master weights if there are any."""
        residual = self.optimizer.state[p].get("master_residual") if p in self.optimizer.state else None
        return codec.read_weight(p.detach().clone(), residual)

    def parts(self, p: Tensor) -> list[Tensor]:
        """All tensors that the parameter's state consists of."""
        state = list(self.optimizer.state.get(p, {}).values())
        return [part for x in state for part in ([x.codes, x.scale] if isinstance(x, OptimState8bit) else [x])]

    def step(self) -> None:
        with self.context():
            self.optimizer.step()

    # --- Lives again: each leaves other objects that are to go on as if nothing had happened -----------------------

    def save_and_load(self) -> None:
        """Into a fresh optimizer over fresh parameters, as after a crash."""
        if not self.optimizer.state:  # nothing to go on from, and refused if steps were counted meanwhile
            return
        file = io.BytesIO()
        torch.save(self.optimizer.state_dict(), file)
        file.seek(0)
        self.groups = [{**group, "params": [_copy(p) for p in group["params"]]} for group in self.groups]
        self.optimizer = Lion8bit([dict(group) for group in self.groups], **self.options)
        self.optimizer.load_state_dict(torch.load(file, weights_only=True))

    def deepcopy(self) -> None:
        self._replace(copy.deepcopy)

    def pickle(self) -> None:
        self._replace(lambda x: pickle.loads(pickle.dumps(x)))

    def _replace(self, through: Callable[[Any], Any]) -> None:
        grads = [p.grad for p in self.params]
        self.groups, self.optimizer = through((self.groups, self.optimizer))
        for p, grad in zip(self.params, grads, strict=True):
            p.grad = grad


def _copy(p: nn.Parameter) -> nn.Parameter:
    q = nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad)
    q.grad = p.grad
    return q


class Twins:
    """A twin that steps eagerly, and one that steps otherwise."""

    def __init__(self, other: str, **options: Any) -> None:
        self.twins = [Twin("eager", **options), Twin(other, **options)]

    @property
    def eager(self) -> Twin:
        return self.twins[0]

    def __iter__(self) -> Iterator[Twin]:
        return iter(self.twins)

    @property
    def count(self) -> int:
        return len(self.eager.params)

    def add_group(self, shapes: list[tuple[int, ...]], dtype: torch.dtype, seed: int, **options: Any) -> None:
        values = [random_values(shape, seed + i).to(DEVICE, dtype) for i, shape in enumerate(shapes)]
        for twin in self:
            twin.add_group({**options, "params": [nn.Parameter(value.clone()) for value in values]})

    def set_option(self, group: int, **options: Any) -> None:
        for twin in self:
            twin.optimizer.param_groups[group].update(copy.deepcopy(options))

    def require_grad(self, index: int, required: bool) -> None:
        for twin in self:
            twin.params[index].requires_grad_(required)

    def set_grads(self, seed: int, without: frozenset[int] = frozenset(), poison: float | None = None) -> None:
        """Random gradients for what requires one, with ``poison`` here and there; None for those ``without``."""
        for i, params in enumerate(zip(*(twin.params for twin in self), strict=True)):
            if not params[0].requires_grad or i in without:
                grad = None
            else:
                grad = random_grad(params[0].shape, seed + i, poison).to(DEVICE, params[0].dtype)
            for p in params:
                p.grad = None if grad is None else grad.clone()

    def zero_grad(self, set_to_none: bool) -> None:
        for twin in self:
            twin.optimizer.zero_grad(set_to_none=set_to_none)

    def step(self) -> None:
        """Both, and each eager one is held to the paper."""
        check = closed_form(self.eager)
        for twin in self:
            twin.step()
        check()
        self.check_equal()

    def check_equal(self) -> None:
        first, second = self.twins
        for i, (p, q) in enumerate(zip(first.params, second.params, strict=True)):
            assert same_bits(p, q), f"weights of parameter {i}, {tuple(p.shape)} {p.dtype}"
            for a, b in zip(first.parts(p), second.parts(q), strict=True):
                assert same_bits(a, b), f"state of parameter {i}, {tuple(p.shape)} {p.dtype}"
        steps = [[int(group["step"]) for group in twin.optimizer.param_groups] for twin in self]
        assert steps[0] == steps[1]


# --- Bits -----------------------------------------------------------------------------------------------------------


def same_bits(a: Tensor, b: Tensor) -> bool:
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return a.dtype == b.dtype and torch.equal(*(x.detach().contiguous().view(integers) for x in (a, b)))


# --- Random values --------------------------------------------------------------------------------------------------


def random_values(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def random_grad(shape: torch.Size, seed: int, poison: float | None) -> Tensor:
    """Over some orders of magnitude, with ``poison`` in about one element of eight."""
    generator = torch.Generator().manual_seed(seed)
    grad = torch.randn(shape, generator=generator) * 10 ** (-6 * torch.rand(shape, generator=generator))
    if poison is None:
        return grad
    return torch.where(torch.rand(shape, generator=generator) < 0.125, poison, grad)


# --- The paper ------------------------------------------------------------------------------------------------------


def closed_form(twin: Twin) -> Callable[[], None]:
    """Take down what there is before a step; what is returned checks, after it, that the step was Lion's."""
    checks = [_expect(twin, p, group) for group in twin.optimizer.param_groups for p in group["params"]]
    return lambda: [check() for check in checks]


def _expect(twin: Twin, p: Tensor, group: dict[str, Any]) -> Callable[[], None]:
    bits_before = [x.detach().clone() for x in (p, *twin.parts(p))]
    if p.grad is None or p.numel() == 0:
        return lambda: _check_unmoved([p, *twin.parts(p)], bits_before)
    before, momentum = twin.weights(p).double(), twin.momentum(p)
    lr, (beta1, beta2) = float(group["lr"]), group["betas"]
    weight_decay = group["weight_decay"] / (float(group["initial_lr"]) if group["decouple_lr"] else 1.0)
    m = torch.zeros_like(before) if momentum is None else dequantize(momentum).double()
    g = p.grad.double() * (-1 if group["maximize"] else 1)
    expected, _ = lion_reference(before, g, m, lr, beta1, beta2, weight_decay)
    g0 = torch.where(g.isfinite(), g, 0.0)  # what the momentum takes the gradient for
    _, expected_m = lion_reference(before, g0, m, lr, beta1, beta2, weight_decay)
    fp32_error = 4 * 2.0**-24 * ((1 + lr * weight_decay) * before.abs() + lr)
    tolerance = fp32_error + 2 * lr * _is_undecided(m, g, beta1)
    fp32_error_m = 2.0**-22 * (m.abs() + g0.abs()) + 2.0**-140

    def check() -> None:
        if lr == 0:
            _check_unmoved([p], bits_before[:1])
        else:
            _check_weights(twin.weights(p).double(), expected, tolerance, p, group)
        _check_momentum(twin.momentum(p), expected_m, fp32_error_m, group["block_size"])

    return check


def _check_unmoved(parts: list[Tensor], before: list[Tensor]) -> None:
    """State that there was not before is new."""
    assert all(map(same_bits, parts, before)), "what no gradient or learning rate moves has moved"


def _is_undecided(m: Tensor, g: Tensor, beta1: float) -> Tensor:
    """Where fp32's rounding may turn the sign: terms that nearly cancel, or are smaller than fp32's numbers."""
    terms = torch.stack([beta1 * m, (1 - beta1) * g])
    total = terms.sum(0).abs()
    return (total <= 4 * 2.0**-24 * terms.abs().sum(0)) | ((total > 0) & (total < 2.0**-120))


def _check_weights(weights: Tensor, expected: Tensor, tolerance: Tensor, p: Tensor, group: dict[str, Any]) -> None:
    """``weights``, the master weights if there are any, are float64; they and ``p`` are rounded as they should be."""
    info, bits = torch.finfo(p.dtype), group["master_weight_bits"] if p.dtype != torch.float32 else None
    half_spacing = (expected.abs() * info.eps + info.smallest_normal * info.eps) / 2
    # 8 or 16 bits finer; float16's masters are no finer than 2**-38
    rounding = half_spacing * {None: 1, 24: 2.0**-8, 32: 2.0**-16}[bits] + (2.0**-38 if bits else 0.0)
    if group["stochastic_rounding"] and p.dtype != torch.float32:
        rounding *= 2
    # what fp16 cannot hold is infinite, in whichever way it is rounded, and a master the largest number
    is_large = expected.abs() >= info.max * (1 - info.eps)
    is_right = ((weights - expected).abs() <= 1.01 * rounding + tolerance) | is_large
    assert is_right.all(), f"{(~is_right).sum()} weights of {tuple(p.shape)} {p.dtype} are not Lion's"
    if bits:
        assert (((p.double() - weights).abs() <= 1.01 * half_spacing) | is_large).all(), "the model sees other weights"


def _check_momentum(momentum: Tensor, expected: Tensor, fp32_error: Tensor, block_size: int) -> None:
    error = (dequantize(momentum).double() - expected).abs() - fp32_error
    if not isinstance(momentum, OptimState8bit):
        assert momentum.dtype == torch.float32
        assert (error <= 0).all()
        return
    for e, block in zip(_blocks(error, block_size), _blocks(expected, block_size), strict=True):
        # half a step of the code is 0.85 % of the scale at most; below 2**-112 a block is zero
        assert (e <= 0.009 * block.abs().amax(1, keepdim=True) + 2.0**-112).all()


def _blocks(x: Tensor, block_size: int) -> tuple[Tensor, ...]:
    """Columns of blocks: along the last dimension if that is as long as a block, else along all but the first."""
    rows = x.flatten(0, -2) if x.shape[-1] >= block_size else x.flatten(1)
    return rows.split(block_size, dim=1)
