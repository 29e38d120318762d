"""The optimizer with the fused step: the same results as without, whatever happens to its parameters between steps."""

import copy
from typing import Any

import interpreter
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from lowbit_optim import Lion, Lion8bit
from lowbit_optim.subclasses import OptimState8bit

ON_GPU = torch.cuda.is_available()
STEPS = 100 if ON_GPU else 4
SHAPES = [(6, 128), (5, 75), (100,), (65, 16), (7, 3, 3, 3), (64,), (0, 64), (40, 1), (33, 130)]
gpu_only = pytest.mark.skipif(not ON_GPU, reason="needs a CUDA GPU")


@pytest.fixture(autouse=True)
def _eager():
    """The other step uncompiled, which saves minutes; test_compiled.py holds the compiled one to it."""
    with torch.compiler.set_stance("force_eager"):
        yield


def parameters(device: str, dtype: torch.dtype, shapes: list = SHAPES) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype)) for shape in shapes]


def pair(device: str, dtype: torch.dtype = torch.bfloat16, **options: Any) -> list[Lion8bit]:
    """The same optimizer twice: with the fused step, and without."""
    options = {"lr": 1e-2, "weight_decay": 0.1, "min_quantized_numel": 0, **options}
    return [Lion8bit(parameters(device, dtype), fused=fused, **options) for fused in (None, False)]


def all_parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def set_grads(optimizer: torch.optim.Optimizer, seed: int, skip: frozenset[int] = frozenset()) -> None:
    """At new addresses; the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    for i, p in enumerate(all_parameters(optimizer)):
        grad = torch.randn(p.shape, generator=generator) * 10 ** (-4 * torch.rand(p.shape, generator=generator))
        p.grad = None if i in skip or not p.requires_grad else grad.to(p.device, p.dtype)


def bits(x: Tensor) -> Tensor:
    return x.detach().contiguous().view({1: torch.int8, 2: torch.int16, 4: torch.int32}[x.element_size()]).cpu()


def parts(state: dict[str, Tensor]) -> list[Tensor]:
    exp_avg = state["exp_avg"]
    momentum = [exp_avg.codes, exp_avg.scale] if isinstance(exp_avg, OptimState8bit) else [exp_avg]
    return momentum + [value for key, value in state.items() if key == "master_residual"]


def assert_equal(a: torch.optim.Optimizer, b: torch.optim.Optimizer) -> None:
    for p, q in zip(all_parameters(a), all_parameters(b), strict=True):
        assert torch.equal(bits(p), bits(q)), tuple(p.shape)
        for part, other in zip(parts(a.state[p]), parts(b.state[q]), strict=True):
            assert torch.equal(bits(part), bits(other)), tuple(p.shape)
    assert [int(group["step"]) for group in a.param_groups] == [int(group["step"]) for group in b.param_groups]


def was_fused(optimizer: Lion8bit) -> bool:
    return any(plan.fused for plan in optimizer._plans.values())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stochastic_rounding": ON_GPU is False},  # the interpreter does not round to nearest
        {"decouple_lr": True},
        {"maximize": True},
        {"quantize": False},
        {"block_size": 32, "betas": (0.95, 0.98)},
        {"lr": torch.tensor(1e-2), "seed": 7},
        {"master_weight_bits": 24},
        {"master_weight_bits": 24, "stochastic_rounding": False},
        {"master_weight_bits": 32, "quantize": False},
    ],
    ids=str,
)
def test_the_fused_step_changes_no_bit(fused_device: str, options: dict[str, Any]) -> None:
    fused, plain = pair(fused_device, **options)
    for optimizer in (fused, plain):
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=STEPS)
        for step in range(STEPS):
            set_grads(optimizer, step)
            optimizer.step()
            scheduler.step()
    assert was_fused(fused)
    assert not was_fused(plain)
    assert_equal(fused, plain)


@pytest.mark.parametrize("master_weight_bits", [None, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes(fused_device: str, dtype: torch.dtype, master_weight_bits: int | None) -> None:
    fused, plain = pair(fused_device, dtype, master_weight_bits=master_weight_bits)
    for optimizer in (fused, plain):
        for step in range(STEPS):
            set_grads(optimizer, step)
            optimizer.step()
    assert_equal(fused, plain)


@pytest.mark.parametrize("master_weight_bits", [None, 24])
def test_parameters_come_go_and_move(fused_device: str, master_weight_bits: int | None) -> None:
    """Frozen, unfrozen, without a gradient, swapped, added, loaded: no step uses what a former one knew."""
    fused, plain = pair(fused_device, master_weight_bits=master_weight_bits)
    for optimizer in (fused, plain):
        params = all_parameters(optimizer)
        for step in range(12):
            if step == 2:
                params[0].requires_grad_(False)
            if step == 4:
                params[0].requires_grad_(True)
                params[1].data = params[1].data.clone()
            if step == 5:
                optimizer.add_param_group({"params": [nn.Parameter(params[0].detach().clone())], "lr": 1e-3})
            if step == 7:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            if step == 9:
                state = optimizer.state[params[8]]
                state.update({key: value.clone() for key, value in state.items()})
            set_grads(optimizer, step, skip=frozenset({2}) if step == 3 else frozenset())
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
    assert_equal(fused, plain)


def test_memory_layout_does_not_matter(fused_device: str) -> None:
    weight = torch.randn(8, 16, 3, 3).to(fused_device)
    results = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        p = nn.Parameter(weight.clone().to(memory_format=memory_format))
        optimizer = Lion8bit([p], lr=1e-2, weight_decay=0.1, min_quantized_numel=0)
        for step in range(3):
            torch.manual_seed(step)
            p.grad = torch.randn(weight.shape).to(fused_device).to(memory_format=memory_format)
            optimizer.step()
        assert p.is_contiguous(memory_format=memory_format)
        results.append((p, optimizer.state[p]["exp_avg"].codes))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_autograd_sees_that_weights_changed(fused_device: str) -> None:
    p = nn.Parameter(torch.ones(4, device=fused_device))
    loss = (p * p).sum()
    p.grad = torch.ones_like(p)
    Lion8bit([p], lr=1e-2).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_the_state_may_be_moved_away_between_steps(fused_device: str) -> None:
    """State is taken off the device and put back elsewhere; the step must not write to where it was."""
    fused, plain = pair(fused_device)
    for optimizer in (fused, plain):
        for step in range(3):
            set_grads(optimizer, step)
            optimizer.step()
            for state in optimizer.state.values():
                state["exp_avg"] = state["exp_avg"].to("cpu", copy=True).to(fused_device, copy=True)
    assert_equal(fused, plain)


def test_state_left_on_another_device_is_named(fused_device: str) -> None:
    fused, _ = pair(fused_device)
    set_grads(fused, 0)
    fused.step()
    before = [p.detach().clone() for p in all_parameters(fused)]
    state = fused.state[all_parameters(fused)[0]]
    state["exp_avg"] = OptimState8bit.zeros((6, 128), device="meta")
    with pytest.raises(RuntimeError, match=r"state of a parameter of shape \(6, 128\).*on meta"):
        fused.step()
    assert all(torch.equal(p, q) for p, q in zip(all_parameters(fused), before, strict=True))


@pytest.mark.parametrize("overflow", [False, True])
def test_a_grad_scaler_waits_for_nothing(fused_device: str, overflow: bool) -> None:
    results = []
    for fused in (None, False):
        p = nn.Parameter(torch.linspace(-1, 1, 384, device=fused_device).view(3, 128))
        optimizer = Lion8bit([p], lr=1e-2, weight_decay=0.1, min_quantized_numel=0, fused=fused)
        scaler = torch.amp.GradScaler(fused_device, init_scale=2.0**10)
        for step in range(4):
            optimizer.zero_grad()
            loss = (p * torch.linspace(1, 2, 384, device=fused_device).view(3, 128)).sum()
            scaler.scale(loss).backward()
            if overflow and step == 1:
                p.grad[0, 0] = float("inf")
            scaler.step(optimizer)
            scaler.update()
        results.append(optimizer)
    assert results[0]._step_supports_amp_scaling
    assert not results[1]._step_supports_amp_scaling
    assert_equal(*results)
    assert int(results[0].param_groups[0]["step"]) == (3 if overflow else 4)


def test_lr_zero_moves_nothing_and_does_not_count(fused_device: str) -> None:
    fused, plain = pair(fused_device)
    for optimizer in (fused, plain):
        for step, lr in enumerate([1e-2, 0.0, 1e-2]):
            optimizer.param_groups[0]["lr"] = lr
            before = [p.detach().clone() for p in all_parameters(optimizer)]
            set_grads(optimizer, step)
            optimizer.step()
            if lr == 0:
                assert all(
                    torch.equal(bits(p), bits(q)) for p, q in zip(all_parameters(optimizer), before, strict=True)
                )
    assert_equal(fused, plain)


def test_a_learning_rate_on_the_device(fused_device: str) -> None:
    """The count of steps follows it there."""
    fused, plain = pair(fused_device)
    for optimizer in (fused, plain):
        for step, lr in enumerate([1e-2, 0.0, 2e-2]):
            value = torch.tensor(lr, device=fused_device) if optimizer is fused else lr
            optimizer.param_groups[0]["lr"] = value
            set_grads(optimizer, step)
            optimizer.step()
    assert_equal(fused, plain)


def test_fused_and_not_share_checkpoints(fused_device: str) -> None:
    fused, plain = pair(fused_device)
    for optimizer, other in ((fused, plain), (plain, fused)):
        for step in range(3):
            set_grads(optimizer, step)
            optimizer.step()
        for p, q in zip(all_parameters(other), all_parameters(optimizer), strict=True):
            p.data.copy_(q.data)
        other.load_state_dict(optimizer.state_dict())
        assert other.defaults["fused"] is not optimizer.defaults["fused"]
        for each in (optimizer, other):
            set_grads(each, 9)
            each.step()
        assert_equal(fused, plain)


def test_copies_and_pickles_start_their_own_launches(fused_device: str) -> None:
    fused, _ = pair(fused_device)
    set_grads(fused, 0)
    fused.step()
    other = copy.deepcopy(fused)
    for optimizer in (fused, other):
        set_grads(optimizer, 1)
        optimizer.step()
    assert_equal(fused, other)


def test_fused_true_on_a_cpu_says_what_it_needs() -> None:
    optimizer = Lion8bit(parameters("cpu", torch.float32), fused=True)
    set_grads(optimizer, 0)
    with pytest.raises(RuntimeError, match=r"fused=True, .* shape \(6, 128\) .* on cpu, and the kernel needs CUDA"):
        optimizer.step()


def test_fused_true_without_triton_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from lowbit_optim import options

    monkeypatch.setattr(options, "has_triton_package", lambda: False)
    with pytest.raises(RuntimeError, match="fused=True needs Triton"):
        Lion([nn.Parameter(torch.ones(3))], fused=True)


@pytest.mark.parametrize(
    "change",
    [
        lambda p: p.data[:3],
        lambda p: p.data.view(12, 64),
        lambda p: p.data.view(torch.float16),
        lambda p: p.data.as_strided((6, 128), (1, 6)),
    ],
    ids=["rows", "shape", "dtype", "strides"],
)
def test_a_parameter_changed_where_it_is_keeps_no_old_plan(fused_device: str, change: Any) -> None:
    """``p.data`` replaced by another view of the same memory: the same as without the fused step, or an error."""
    results = []
    for fused in (None, False):
        whole = torch.ones(6, 128, dtype=torch.bfloat16, device=fused_device)
        p = nn.Parameter(whole)
        optimizer = Lion8bit([p], lr=1e-2, min_quantized_numel=0, fused=fused)
        p.grad = torch.ones_like(p)
        optimizer.step()
        p.grad = None
        p.data = change(p)
        p.grad = torch.linspace(-1, 1, p.numel(), device=fused_device).to(p.dtype).view(p.shape)
        try:
            optimizer.step()
            results.append(whole)
        except (RuntimeError, TypeError):
            results.append(None)
    if results[0] is not None:
        assert results[1] is not None
        assert torch.equal(bits(results[0]), bits(results[1]))


def test_a_parameter_frozen_in_the_first_step_trains_later(fused_device: str) -> None:
    for optimizer in pair(fused_device):
        params = all_parameters(optimizer)
        params[0].requires_grad_(False)
        set_grads(optimizer, 0)
        optimizer.step()
        params[0].requires_grad_(True)
        before = params[0].detach().clone()
        set_grads(optimizer, 1)
        optimizer.step()
        assert not torch.equal(params[0], before)


@pytest.mark.parametrize("wrong", ["state", "lr", "gradient"])
def test_nothing_moves_if_a_later_group_is_wrong(fused_device: str, wrong: str) -> None:
    for fused in (None, False):
        first, second = parameters(fused_device, torch.bfloat16, [(6, 128), (5, 75)])
        optimizer = Lion8bit([{"params": first}, {"params": second}], lr=1e-2, min_quantized_numel=0, fused=fused)
        set_grads(optimizer, 0)
        optimizer.step()
        if wrong == "state" and fused is None:
            optimizer.state[second]["exp_avg"] = OptimState8bit.zeros((2, 128), device=fused_device)
        elif wrong == "lr":
            optimizer.param_groups[1]["lr"] = float("nan")
        else:
            second.grad = second.grad.to_sparse()
        before = first.detach().clone()
        with pytest.raises((RuntimeError, ValueError)):
            optimizer.step()
        assert torch.equal(first, before)
        assert [int(group["step"]) for group in optimizer.param_groups] == [1, 1]


def test_a_gradient_from_before_its_parameter_grew_is_named(fused_device: str) -> None:
    p = nn.Parameter(torch.ones(4, 64, device=fused_device))
    p.grad = torch.ones_like(p)
    p.data = torch.ones(8, 64, device=fused_device)
    with pytest.raises(RuntimeError, match=r"\(8, 64\) has a gradient of shape \(4, 64\)"):
        Lion8bit([p], lr=1e-2).step()


def test_gradients_of_a_tensor_subclass(fused_device: str) -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    results = []
    for fused in (None, False):
        p = parameters(fused_device, torch.float32, [(6, 128)])[0]
        optimizer = Lion8bit([p], lr=1e-2, min_quantized_numel=0, fused=fused)
        for step in range(3):
            torch.manual_seed(step)
            grad = torch.randn(6, 128).to(fused_device)
            p.grad = grad if step == 0 else TwoTensor(grad, grad)
            optimizer.step()
        results.append(optimizer)
    assert_equal(*results)


def test_a_grad_scaler_and_a_compiled_step_do_not_mix_silently(fused_device: str) -> None:
    optimizer = pair(fused_device)[0]
    set_grads(optimizer, 0)
    optimizer.grad_scale = torch.tensor([2.0**16], device=fused_device)
    optimizer.found_inf = torch.tensor([0.0], device=fused_device)
    with torch.compiler.set_stance("default"), pytest.raises(Exception, match="GradScaler left its scale"):
        torch.compile(optimizer.step, backend="eager")()


# --- On a GPU ---------------------------------------------------------------------------------------------------------


@gpu_only
def test_a_step_waits_for_nothing() -> None:
    fused, _ = pair("cuda")
    set_grads(fused, 0)
    fused.step()
    grads = [[torch.randn_like(p) for p in all_parameters(fused)] for _ in range(3)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for some in grads:
            for p, grad in zip(all_parameters(fused), some, strict=True):
                p.grad = grad
            fused.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@gpu_only
def test_a_thousand_steps_ahead_of_the_device() -> None:
    """Gradients at changing addresses, and tables written while earlier ones are still to be read."""
    fused, plain = pair("cuda")
    grads = [[torch.randn_like(p) for p in all_parameters(fused)] for _ in range(7)]
    for optimizer in (fused, plain):
        torch.cuda._sleep(200_000_000)
        for step in range(1000):
            for p, grad in zip(all_parameters(optimizer), grads[step % 7], strict=True):
                p.grad = grad
            optimizer.step()
    assert_equal(fused, plain)


@gpu_only
def test_a_captured_graph_follows_its_schedule() -> None:
    fused, plain = pair("cuda", lr=torch.tensor(1e-2, device="cuda"))
    for optimizer in (fused, plain):
        set_grads(optimizer, 0)
        optimizer.step()
    graph = torch.cuda.CUDAGraph()
    set_grads(fused, 1)
    with torch.cuda.graph(graph):
        fused.step()
    for step in range(100):
        for optimizer in (fused, plain):
            optimizer.param_groups[0]["lr"].fill_(1e-2 / (1 + step))
        generator = torch.Generator().manual_seed(step)
        for p, q in zip(all_parameters(fused), all_parameters(plain), strict=True):
            grad = torch.randn(p.shape, generator=generator).to("cuda", p.dtype)
            p.grad.copy_(grad)
            q.grad = grad
        graph.replay()
        plain.step()
        if step == 50:
            torch.cuda.empty_cache()
    assert_equal(fused, plain)


@gpu_only
@pytest.mark.parametrize("missing", ["state", "lr", "lr of 0"])
def test_what_a_graph_cannot_capture_is_said(missing: str) -> None:
    lr = {"state": torch.tensor(1e-2, device="cuda"), "lr": 1e-2, "lr of 0": 0.0}[missing]
    optimizer = Lion8bit(parameters("cuda", torch.bfloat16), lr=lr)
    set_grads(optimizer, 0)
    if missing != "state":
        optimizer.step()
    message = "before it is captured" if missing == "state" else "learning rate .* tensor on the device"
    with pytest.raises(RuntimeError, match=message), torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimizer.step()


@gpu_only
def test_another_stream() -> None:
    fused, plain = pair("cuda")
    stream = torch.cuda.Stream()
    for step in range(20):
        for optimizer in (fused, plain):
            set_grads(optimizer, step)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream if step % 2 else torch.cuda.current_stream()):
                optimizer.step()
            torch.cuda.current_stream().wait_stream(stream)
    assert_equal(fused, plain)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_parameters_on_two_devices() -> None:
    optimizers = []
    for fused in (None, False):
        params = parameters("cuda:0", torch.bfloat16) + parameters("cuda:1", torch.bfloat16)
        optimizer = Lion8bit(params, lr=1e-2, min_quantized_numel=0, fused=fused)
        for step in range(10):
            set_grads(optimizer, step)
            optimizer.step()
        optimizers.append(optimizer)
    assert_equal(*optimizers)


@gpu_only
def test_temporary_memory_is_the_table() -> None:
    params = [nn.Parameter(torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16)) for _ in range(50)]
    optimizer = Lion8bit(params)
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer.step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    optimizer.step()
    assert torch.cuda.max_memory_allocated() - before < 100_000


def test_fake_tensors_are_stepped_otherwise() -> None:
    """As in an estimate of memory: they have no addresses for the kernel."""
    device = "cuda" if ON_GPU else "cpu"
    with interpreter.fused_on(device), FakeTensorMode():
        p = nn.Parameter(torch.randn(64, 128, device=device))
        optimizer = Lion8bit([p])
        p.grad = torch.randn_like(p)
        optimizer.step()
        assert optimizer.state[p]["exp_avg"].codes.shape == p.shape
        assert not was_fused(optimizer)


def test_a_saved_momentum_put_into_the_state_is_named(fused_device: str) -> None:
    optimizer, _ = pair(fused_device)
    set_grads(optimizer, 0)
    optimizer.step()
    p = all_parameters(optimizer)[0]
    optimizer.state[p]["exp_avg"] = optimizer.state_dict()["state"][0]["exp_avg"]
    with pytest.raises(TypeError, match=r"parameter 0 .* as it is saved"):
        optimizer.step()
