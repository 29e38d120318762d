"""The compiled step: which graphs are made, that it equals the eager step in every bit, and life without it."""

import copy
import gc
import itertools
import os
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline
from reference import lion_reference
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.exc import InvalidCxxCompiler
from torch._inductor.utils import fresh_cache, run_and_get_code
from torch._subclasses import FakeTensorMode
from torch.optim import lr_scheduler
from torch.utils.flop_counter import FlopCounterMode

from lowbit_optim import Lion, Lion8bit
from lowbit_optim import optimizer as optimizer_module
from lowbit_optim.subclasses import OptimState8bit
from lowbit_optim.subclasses.blockwise import dequantize

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.filterwarnings("error"),
    pytest.mark.filterwarnings("ignore:.*bf16 and fp16 are mixed:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),  # torch's own, in its first compile
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*Profiler clears events:UserWarning"),
]

ROOT = Path(__file__).parent.parent
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BETAS = (0.9, 0.99)
_AS_INTEGERS = {
    torch.int8: torch.int8,
    torch.int16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float32: torch.int32,
}
Shape = tuple[int, ...]

ALIGNED: list[Shape] = [
    (1, 64),
    (2, 64),
    (3, 128),
    (7, 192),
    (64, 64),
    (1, 1024),
    (5, 4, 64),
    (3, 64, 1, 1),
    (2, 3, 128),
]
RAGGED: list[Shape] = [(1, 65), (2, 63), (3, 100), (1, 127), (17, 75), (64, 16), (5, 17), (2, 1, 65), (3, 5, 4, 4)]
FLAT: list[Shape] = [(1,), (2,), (63,), (64,), (65,), (1000,), (1, 1), (40, 1), (33, 15)]
EMPTY: list[Shape] = [(0, 64), (0, 65), (0,)]
ONE_OF_EACH: list[Shape] = [(6, 128), (5, 75), (100,)]


def parameters(shapes: Iterable[Shape], dtype: torch.dtype, device: str) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype)) for shape in shapes]


def make(params: Iterable, cls: type[torch.optim.Optimizer] = Lion8bit, **options) -> torch.optim.Optimizer:
    return cls(params, **{"lr": 1e-2, "weight_decay": 0.1, "min_quantized_numel": 0, "fused": False, **options})


def all_parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def set_grads(optimizer: torch.optim.Optimizer, seed: int) -> None:
    """Of magnitudes from 1e-6 to 1; the same for the same seed and shapes."""
    generator = torch.Generator().manual_seed(1000 + seed)
    for p in all_parameters(optimizer):
        magnitude = 10 ** (-6 * torch.rand(p.shape, generator=generator))
        p.grad = (magnitude * torch.randn(p.shape, generator=generator)).to(p.device, p.dtype)


def train(optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> torch.optim.Optimizer:
    for i in range(first, first + steps):
        set_grads(optimizer, i)
        optimizer.step()
    return optimizer


def bits(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Weights, momentum as it is stored, and residuals."""
    tensors = []
    for p in all_parameters(optimizer):
        exp_avg = optimizer.state[p]["exp_avg"]
        parts = [exp_avg.codes, exp_avg.scale] if isinstance(exp_avg, OptimState8bit) else [exp_avg]
        parts += [value for key, value in optimizer.state[p].items() if key == "master_residual"]
        tensors += [t.detach().cpu().view(_AS_INTEGERS[t.dtype]) for t in (p, *parts)]
    return tensors


def assert_same_bits(actual: torch.optim.Optimizer, expected: torch.optim.Optimizer) -> None:
    for i, (a, e) in enumerate(zip(bits(actual), bits(expected), strict=True)):
        assert torch.equal(a, e), f"tensor {i} of shape {tuple(e.shape)} differs in {(a != e).sum()} elements"


def eager() -> AbstractContextManager:
    return torch.compiler.set_stance("force_eager")


def graphs() -> int:
    """Compiled in this process so far."""
    return counters["stats"]["unique_graphs"]


@pytest.fixture
def nothing_compiled() -> Iterable[None]:
    torch._dynamo.reset()
    optimizer_module._compiled_update.cache_clear()
    yield
    torch._dynamo.reset()
    optimizer_module._compiled_update.cache_clear()


# --- Eager equals compiled ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_eager_equals_compiled_in_every_bit(dtype: torch.dtype, device: str) -> None:
    """100 steps of 30 awkward shapes, with stochastic rounding."""
    shapes = [*ALIGNED, *RAGGED, *FLAT, *EMPTY]
    assert len(shapes) == 30
    with eager():
        expected = train(make(parameters(shapes, dtype, device)), 100)
    assert_same_bits(train(make(parameters(shapes, dtype, device)), 100), expected)


@pytest.mark.parametrize(("master_weight_bits", "stochastic_rounding"), [(24, True), (24, False), (32, True)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_eager_equals_compiled_with_master_weights(
    dtype: torch.dtype, master_weight_bits: int, stochastic_rounding: bool, device: str
) -> None:
    options = {"master_weight_bits": master_weight_bits, "stochastic_rounding": stochastic_rounding}
    shapes = [*ALIGNED, *RAGGED, *FLAT, *EMPTY]
    optimizers = [make(parameters(shapes, dtype, device), **options) for _ in range(2)]
    for optimizer in optimizers:  # float16's own spacing changes at 2**-14
        for p in all_parameters(optimizer):
            p.data *= 10 ** -torch.linspace(0, 8, p.numel(), device=device).view(p.shape).to(p.dtype)
    with eager():
        train(optimizers[0], 20)
    before = graphs()
    train(optimizers[1], 20)
    assert graphs() - before <= 3, "as many as without"
    assert_same_bits(*optimizers)


@pytest.mark.parametrize("options", [{"maximize": True}, {"decouple_lr": True}, {"stochastic_rounding": False}])
def test_eager_equals_compiled_with_options(options: dict, device: str) -> None:
    with eager():
        expected = train(make(parameters(ONE_OF_EACH, torch.bfloat16, device), **options), 10)
    assert_same_bits(train(make(parameters(ONE_OF_EACH, torch.bfloat16, device), **options), 10), expected)


def test_odd_strides_compile(device: str) -> None:
    """Report 57: tall, transposed and channels-last weights gave the compiler indexing that it could not handle.

    Compiled and eager agree, and equal contiguous weights.
    """
    values = parameters([(152, 64), (192, 256), (64, 3, 7, 7)], torch.float32, device)
    tall, wide, conv = (p.detach() for p in values)
    odd = [tall.clone(), wide.t().contiguous().t(), conv.to(memory_format=torch.channels_last)]
    assert not odd[1].is_contiguous()
    assert not odd[2].is_contiguous()
    compiled = train(make([nn.Parameter(x.clone()) for x in odd]), 3)
    with eager():
        uncompiled = train(make([nn.Parameter(x.clone()) for x in odd]), 3)
        contiguous = train(make(values), 3)
    assert_same_bits(compiled, uncompiled)
    assert_same_bits(compiled, contiguous)
    assert [p.stride() for p in all_parameters(compiled)] == [x.stride() for x in odd]


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize("max_autotune", [False, True])
def test_autotuning_applies_an_update_once(max_autotune: bool, device: str) -> None:
    """Report 19: tuning reran an in-place kernel, and the first step after a resume was applied many times."""
    saved = train(make(parameters(ONE_OF_EACH, torch.float32, device), lr=1e-3), 2).state_dict()
    resumed = [make(parameters(ONE_OF_EACH, torch.float32, device), lr=1e-3) for _ in range(2)]
    for optimizer in resumed:
        optimizer.load_state_dict(copy.deepcopy(saved))
    torch._dynamo.reset()
    with torch._inductor.config.patch(max_autotune=max_autotune, coordinate_descent_tuning=max_autotune):
        train(resumed[0], 1, first=2)
    with eager():
        train(resumed[1], 1, first=2)
    assert_same_bits(*resumed)


# --- Graphs ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize("dtype", DTYPES)
def test_forty_shapes_make_three_graphs(dtype: torch.dtype, device: str) -> None:
    """Report 51: a graph a shape ran into Dynamo's limit. Here: aligned rows, ragged rows, unquantised; then none."""
    shapes = [*ALIGNED, *RAGGED, *FLAT, *((i, 64 * (i % 3) + 20 * (i % 2) + 64) for i in range(2, 15))]
    assert len(set(shapes)) == 40
    optimizer = make(parameters(shapes, dtype, device))
    before = graphs()
    train(optimizer, 1)
    assert graphs() - before <= 3
    before = graphs()
    train(optimizer, 2)
    train(make(parameters(shapes, dtype, device), block_size=64, lr=torch.tensor(0.1), betas=(0.5, 0.6)), 1)
    assert graphs() == before, "another optimizer, and later steps, share the graphs"


@pytest.mark.usefixtures("nothing_compiled")
def test_more_graphs_than_dynamos_limit(device: str) -> None:
    """Report 51: with each dtype of weights and gradients, rounded in both ways, all steps stay compiled."""
    before = graphs()
    with torch._dynamo.config.patch(recompile_limit=8):  # torch's default; importing timm changes it
        for dtype, grad_dtype, rounding in itertools.product(DTYPES, DTYPES, (True, False)):
            (p,) = parameters([(100,)], dtype, device)
            p.grad_dtype = grad_dtype
            p.grad = torch.ones(100, device=device, dtype=grad_dtype)
            make([p], stochastic_rounding=rounding).step()
        assert torch._dynamo.config.recompile_limit == 8
    assert graphs() - before == 15  # fp32 weights are never rounded stochastically


@pytest.mark.usefixtures("nothing_compiled")
def test_the_first_step_of_many_parameters_takes_seconds(device: str) -> None:
    """Report 53: 12 minutes to compile the step of a 7B model. 300 parameters of 6 shapes: 3 graphs, 60 s at most."""
    shapes = [(32, 64), (64, 96), (128, 64), (16, 3, 8, 8), (64,), (96,)]
    optimizer = make(parameters(shapes * 50, torch.bfloat16, device))
    set_grads(optimizer, 0)
    before, start = graphs(), time.perf_counter()
    optimizer.step()
    assert graphs() - before <= 3
    assert time.perf_counter() - start < 60


def test_counting_steps_does_not_recompile(device: str) -> None:
    """Report 52: a step count that is an int of the compiled function makes a graph a step."""
    optimizer = train(make(parameters(ONE_OF_EACH, torch.bfloat16, device)), 1)
    before = graphs()
    train(optimizer, 10, first=1)
    assert graphs() == before
    assert optimizer.param_groups[0]["step"] == 11


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_left_in_place_do_not_matter(set_to_none: bool, device: str) -> None:
    """Report 33: Dynamo looked at the gradients of its inputs, and failed."""
    optimizer = make(parameters(ONE_OF_EACH, torch.float32, device))
    for i in range(5):
        for j, p in enumerate(all_parameters(optimizer)):
            ((i + j + 1) * p).sum().backward()
        if i == 1:
            before = graphs()
        optimizer.step()
        optimizer.zero_grad(set_to_none)
    assert graphs() == before


def test_a_gradient_of_another_dtype_compiles(device: str) -> None:
    """fp32 weights whose gradients are reduced in bfloat16 (``p.grad_dtype``)."""
    optimizers = [make(parameters(ONE_OF_EACH, torch.float32, device)) for _ in range(2)]
    for i in range(3):
        for optimizer, stance in zip(optimizers, ("default", "force_eager"), strict=True):
            generator = torch.Generator().manual_seed(i)
            for p in all_parameters(optimizer):
                p.grad_dtype = torch.bfloat16
                p.grad = torch.randn(p.shape, generator=generator).to(device, torch.bfloat16)
            with torch.compiler.set_stance(stance):
                optimizer.step()
    assert_same_bits(*optimizers)


@pytest.mark.usefixtures("nothing_compiled")
def test_one_step_is_one_kernel(device: str) -> None:
    """Decode, update, round and encode are fused: no decoded momentum is ever written to memory.

    But for ragged rows on a GPU, whose unbacked sizes keep Inductor from fusing all of it.
    """
    lines = []
    kinds = list(zip(("aligned", "ragged", "unquantised"), ONE_OF_EACH, strict=True))
    cases = [(torch.float32, *kinds[0], None), *((torch.bfloat16, *kind, None) for kind in kinds)]
    cases += [(torch.bfloat16, f"aligned, {bits} bits", ONE_OF_EACH[0], bits) for bits in (24, 32)]
    for dtype, name, shape, master_weight_bits in cases:
        optimizer = make(parameters([shape], dtype, device), master_weight_bits=master_weight_bits)
        set_grads(optimizer, 0)
        with torch._inductor.config.patch(fx_graph_cache=False):
            _, sources = run_and_get_code(optimizer.step)
        kernels = [len(re.findall(r"async_compile\.(?:cpp_pybinding|cpp|triton)\(", source)) for source in sources]
        lines.append(f"{str(dtype).removeprefix('torch.')} {name}: {kernels}")
    assert_expected_inline(
        "\n".join(lines),
        """\
float32 aligned: [1]
bfloat16 aligned: [1]
bfloat16 ragged: [RAGGED]
bfloat16 unquantised: [1]
bfloat16 aligned, 24 bits: [1]
bfloat16 aligned, 32 bits: [1]""".replace("RAGGED", "14" if device == "cuda" else "1"),
    )


# --- Against 32-bit Lion --------------------------------------------------------------------------------------------

on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="measures a GPU")


def peak_of_ten_steps(cls: type[torch.optim.Optimizer]) -> tuple[int, int]:
    """Bytes allocated and reserved at the peak, state and first step included, above what was there before."""
    gc.collect()
    torch.cuda.empty_cache()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    params = [nn.Parameter(torch.ones(2048, 2048, device="cuda")) for _ in range(16)]
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer = make(params, cls)
    for _ in range(10):
        optimizer.step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - allocated, torch.cuda.max_memory_reserved() - reserved


@on_cuda
def test_the_peak_falls_by_what_the_state_saves() -> None:
    """Report 72: the state was smaller and the peak was not, for temporary copies and fragmentation."""
    for cls in (Lion8bit, Lion):  # compiling, autotuning included, allocates too
        peak_of_ten_steps(cls)
    (allocated8, reserved8), (allocated32, reserved32) = peak_of_ten_steps(Lion8bit), peak_of_ten_steps(Lion)
    numel = 16 * 2048 * 2048
    assert allocated32 - allocated8 >= 2.9 * numel  # 4 bytes to 1 + 2/64
    assert reserved32 - reserved8 >= 2.5 * numel  # the allocator reserves 20 MiB at a time


class ForeachLion:
    """Lion, algorithm 2, in torch's multi-tensor ops: one launch an op however many tensors there are."""

    def __init__(self, params: list[nn.Parameter], lr: float, weight_decay: float) -> None:
        self.params, self.lr, self.weight_decay = params, lr, weight_decay
        self.exp_avgs = [torch.zeros_like(p) for p in params]

    @torch.no_grad()
    def step(self) -> None:
        beta1, beta2 = BETAS
        grads = [p.grad for p in self.params]
        updates = torch._foreach_lerp(self.exp_avgs, grads, 1 - beta1)
        torch._foreach_sign_(updates)
        torch._foreach_mul_(self.params, 1 - self.lr * self.weight_decay)
        torch._foreach_add_(self.params, updates, alpha=-self.lr)
        torch._foreach_lerp_(self.exp_avgs, grads, 1 - beta2)


def tiny_parameters(device: str) -> list[nn.Parameter]:
    params = parameters([(64,), (16, 3, 3, 3), (24, 16), (64, 63)] * 75, torch.float32, device)
    for p in params:
        p.grad = torch.randn_like(p)
    return params


def test_the_foreach_lion_that_time_is_measured_against_is_lion(device: str) -> None:
    params = tiny_parameters(device)[:4]
    optimizer = ForeachLion(params, lr=1e-2, weight_decay=0.1)
    for _ in range(3):
        for p in params:
            p.grad = torch.randn_like(p)
        tensors = zip(params, optimizer.exp_avgs, strict=True)
        old = [(p.detach().double(), p.grad.double(), m.double()) for p, m in tensors]
        optimizer.step()
        for p, m, before in zip(params, optimizer.exp_avgs, old, strict=True):
            new_p, new_m = lion_reference(*before, 1e-2, *BETAS, 0.1)
            torch.testing.assert_close(p.detach().double(), new_p, rtol=1e-6, atol=1e-8)
            torch.testing.assert_close(m.double(), new_m, rtol=1e-6, atol=1e-8)


def seconds_of_a_step(step: Callable[[], object]) -> float:
    """The fastest of ten, since a busy machine only ever adds to it."""
    times = []
    for _ in range(13):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times[3:])


@on_cuda
def test_many_tiny_tensors_take_at_most_twice_the_time_of_foreach_lion() -> None:
    """Report 73: a ResNet's step became 1.8 times as slow."""
    foreach = ForeachLion(tiny_parameters("cuda"), lr=1e-2, weight_decay=0.1)
    optimizer = Lion8bit(tiny_parameters("cuda"), lr=1e-2, weight_decay=0.1)
    assert seconds_of_a_step(optimizer.step) <= 2 * seconds_of_a_step(foreach.step)


# --- Hyper-parameters change without a recompile --------------------------------------------------------------------

SCHEDULERS: dict[str, Callable] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda i: 0.9**i),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=1e-2, total_steps=60, cycle_momentum=True),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=7),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, 0.1, total_iters=10), lr_scheduler.CosineAnnealingLR(o, 40)],
        milestones=[10],
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=2),
}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("tensor_lr", [False, True])
def test_schedulers_change_the_result_and_no_graph(name: str, tensor_lr: bool, device: str) -> None:
    """Reports 47 and 48: 50 steps under a scheduler, with two groups of their own lr; 0 recompiles after the first.

    Each step is the reference's with the lr and betas that torch's AdamW has under the same schedule.
    """
    lrs, weight_decay = (1e-3, 4e-3), 0.1
    params = parameters([(8, 64), (8, 75), (100,), (8, 64)], torch.float32, device)
    optimizer, twin = (
        cls(
            [
                {"params": p[:2], "lr": torch.tensor(lrs[0]) if tensor_lr else lrs[0]},
                {"params": p[2:], "lr": torch.tensor(lrs[1]) if tensor_lr else lrs[1]},
            ],
            betas=BETAS,
            weight_decay=weight_decay,
            **options,
        )
        for cls, p, options in (
            (Lion8bit, params, {"min_quantized_numel": 0}),
            (torch.optim.AdamW, [nn.Parameter(p.detach().clone()) for p in params], {"foreach": False}),
        )
    )
    scheduler, twin_scheduler = SCHEDULERS[name](optimizer), SCHEDULERS[name](twin)
    seen = set()
    for i in range(50):
        set_grads(optimizer, i)
        if i == 0:
            train(optimizer, 1)  # so that there is momentum to start from
        old = [(p.detach().double(), dequantize(optimizer.state[p]["exp_avg"]).double()) for p in params]
        if i == 1:
            before = graphs()
        optimizer.step()
        for group, twin_group in zip(optimizer.param_groups, twin.param_groups, strict=True):
            lr, betas = float(twin_group["lr"]), twin_group["betas"]
            seen.add(lr)
            for p in group["params"]:
                old_p, old_m = old[[q is p for q in params].index(True)]
                new_p, new_m = lion_reference(old_p, p.grad.double(), old_m, lr, *betas, weight_decay)
                torch.testing.assert_close(p.detach().double(), new_p, rtol=1e-6, atol=1e-8)
                coarse = isinstance(optimizer.state[p]["exp_avg"], OptimState8bit)
                allowed = 0.009 * new_m.abs().amax(-1, keepdim=True) if coarse else 1e-6
                assert ((dequantize(optimizer.state[p]["exp_avg"]).double() - new_m).abs() <= allowed).all()
        twin.step()  # without gradients: schedulers want to see it
        metric = (1.0,) if name == "ReduceLROnPlateau" else ()
        scheduler.step(*metric)
        twin_scheduler.step(*metric)
    assert graphs() == before
    assert len(seen) > 5, "the schedule did something"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="looks for copies to a GPU")
def test_a_scheduler_copies_nothing_to_the_device() -> None:
    """Report 47: an lr tensor made on the device each step cost more than the step."""
    optimizer = train(make(parameters(ONE_OF_EACH, torch.bfloat16, "cuda")), 2)
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, 20)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(5):
            optimizer.step()
            scheduler.step()
        torch.cuda.synchronize()
    assert not [e.name for e in profile.events() if "HtoD" in e.name]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lr_in_any_form_at_any_time(dtype: torch.dtype, device: str) -> None:
    """Reports 21, 35 and 48: float, 0-D or (1,) tensor, on the CPU or the device, set by hand: same bits, no graph."""
    values = [1e-3, 3e-3, 0.0, 2e-3]
    forms: list[Callable] = [float, torch.tensor, lambda x: torch.tensor([x])]
    if device == "cuda":
        forms += [lambda x: torch.tensor(x, device="cuda"), lambda x: torch.tensor([x], device="cuda")]
    optimizers = [make(parameters(ONE_OF_EACH, dtype, device), lr=form(5e-3)) for form in forms]
    for optimizer in optimizers:
        train(optimizer, 1)
    before = graphs()
    for i, value in enumerate(values, 1):
        for optimizer, form in zip(optimizers, forms, strict=True):
            optimizer.param_groups[0]["lr"] = form(value)
            train(optimizer, 1, first=i)
    if device == "cpu":  # a value that lives on a device needs graphs of its own
        assert graphs() == before
    for optimizer in optimizers[1:]:
        assert_same_bits(optimizer, optimizers[0])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a second device")
@pytest.mark.parametrize("lr_device", ["cpu", "cuda"])
def test_weights_on_several_devices_share_a_group(lr_device: str) -> None:
    """Report 35: the lr was on one device and an offloaded weight on another."""
    mixed = make(
        [*parameters(ONE_OF_EACH, torch.bfloat16, "cpu"), *parameters(ONE_OF_EACH, torch.bfloat16, "cuda")],
        lr=torch.tensor(1e-2, device=lr_device),
    )
    with eager():
        expected = train(make(parameters([*ONE_OF_EACH, *ONE_OF_EACH], torch.bfloat16, "cpu")), 0)
        for p, q in zip(all_parameters(expected), all_parameters(mixed), strict=True):
            p.data.copy_(q.data)
        train(expected, 3)
    assert_same_bits(train(mixed, 3), expected)


def test_groups_keep_their_own_values(device: str) -> None:
    """No group's lr, betas or decay reaches another's: each trains as it would in an optimizer of its own."""
    options = [
        {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1},
        {"lr": 1e-1, "betas": (0.5, 0.8), "weight_decay": 0.0},
        {"lr": torch.tensor(1e-2), "betas": (0.8, 0.9), "weight_decay": 1.0, "quantize": False},
    ]
    together = make([{"params": parameters([(4, 64)], torch.float32, device), **o} for o in options])
    apart = [make(parameters([(4, 64)], torch.float32, device), **o) for o in options]
    for i in range(5):
        train(together, 1, first=i)
        for single, p in zip(apart, all_parameters(together), strict=True):
            all_parameters(single)[0].grad = p.grad.clone()
            single.step()
        together.param_groups[i % 3]["lr"] = apart[i % 3].param_groups[0]["lr"] = 0.01 * i
    for i, single in enumerate(apart):
        assert torch.equal(all_parameters(single)[0], all_parameters(together)[i])


# --- Inside hooks and other people's graphs -------------------------------------------------------------------------


def test_a_step_inside_backward(device: str) -> None:
    """Report 56: an optimizer a parameter, stepping in a hook, equals the usual loop."""

    def model() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 75), nn.Tanh(), nn.Linear(75, 128)).to(device)

    usual, hooked = model(), model()
    optimizer = make(usual.parameters())
    optimizers = {p: make([p]) for p in hooked.parameters()}

    def step(p: Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in hooked.parameters():
        p.register_post_accumulate_grad_hook(step)
    for _ in range(3):
        x = torch.randn(8, 64, device=device)
        usual(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        hooked(x).square().sum().backward()
    for expected, p in zip(usual.parameters(), hooked.parameters(), strict=True):
        assert torch.equal(p, expected)
        assert p.grad is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_whole_training_step_in_the_users_own_compile(dtype: torch.dtype, device: str) -> None:
    """The step is traced into the user's graph: results close to eager, and no recompile once warm."""

    def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
        loss = (model(x).float() - 1).square().mean()
        value = loss.detach()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value

    def run(train_step: Callable) -> tuple[list[float], list[int], torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Linear(64, 32).to(device, dtype)
        optimizer = make(model.parameters(), lr=1e-3)
        losses, made = [], []
        for _ in range(8):
            losses.append(train_step(model, optimizer, torch.randn(16, 64, device=device).to(dtype)).item())
            made.append(graphs())
        return losses, made, optimizer

    with eager():
        expected_losses, _, expected = run(train_step)
    losses, made, optimizer = run(torch.compile(train_step))
    assert losses == pytest.approx(expected_losses, rel=1e-5 if dtype == torch.float32 else 1e-2)
    assert made[3] == made[-1]
    assert optimizer.param_groups[0]["step"] == 8
    for p, q in zip(all_parameters(optimizer), all_parameters(expected), strict=True):
        tolerance = 1e-6 if dtype == torch.float32 else 0.02
        assert ((p - q).abs() > tolerance).float().mean() < 0.01


def test_rounding_noise_goes_on_in_the_users_own_compile(device: str) -> None:
    """Were the noise a constant of the graph, the same weights would move in each step; lr 0 does not count as one."""
    p = nn.Parameter(torch.ones(64, 64, device=device, dtype=torch.bfloat16))
    optimizer = make([p], lr=torch.tensor(1e-4), weight_decay=0.0)
    step, moved = torch.compile(optimizer.step), []
    p.grad = torch.ones_like(p)
    for _ in range(5):
        before = p.detach().clone()
        step()
        moved.append(p.detach() != before)
    chance = 1e-4 / 2**-8
    for earlier, later in itertools.pairwise(moved):
        assert later.float().mean().item() == pytest.approx(chance, rel=0.5)
        assert (earlier & later).sum() < 0.2 * later.sum()
    before = p.detach().clone()
    optimizer.param_groups[0]["lr"].zero_()
    step()
    assert torch.equal(p, before)
    assert optimizer.param_groups[0]["step"] == 5


# --- Without a compiler ---------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("nothing_compiled")
def test_without_a_compiler_it_runs_eagerly_with_one_warning(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports 54 and 55: no C++ compiler, no Triton: the same bits, and one warning however much is trained."""

    def no_compiler(*args: object, **kwargs: object) -> None:
        raise InvalidCxxCompiler

    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", no_compiler)
    monkeypatch.setattr("torch._inductor.scheduler.has_triton", lambda *_: False)
    with fresh_cache(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = train(make(parameters(ONE_OF_EACH, torch.bfloat16, device)), 3)
        train(make(parameters(ONE_OF_EACH, torch.float32, device), Lion), 2)
    assert [w.category for w in caught] == [UserWarning]
    assert "runs uncompiled" in str(caught[0].message)
    assert device in str(caught[0].message)
    with eager():
        assert_same_bits(optimizer, train(make(parameters(ONE_OF_EACH, torch.bfloat16, device)), 3))


def test_with_compilation_switched_off_it_runs_eagerly_without_a_warning(device: str, tmp_path: Path) -> None:
    """Report 54: ``TORCH_COMPILE_DISABLE=1`` in a process of its own gives the same bits."""
    program = f"""
import sys, warnings
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "test")!r}]
from test_compiled import *
warnings.simplefilter("error")
torch.save(bits(train(make(parameters(ONE_OF_EACH, torch.bfloat16, {device!r})), 3)), {str(tmp_path / "bits.pt")!r})
assert graphs() == 0
"""
    env = {**os.environ, "TORCH_COMPILE_DISABLE": "1"}
    subprocess.run([sys.executable, "-c", program], env=env, check=True, timeout=300)
    expected = bits(train(make(parameters(ONE_OF_EACH, torch.bfloat16, device)), 3))
    for a, e in zip(torch.load(tmp_path / "bits.pt"), expected, strict=True):
        assert torch.equal(a, e)


@pytest.mark.usefixtures("nothing_compiled")
def test_force_eager_compiles_nothing(device: str) -> None:
    before = graphs()
    with eager():
        train(make(parameters(ONE_OF_EACH, torch.float32, device)), 2)
    assert graphs() == before


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_dispatch_mode_changes_no_step(dtype: torch.dtype, device: str) -> None:
    """Dynamo does not work inside of one, and remembers that; the steps after it are compiled all the same."""
    optimizer, expected = (make(parameters(ONE_OF_EACH, dtype, device)) for _ in range(2))
    with FlopCounterMode(display=False):
        train(optimizer, 2)
    before = graphs()
    train(optimizer, 2, first=2)
    assert graphs() > before
    with eager():
        train(expected, 4)
    assert_same_bits(optimizer, expected)


@pytest.mark.usefixtures("nothing_compiled")
def test_fake_tensors_are_stepped(device: str) -> None:
    """They have no memory that a compiled kernel could read."""
    with FakeTensorMode():
        p = nn.Parameter(torch.randn(64, 128, device=device))
        optimizer = make([p])
        p.grad = torch.randn_like(p)
        optimizer.step()
        assert optimizer.state[p]["exp_avg"].codes.shape == p.shape
