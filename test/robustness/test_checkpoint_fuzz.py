"""Whatever was done to a checkpoint: it loads, or a ValueError or TypeError says why not and nothing has changed."""

import copy
import math
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from twins import random_values, same_bits

from lowbit_optim import Lion8bit
from lowbit_optim.checkpoint import float_state_dict
from lowbit_optim.subclasses import OptimState8bit
from lowbit_optim.subclasses.blockwise import dequantize

pytestmark = pytest.mark.filterwarnings(
    "ignore:the checkpoint has no state for", "ignore:weight corrections", "ignore:the checkpoint's master_residual"
)
SHAPES = [(8, 128), (5, 75), (20,), ()]
Path = tuple[Any, ...]


@pytest.fixture(autouse=True)
def eager() -> Iterator[None]:
    with torch.compiler.set_stance("force_eager"):
        yield


def make(names: bool = False, seed: int = 0) -> Lion8bit:
    """Two groups, after two steps."""
    params: list[Any] = [nn.Parameter(random_values(shape, seed + i)) for i, shape in enumerate(SHAPES)]
    params[1].data = params[1].bfloat16()
    named: list[Any] = [(f"p{i}", p) for i, p in enumerate(params)] if names else params
    groups = [
        {"params": named[:2], "lr": torch.tensor(1e-2), "master_weight_bits": 32},
        {"params": named[2:], "decouple_lr": True},
    ]
    optimizer = Lion8bit(groups, lr=1e-3, weight_decay=0.1, min_quantized_numel=0)
    for i in range(2):
        step(optimizer, seed + 10 * i)
    return optimizer


def step(optimizer: Lion8bit, seed: int) -> None:
    for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        p.grad = random_values(p.shape, seed + i).to(p.dtype)
    optimizer.step()


# --- Checkpoints ----------------------------------------------------------------------------------------------------


def own(optimizer: Lion8bit) -> dict[str, Any]:
    return optimizer.state_dict()


def bitsandbytes(optimizer: Lion8bit) -> dict[str, Any]:
    """Large momenta as indices into a table times the block's maximum, small ones in fp32."""
    plain = float_state_dict(optimizer)
    for key, state in plain["state"].items():
        momentum = state["exp_avg"]
        plain["state"][key] = {"step": 2, "state1": momentum}
        if momentum.numel() >= 1000:
            plain["state"][key] = {
                "step": 2,
                "state1": torch.randint(256, momentum.shape, dtype=torch.uint8),
                "qmap1": torch.linspace(-1, 1, 256),
                "absmax1": torch.rand(math.ceil(momentum.numel() / 256)),
            }
    return plain


def flashoptim(optimizer: Lion8bit) -> dict[str, Any]:
    plain = float_state_dict(optimizer)
    for key, state in plain["state"].items():
        numel = state["exp_avg"].numel()
        plain["state"][key] = {
            "exp_avg::quantized": torch.randint(-127, 128, state["exp_avg"].shape, dtype=torch.int8),
            "exp_avg::scales": torch.rand(math.ceil(numel / 32)).half(),
        }
    for group in plain["param_groups"]:
        group["master_bytewidth"] = 2
    return plain


FORMATS: dict[str, Callable[[Lion8bit], dict[str, Any]]] = {
    "own": own,
    "plain": float_state_dict,
    "bitsandbytes": bitsandbytes,
    "flashoptim": flashoptim,
}

# --- What is done to them -------------------------------------------------------------------------------------------

odd_tensors = st.sampled_from(
    [
        torch.tensor(math.nan),
        torch.tensor([]),
        torch.zeros(8, 128),
        torch.zeros(5, 75, dtype=torch.int8),
        torch.full((8, 128), -128, dtype=torch.int8),
        torch.zeros(8, 128, dtype=torch.complex64),
        torch.zeros(8, 2, 2, dtype=torch.uint8),
        torch.zeros(8, 128, device="meta"),
        torch.zeros(8, 128, dtype=torch.int8, device="meta"),
        torch.zeros(8, 2, 2, dtype=torch.uint8, device="meta"),
        torch.tensor(1e-3, device="meta"),
        torch.zeros(8, 128).to_sparse(),
        torch.zeros(8, 128, dtype=torch.bool),
        torch.tensor(2),
        OptimState8bit.zeros((8, 128)),
    ]
)
atoms = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.sampled_from([2**31, 2**63, -(2**70), math.nan, math.inf, -math.inf, 0.5, -1.0, 1e308, 1 + 2j]),
    st.sampled_from(["", "exp_avg", "0.1", b"x", {1, 2}, object(), range(3), torch.float32, len]),
    odd_tensors,
)
garbage = st.recursive(
    atoms,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from([0, "0", "state", "params", "codes", "scale", "exp_avg", None]), inner, max_size=3
        )
    ),
    max_leaves=5,
)


def paths(tree: Any, path: Path = ()) -> Iterator[Path]:
    """To all that is inside."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, (list, tuple)) else ()
    for key, value in items:
        yield (*path, key)
        yield from paths(value, (*path, key))


def changed(tree: Any, path: Path, change: Callable[[Any, Any], None]) -> Any:
    """``tree`` with ``change(container, key)`` done where ``path`` leads; tuples become lists."""
    container = list(tree) if isinstance(tree, tuple) else tree
    if len(path) == 1:
        change(container, path[0])
    else:
        container[path[0]] = changed(container[path[0]], path[1:], change)
    return container


TENSOR_DAMAGES: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.reshape(-1)[:-1],
    lambda x: x[..., :-1] if x.ndim else x[None],
    lambda x: x.double() if x.dtype.is_floating_point else x.float(),
    lambda x: x.to(torch.int16),
    lambda x: x.t() if x.ndim == 2 else x[None],
    lambda x: torch.cat([x.reshape(-1), x.reshape(-1)]),
    lambda x: x.to("meta"),
    lambda x: torch.full_like(x, math.nan if x.dtype.is_floating_point else 0) - 128,
    lambda x: torch.full_like(x, math.inf if x.dtype.is_floating_point else 0) - 1,
    lambda x: x.to_sparse(),
]


@st.composite
def damages(draw: st.DrawFn) -> Callable[[Any], Any]:
    """One thing that is done to a checkpoint."""
    where, how, value = draw(st.integers(0, 10**6)), draw(st.integers(0, 7)), draw(garbage)
    damage_tensor = draw(st.sampled_from(TENSOR_DAMAGES))

    def change(container: Any, key: Any) -> None:
        if how == 0:
            del container[key]
        elif how == 1:
            container[key] = value
        elif how == 2 and isinstance(container, dict):
            container[f"{key}_"] = container.pop(key)
        elif how == 3 and isinstance(container, dict):
            container["more"] = value
        elif how == 4:
            container[key] = [container[key]]
        elif how == 5 and isinstance(container, list):
            container.append(container[key])
        elif isinstance(container[key], Tensor):
            container[key] = damage_tensor(container[key])
        else:
            container[key] = value

    def damage(tree: Any) -> Any:
        all_paths = list(paths(tree))
        return changed(tree, all_paths[where % len(all_paths)], change) if all_paths else tree

    return damage


# --- The promise ----------------------------------------------------------------------------------------------------


def snapshot(optimizer: Lion8bit) -> tuple[list[Any], list[Tensor]]:
    """Which objects there are, and copies of all bits."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    states = [x for p in params for x in optimizer.state[p].values()]
    parts = [part for x in states for part in ([x.codes, x.scale] if isinstance(x, OptimState8bit) else [x])]
    options = [(k, v) for group in optimizer.param_groups for k, v in group.items() if k != "params"]
    tensors = [*params, *parts, *(v for _, v in options if isinstance(v, Tensor))]
    others = [(k, id(v) if isinstance(v, Tensor) else copy.deepcopy(v)) for k, v in options]
    return [list(map(id, [*params, *states, *parts])), len(optimizer.state), others], [
        t.detach().clone() for t in tensors
    ]


def load(optimizer: Lion8bit, checkpoint: Any) -> bool:
    """Whether it was taken. If not, the error is a clear one and nothing has changed."""
    before, refusal = snapshot(optimizer), None
    try:
        optimizer.load_state_dict(checkpoint)
    except (ValueError, TypeError) as error:
        refusal = error
    if refusal is None:
        return True
    raised_at = traceback.extract_tb(refusal.__traceback__)[-1]
    assert raised_at.line.startswith("raise "), f"nobody meant to raise this: {refusal!r}"
    (objects, tensors), (objects_before, tensors_before) = snapshot(optimizer), before
    assert objects == objects_before
    assert all(map(same_bits, tensors, tensors_before))
    return False


def check_usable(optimizer: Lion8bit) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p in optimizer.state:
                momentum = optimizer.state[p]["exp_avg"]
                assert momentum.shape == p.shape
                assert momentum.device == p.device
                assert momentum.dtype == torch.float32
                assert dequantize(momentum).isfinite().all()
    if not any(group["decouple_lr"] and group["initial_lr"] == 0 for group in optimizer.param_groups):
        step(optimizer, 5)
    optimizer.state_dict()


@pytest.mark.parametrize("names", [False, True])
@pytest.mark.parametrize("kind", FORMATS)
def test_damaged_checkpoints(kind: str, names: bool) -> None:
    source, count = make(names, seed=100), {True: 0, False: 0}

    @given(st.lists(damages(), min_size=1, max_size=2))
    def check(some: list[Callable[[Any], Any]]) -> None:
        checkpoint = copy.deepcopy(FORMATS[kind](source))
        for damage in some:
            checkpoint = damage(checkpoint)
        optimizer = make(names)
        was_taken = load(optimizer, checkpoint)
        count[was_taken] += 1
        if was_taken:
            check_usable(optimizer)

    assert load(make(names), FORMATS[kind](source)), "undamaged, it loads"
    check()
    assert count[False] >= 10


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("state", 0, "exp_avg", "codes"), torch.zeros(8, 128, dtype=torch.int8, device="meta")),
        (("state", 2, "exp_avg"), torch.zeros(20).to_sparse()),
        (("state", 0), {"exp_avg": torch.zeros(8, 128), 0: None, "other": None}),
        (("param_groups", 0, "lr"), torch.zeros((), device="meta")),
        (("param_groups", 0, "lr"), torch.zeros((), dtype=torch.complex64)),
        (("param_groups", 0, "params"), 2),
        (("param_groups", 0, "param_names"), [{}, "p1"]),
        (("param_groups", 0, "param_names"), ["p0", "p1", "p1"]),
    ],
    ids=range(8),
)
def test_what_was_once_let_through(path: Path, value: Any) -> None:
    """Or was refused with an error of torch's or Python's own."""
    checkpoint = changed(copy.deepcopy(own(make(names=True))), path, lambda tree, key: tree.update({key: value}))
    optimizer = make(names=True)
    if load(optimizer, checkpoint):
        check_usable(optimizer)


@given(garbage)
def test_what_is_no_checkpoint_at_all(value: Any) -> None:
    assert not load(make(), value)
