"""Gradient release: the bits of a plain step, gradients gone after backward, and errors where it cannot be had."""

import copy
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import lowbit_optim
from lowbit_optim import Lion8bit, gradient_release
from lowbit_optim.subclasses import OptimState8bit

pytestmark = pytest.mark.filterwarnings("error")
LIMIT = 20_000  # bytes


@pytest.fixture(autouse=True)
def _small_and_eager(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A few tensors at a time, as in a model that is much larger than what may wait."""
    module = sys.modules["lowbit_optim.gradient_release"]  # the package's attribute is the function
    monkeypatch.setattr(module, "_MAX_WAITING_BYTES", LIMIT)
    monkeypatch.setattr(module, "_MAX_WAITING_SHARE", 1)
    with torch.compiler.set_stance("force_eager"):
        yield


class Model(nn.Module):
    """Tied weights, a parameter used twice, one that is used in some steps only, small and ragged ones."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 64)
        self.first = nn.Linear(64, 96)
        self.second = nn.Linear(96, 64)
        self.norm = nn.LayerNorm(64)
        self.sometimes = nn.Linear(64, 64)
        self.head = nn.Linear(64, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, extra: bool = True) -> Tensor:
        x = self.embedding(tokens)
        for _ in range(2):
            x = self.norm(x + self.second(self.first(x).relu()))
        return self.head(self.sometimes(x) if extra else x).float().logsumexp(-1).mean()


def make(device: str, dtype: torch.dtype = torch.bfloat16, released: bool = True, **options: Any) -> Any:
    torch.manual_seed(0)
    model = Model().to(device, dtype)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1]},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0, "lr": 3e-3},
    ]
    options = {"lr": 1e-2, "weight_decay": 0.1, "min_quantized_numel": 0, **options}
    optimizer = Lion8bit(groups, **options)
    return model, optimizer, gradient_release(model, optimizer) if released else None


def tokens(step: int, device: str) -> Tensor:
    return torch.randint(50, (2, 12), generator=torch.Generator().manual_seed(step)).to(device)


def train(model: Model, optimizer: Lion8bit, device: str, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        model(tokens(step, device), extra=step % 3 > 0).backward()
        optimizer.step()
        optimizer.zero_grad()


def parts(momentum: Tensor) -> list[Tensor]:
    return [momentum.codes, momentum.scale] if isinstance(momentum, OptimState8bit) else [momentum]


def assert_equal(model: nn.Module, optimizer: Lion8bit, other: nn.Module, other_optimizer: Lion8bit) -> None:
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q), name
        state, expected = optimizer.state.get(p), other_optimizer.state.get(q)
        assert (state is None) == (expected is None), name
        if state is not None:
            for key, value in expected.items():
                assert all(map(torch.equal, parts(state[key]), parts(value))), (name, key)
    assert [int(g["step"]) for g in optimizer.param_groups] == [int(g["step"]) for g in other_optimizer.param_groups]


@pytest.fixture
def early_steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many parameters were stepped at a time inside backward."""
    counts: list[int] = []
    original = Lion8bit._step_early

    def step_early(self: Lion8bit, number: int, part: int, params: list, *args: Any) -> Any:
        counts.append(len(params))
        return original(self, number, part, params, *args)

    monkeypatch.setattr(Lion8bit, "_step_early", step_early)
    return counts


# --- The same bits --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "options",
    [{}, {"quantize": False}, {"decouple_lr": True, "maximize": True, "fused": False}, {"master_weight_bits": 24}],
    ids=str,
)
def test_the_bits_are_those_of_plain_steps(
    device: str, dtype: torch.dtype, options: dict[str, Any], early_steps: list[int]
) -> None:
    """With a schedule, over 24 steps."""
    runs = []
    for released in (True, False):
        model, optimizer, _ = make(device, dtype, released, **options)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 24)
        for step in range(24):
            train(model, optimizer, device, 1, step)
            scheduler.step()
        runs += [model, optimizer]
    assert_equal(*runs)
    assert int(runs[1].param_groups[0]["step"]) == 24
    assert len(early_steps) >= 24


def test_gradients_are_gone_after_backward(device: str) -> None:
    """And never more of them alive than the limit and one."""
    model, optimizer, _ = make(device)
    model(tokens(0, device)).backward()
    assert all(p.grad is None for p in model.parameters())
    waiting = sum(each.nbytes for each in optimizer._release._waiting.values())
    assert 0 < waiting <= LIMIT
    optimizer.step()
    assert all(p.grad is None for p in model.parameters())
    assert not optimizer._release._waiting


def test_a_share_of_all_gradients_waits_at_most(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["lowbit_optim.gradient_release"], "_MAX_WAITING_SHARE", 0.1)
    model, optimizer, _ = make(device)
    model(tokens(0, device)).backward()
    waiting = sum(each.nbytes for each in optimizer._release._waiting.values())
    assert 0 < waiting <= 0.1 * sum(p.nbytes for p in model.parameters())


def test_a_learning_rate_of_0_moves_and_counts_nothing(device: str) -> None:
    runs = []
    for released in (True, False):
        model, optimizer, _ = make(device, released=released)
        for lr in (1e-2, 0.0, 1e-2):
            for group in optimizer.param_groups:
                group["lr"] = lr
            train(model, optimizer, device, 3)
        runs += [model, optimizer]
    assert_equal(*runs)
    assert int(runs[1].param_groups[0]["step"]) == 6


def test_a_learning_rate_on_the_device(device: str) -> None:
    runs = []
    for released in (True, False):
        model, optimizer, _ = make(device, released=released, lr=torch.tensor(1e-2, device=device))
        for lr in (1e-2, 0.0, 1e-3):
            optimizer.param_groups[0]["lr"].fill_(lr)
            train(model, optimizer, device, 3)
        runs += [model, optimizer]
    assert_equal(*runs)


def test_closures(device: str) -> None:
    runs = []
    for released in (True, False):
        model, optimizer, _ = make(device, released=released)
        losses = []
        for step in range(20):

            def closure(step: int = step, model: Model = model, optimizer: Lion8bit = optimizer) -> Tensor:
                optimizer.zero_grad()
                loss = model(tokens(step, device))
                loss.backward()
                return loss

            losses.append(optimizer.step(closure).item())
        runs.append((model, optimizer, losses))
    assert_equal(*runs[0][:2], *runs[1][:2])
    assert runs[0][2] == runs[1][2]


def test_parameters_frozen_and_unfrozen(device: str) -> None:
    runs = []
    for released in (True, False):
        torch.manual_seed(0)
        model = Model().to(device, torch.bfloat16)
        model.first.requires_grad_(False)
        optimizer = Lion8bit(model.parameters(), lr=1e-2, min_quantized_numel=0)
        if released:
            gradient_release(model, optimizer)
        train(model, optimizer, device, 4)
        model.first.requires_grad_(True)
        train(model, optimizer, device, 4, 4)
        model.second.requires_grad_(False)
        train(model, optimizer, device, 4, 8)
        model.second.requires_grad_(True)
        train(model, optimizer, device, 4, 12)
        model(tokens(16, device)).backward()
        assert all((p.grad is None) == released for p in model.parameters())
        optimizer.step()
        runs += [model, optimizer]
    assert_equal(*runs)


def test_remove_undoes_it_even_between_backward_and_step(device: str) -> None:
    runs = []
    for released in (True, False):
        model, optimizer, handle = make(device, released=released)
        train(model, optimizer, device, 3)
        model(tokens(3, device)).backward()
        if released:
            handle.remove()
        optimizer.step()
        optimizer.zero_grad()
        train(model, optimizer, device, 3, 4)
        model(tokens(9, device)).backward()
        model(tokens(10, device)).backward()  # gradients accumulate again
        assert all(p.grad is not None for p in model.parameters())
        optimizer.step()
        runs += [model, optimizer, handle]
    model, optimizer, handle = runs[:3]
    assert_equal(model, optimizer, *runs[3:5])
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    assert not model._forward_pre_hooks
    handle.remove()  # once more does nothing


def test_checkpoints_between_steps(device: str) -> None:
    model, optimizer, _ = make(device)
    train(model, optimizer, device, 3)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, device, 3, 3)
    resumed, resumed_optimizer, _ = make(device)
    resumed.load_state_dict(saved[0])
    resumed_optimizer.load_state_dict(saved[1])
    train(resumed, resumed_optimizer, device, 3, 3)
    assert_equal(model, optimizer, resumed, resumed_optimizer)


def test_a_copy_is_a_plain_model_with_a_plain_optimizer(device: str) -> None:
    """An average of weights is made from a copy; stepping that copy's gradients must not step the model."""
    model, optimizer, _ = make(device)
    train(model, optimizer, device, 2)
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    before = [p.clone() for p in model.parameters()]
    twin(tokens(2, device)).backward()
    assert all(p.grad is not None for p in twin.parameters())
    assert all(map(torch.equal, before, model.parameters()))
    twin_optimizer.step()
    model(tokens(2, device)).backward()
    optimizer.step()
    assert_equal(model, optimizer, twin, twin_optimizer)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(device: str, reentrant: bool) -> None:
    runs = []
    for released in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).to(device, torch.bfloat16)
        optimizer = Lion8bit(model.parameters(), lr=1e-2, min_quantized_numel=0)
        if released:
            gradient_release(model, optimizer)
        for step in range(20):
            x = torch.randn(4, 64, generator=torch.Generator().manual_seed(step)).to(device, torch.bfloat16)
            x.requires_grad_(True)
            for layer in model:
                x = checkpoint(layer, x, use_reentrant=reentrant)
            x.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        runs += [model, optimizer]
    assert_equal(*runs)


def test_a_part_of_the_optimizer_is_released(device: str) -> None:
    """What else it steps gets its gradients as ever, and so does a parameter that it does not have."""
    model, optimizer, _ = make(device, released=False)
    other, other_optimizer, _ = make(device, released=False)
    gradient_release(model.first, optimizer)
    model(tokens(0, device)).backward()
    assert model.first.weight.grad is None
    assert model.second.weight.grad is not None
    optimizer.step()
    other(tokens(0, device)).backward()
    other_optimizer.step()
    assert_equal(model, optimizer, other, other_optimizer)


def test_parameters_added_later(device: str) -> None:
    runs = []
    for released in (True, False):
        torch.manual_seed(0)
        model = Model().to(device, torch.bfloat16)
        first = list(model.first.parameters())
        others = [p for p in model.parameters() if all(p is not q for q in first)]
        optimizer = Lion8bit(first, lr=1e-2, min_quantized_numel=0)
        if released:
            gradient_release(model, optimizer)
        train(model, optimizer, device, 2)
        optimizer.add_param_group({"params": others, "lr": 1e-3})
        model.zero_grad()
        train(model, optimizer, device, 4, 2)
        runs += [model, optimizer]
    assert_equal(*runs)
    assert all(p._post_accumulate_grad_hooks for p in runs[0].parameters())


def test_parameters_put_where_others_were(device: str) -> None:
    """An object that has been freed leaves its id to another one."""
    model = nn.Linear(64, 64, bias=False).to(device)
    optimizer = Lion8bit(model.parameters(), lr=1e-2)
    gradient_release(model, optimizer)
    for _ in range(20):
        for released in (False, True):
            model(torch.ones(2, 64, device=device)).sum().backward()
            assert not released or model.weight.grad is None
            optimizer.step()
        optimizer.param_groups[0]["params"].clear()
        optimizer.state.clear()
        optimizer._forget()  # as the next step would
        model.weight = nn.Parameter(torch.ones(64, 64, device=device))
        optimizer.param_groups[0]["params"].append(model.weight)


def test_two_optimizers_over_one_model(device: str) -> None:
    torch.manual_seed(0)
    model = Model().to(device, torch.bfloat16)
    halves = [[*model.embedding.parameters(), *model.first.parameters()], None]
    halves[1] = [p for p in model.parameters() if all(p is not q for q in halves[0])]
    optimizers = [Lion8bit(half, lr=1e-2, min_quantized_numel=0, stochastic_rounding=False) for half in halves]
    for optimizer in optimizers:
        gradient_release(model, optimizer)
    torch.manual_seed(0)
    other = Model().to(device, torch.bfloat16)
    one = Lion8bit(other.parameters(), lr=1e-2, min_quantized_numel=0, stochastic_rounding=False)
    for step in range(4):
        model(tokens(step, device)).backward()
        for optimizer in optimizers:
            optimizer.step()
        other(tokens(step, device)).backward()
        one.step()
        one.zero_grad()
    assert all(map(torch.equal, model.parameters(), other.parameters()))


# --- Refused --------------------------------------------------------------------------------------------------------


def test_a_second_backward_before_the_step(device: str) -> None:
    model, _, _ = make(device)
    model(tokens(0, device)).backward()
    with pytest.raises(RuntimeError, match=r"second gradient before optimizer.step\(\).*cannot be accumulated"):
        model(tokens(1, device)).backward()


def test_a_learning_rate_changed_after_backward(device: str) -> None:
    model, optimizer, _ = make(device)
    model(tokens(0, device)).backward()
    optimizer.param_groups[0]["lr"] = 5e-3
    with pytest.raises(RuntimeError, match=r"group 0 were changed between backward and step \(0.01 became 0.005\)"):
        optimizer.step()


def test_what_could_not_be_stepped_in_backward_waits_for_step(device: str) -> None:
    runs = []
    for released in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(200, 200, bias=False).to(device)
        optimizer = Lion8bit(model.parameters(), lr=1e-2)
        loss = model(torch.ones(2, 200, device=device)).square().sum()
        if released:
            gradient_release(model, optimizer)
            optimizer.param_groups[0]["lr"] = math.nan
            with pytest.raises(ValueError, match="lr is nan"):
                loss.backward()
            optimizer.param_groups[0]["lr"] = 1e-2
        else:
            loss.backward()
        optimizer.step()
        runs += [model, optimizer]
    assert_equal(*runs)


def test_grad_scaler(device: str) -> None:
    model, optimizer, _ = make(device, torch.float32)
    scaler = torch.amp.GradScaler(device)
    scaler.scale(model(tokens(0, device))).backward()
    with pytest.raises(RuntimeError, match="GradScaler cannot be used with gradient_release"):
        scaler.step(optimizer)


class _Wrapped(DistributedDataParallel):
    """Without a process group."""

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module = module

    def forward(self, *args: Any) -> Any:
        with self._inside_ddp_forward():
            return self.module(*args)


@pytest.mark.parametrize("wrap", [_Wrapped, lambda model: nn.Sequential(_Wrapped(model))])
def test_ddp(device: str, wrap: Callable[[nn.Module], nn.Module]) -> None:
    model, optimizer, _ = make(device, released=False)
    with pytest.raises(TypeError, match=r"DistributedDataParallel.*fully_shard"):
        gradient_release(wrap(model), optimizer)


def test_ddp_around_a_released_model(device: str) -> None:
    model, _, handle = make(device)
    with pytest.raises(TypeError, match=r"DistributedDataParallel.*fully_shard"):
        _Wrapped(model)(tokens(0, device))
    handle.remove()
    _Wrapped(model)(tokens(0, device))


def test_released_twice(device: str) -> None:
    model, optimizer, handle = make(device)
    with pytest.raises(ValueError, match="released already"):
        gradient_release(model, optimizer)
    with pytest.raises(ValueError, match="released by another optimizer already"):
        gradient_release(model, Lion8bit(model.parameters()))
    handle.remove()
    gradient_release(model, optimizer)


def test_another_model_or_optimizer(device: str) -> None:
    model, optimizer, _ = make(device, released=False)
    with pytest.raises(ValueError, match="none of the model's parameters"):
        gradient_release(nn.Linear(4, 4), optimizer)
    with pytest.raises(TypeError, match="takes a Lion8bit or Lion, not AdamW"):
        gradient_release(model, torch.optim.AdamW(model.parameters()))


def test_flattened_parameters(device: str) -> None:
    model, optimizer, _ = make(device, released=False)
    model.first.weight._is_flat_param = True
    with pytest.raises(NotImplementedError, match="flattened buffer"):
        gradient_release(model, optimizer)


def test_a_step_without_any_backward_warns_as_ever(device: str) -> None:
    _, optimizer, _ = make(device)
    with pytest.warns(UserWarning, match="no parameter has a gradient"):
        optimizer.step()


def test_it_is_public() -> None:
    assert callable(lowbit_optim.gradient_release)
    assert "gradient_release" in lowbit_optim.__all__


def test_a_sparse_gradient_is_refused_by_the_step(device: str) -> None:
    model = nn.Sequential(nn.Embedding(50, 64, sparse=True), nn.Linear(64, 64)).to(device)
    optimizer = Lion8bit(model.parameters())
    gradient_release(model, optimizer)
    model(tokens(0, device)).sum().backward()
    with pytest.raises(RuntimeError, match="sparse=False"):
        optimizer.step()
