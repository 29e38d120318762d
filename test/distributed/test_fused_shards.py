"""The fused step of shards keeps what it has found out about them, and sees it when that is no longer so."""

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import interpreter
import meshes
import pytest
import torch
from meshes import OPTIONS, by_hand, local, make_meshes
from torch.distributed.tensor import DTensor, Partial, Replicate
from workers import Ranks, device

from lowbit_optim import Lion8bit, sharding
from lowbit_optim.subclasses import OptimState8bit

SHAPES: list[meshes.Shape] = [(6, 128), (7, 3, 3, 3), (9, 70), (3, 5), (100,)]
MESHES = make_meshes(SHAPES)
Change = Callable[[Any], None]


def loaded(optimizer: Any) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def first_momentum(optimizer: Any) -> Any:
    return optimizer.state[meshes.parameters(optimizer)[0]]["exp_avg"]


def with_other_codes(optimizer: Any) -> None:
    exp_avg = first_momentum(optimizer)
    exp_avg.codes = torch.zeros_like(exp_avg.codes)


def with_another_scale(optimizer: Any) -> None:
    exp_avg = first_momentum(optimizer)
    exp_avg.scale = torch.zeros_like(exp_avg.scale)


def with_another_momentum(optimizer: Any) -> None:
    p = meshes.parameters(optimizer)[0]
    optimizer.state[p]["exp_avg"] = sharding.zeros(p, OptimState8bit, 64)


def with_another_residual(optimizer: Any) -> None:
    """In the object that there was."""
    residual = optimizer.state[meshes.parameters(optimizer)[0]]["master_residual"]
    residual._local_tensor = residual._local_tensor.detach() + 1


def elsewhere(optimizer: Any) -> None:
    """As FSDP puts a shard elsewhere after ``model.to``."""
    for p in meshes.parameters(optimizer):
        p._local_tensor = p._local_tensor.detach() * 2


def of_another_seed(optimizer: Any) -> None:
    optimizer.param_groups[0]["seed"] = 5


def without_a_gradient(optimizer: Any) -> None:
    meshes.parameters(optimizer)[1].grad = None


def with_a_partial_gradient(optimizer: Any) -> None:
    p = meshes.parameters(optimizer)[2]
    half = meshes.gradient(tuple(p.shape), 50).to(device(), p.dtype) / 2
    p.grad = DTensor.from_local(half, p.device_mesh, [Partial()], shape=p.shape, stride=p.stride())


def with_a_channels_last_gradient(optimizer: Any) -> None:
    p = meshes.parameters(optimizer)[1]
    held = p.grad.to_local().to(memory_format=torch.channels_last)
    p.grad = DTensor.from_local(held, p.device_mesh, p.placements, shape=p.shape, stride=p.stride())


def in_another_order(optimizer: Any) -> None:
    optimizer.param_groups[0]["params"].reverse()


CHANGES: list[Change] = [
    loaded,
    with_other_codes,
    with_another_scale,
    with_another_momentum,
    with_another_residual,
    elsewhere,
    of_another_seed,
    without_a_gradient,
    with_a_partial_gradient,
    with_a_channels_last_gradient,
    in_another_order,
]


def looks(patch: pytest.MonkeyPatch) -> list[Any]:
    """Grows with each look at a shard."""
    found: list[Any] = []

    def one_run(*args: Any, look: Callable[..., Any] = sharding.one_run) -> Any:
        found.append(1)
        return look(*args)

    patch.setattr(sharding, "one_run", one_run)
    return found


def test_shards_are_looked_at_once(ranks: Ranks) -> None:
    pytest.importorskip("triton")
    ranks.run(2, _looked_at_once)


def _looked_at_once() -> None:
    mesh = MESHES["2"]
    optimizer = Lion8bit(mesh.make(SHAPES).parameters(), **OPTIONS)
    with interpreter.fused_on(device().type), pytest.MonkeyPatch.context() as patch:
        found = looks(patch)
        meshes.train(mesh, optimizer, 4)
        assert len(found) == len(SHAPES)
        loaded(optimizer)
        meshes.train(mesh, optimizer, 2, first=4)
        assert len(found) == 2 * len(SHAPES)
    meshes.assert_same_bits(mesh, optimizer, meshes.reference(tuple(SHAPES), 6))


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_changes_between_steps_is_seen(change: Change, ranks: Ranks) -> None:
    pytest.importorskip("triton")
    ranks.run(2, _changed, change)


def _changed(change: Change) -> None:
    copies = [by_hand((2,), Replicate())] if change is with_a_partial_gradient else []  # whose parts have one shape
    for mesh in (MESHES["2"], *copies):
        fused, other = (
            Lion8bit(mesh.make(SHAPES).parameters(), **OPTIONS, master_weight_bits=24, fused=fused)
            for fused in (None, False)
        )
        with interpreter.fused_on(device().type):
            for step in range(4):
                for optimizer in (fused, other):
                    meshes.set_gradients(mesh, meshes.parameters(optimizer), step)
                    if step == 2:
                        change(optimizer)
                    optimizer.step()
        assert all(plan.fused for plan in fused._plans.values())
        assert_same_shards(fused, other)


def assert_same_shards(a: Any, b: Any) -> None:
    for p, q in zip(meshes.parameters(a), meshes.parameters(b), strict=True):
        assert torch.equal(local(p), local(q)), tuple(p.shape)
        parts = (sharding.local_parts(o.state[x]["exp_avg"]) for o, x in ((a, p), (b, q)))
        assert all(map(torch.equal, *parts)), tuple(p.shape)


def test_gradients_and_old_state_are_freed(ranks: Ranks) -> None:
    pytest.importorskip("triton")
    ranks.run(2, _freed)


@torch.no_grad()  # else to_local gives a tensor of its own each time
def _freed() -> None:
    """At once, without the garbage collector."""
    mesh = MESHES["2"]
    optimizer = Lion8bit(mesh.make(SHAPES).parameters(), **OPTIONS)
    with interpreter.fused_on(device().type):
        meshes.set_gradients(mesh, meshes.parameters(optimizer), 0)
        optimizer.step()
    params = meshes.parameters(optimizer)
    grads = [weakref.ref(p.grad.to_local()) for p in params]
    gc.disable()
    try:
        optimizer.zero_grad()
        assert [ref() for ref in grads] == [None] * len(params)
        state = [weakref.ref(part) for p in params for part in sharding.local_parts(optimizer.state[p]["exp_avg"])]
        optimizer.state.clear()
        assert [ref() for ref in state] == [None] * len(state)
    finally:
        gc.enable()
