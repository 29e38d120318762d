"""Shards on the CPU, as FSDP2's CPU offload leaves them, on a mesh of GPUs: state and steps stay where the shard is."""

import copy
from collections.abc import Callable
from typing import Any

import meshes
import pytest
import torch
from meshes import OPTIONS, local
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from workers import Ranks, device

from lowbit_optim import Lion8bit
from lowbit_optim.subclasses import OptimState8bit

SHAPES: list[meshes.Shape] = [(15, 512), (7, 3, 3, 3), (100,)]
CPU = torch.device("cpu")


def make_model(offload: bool) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 130), nn.Linear(130, 15)).to(CPU if offload else device(), torch.bfloat16)
    policy = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if offload else OffloadPolicy()
    for layer in (*model, model):
        fully_shard(layer, mesh=meshes.device_mesh((2,)), offload_policy=policy)
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, steps: int) -> None:
    for step in range(first, first + steps):
        x = torch.randn(8, 96, generator=torch.Generator().manual_seed(step)).to(device(), torch.bfloat16)
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def state_parts(optimizer: torch.optim.Optimizer) -> list[Any]:
    parts: list[Any] = []
    for state in optimizer.state.values():
        for value in state.values():
            parts += [value.codes, value.scale] if isinstance(value, OptimState8bit) else [value]
    return parts


def bits(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [local(x).cpu().clone() for x in (*meshes.parameters(optimizer), *state_parts(optimizer))]


def assert_same(a: list[Tensor], b: list[Tensor]) -> None:
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_state_lives_where_the_shard_lives(ranks: Ranks) -> None:
    """Report 34."""
    ranks.run(2, _offloaded)


def _offloaded() -> None:
    model, expected = make_model(offload=True), make_model(offload=False)
    optimizer, expected_optimizer = (
        Lion8bit(m.parameters(), **OPTIONS, master_weight_bits=24) for m in (model, expected)
    )
    train(expected, expected_optimizer, 0, 4)
    train(model, optimizer, 0, 2)
    for _ in range(2):
        assert {local(x).device for x in (*model.parameters(), *state_parts(optimizer))} == {CPU}
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, optimizer, 2, 2)
    assert_same(bits(optimizer), bits(expected_optimizer))


def test_state_lives_where_the_shard_lives_without_a_gpu(ranks: Ranks) -> None:
    """Report 34: a mesh says of which devices it is, and ``DTensor.from_local`` would move state there."""
    ranks.run(1, _away_from_the_mesh)


def _away_from_the_mesh() -> None:
    mesh = init_device_mesh("cuda", (1,))
    plain = [nn.Parameter(meshes.initial(shape).bfloat16()) for shape in SHAPES]
    sharded = [nn.Parameter(on_mesh(p.detach().clone(), mesh)) for p in plain]
    optimizer, expected = (Lion8bit(params, **OPTIONS, master_weight_bits=24) for params in (sharded, plain))
    for step in range(4):
        for p, q in zip(sharded, plain, strict=True):
            q.grad = meshes.gradient(tuple(q.shape), step).bfloat16()
            p.grad = on_mesh(q.grad.clone(), mesh)
        optimizer.step()
        expected.step()
        assert {local(x).device for x in state_parts(optimizer)} == {CPU}
        if step == 1:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert_same(bits(optimizer), bits(expected))


def on_mesh(x: Tensor, mesh: DeviceMesh) -> DTensor:
    """As FSDP makes them of what it has offloaded."""
    spec = DTensorSpec(mesh, (Shard(0),), tensor_meta=TensorMeta(x.shape, x.stride(), x.dtype))
    return DTensor(x, spec, requires_grad=False)


@pytest.mark.parametrize("offload", [False, True])
def test_an_lr_on_any_device_steps_shards_on_any(offload: bool, ranks: Ranks) -> None:
    """Report 35: ``lr * weight_decay * p`` met a GPU's scalar and a weight on the CPU. Also of shape (1,)."""
    ranks.run(2, _lr_forms, offload)


def _lr_forms(offload: bool) -> None:
    forms: list[Callable[[float], Any]] = [lambda lr: lr]
    for place in {CPU, device()}:
        forms += [lambda lr, place=place: torch.tensor(lr, device=place)]
        forms += [lambda lr, place=place: torch.tensor([lr], device=place)]
    results = []
    for form in forms:
        model = make_model(offload)
        optimizer = Lion8bit(model.parameters(), **{**OPTIONS, "lr": form(1e-2)})
        train(model, optimizer, 0, 2)
        optimizer.param_groups[0]["lr"] = form(3e-3)
        train(model, optimizer, 2, 1)
        results.append(bits(optimizer))
    for result in results[1:]:
        assert_same(result, results[0])
