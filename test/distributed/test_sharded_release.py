"""Gradient release of sharded parameters: FSDP calls the hooks once it has reduced their gradients."""

import sys
from typing import Any

import meshes
import pytest
import torch
import torch.distributed as dist
from meshes import device_mesh
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from workers import Ranks, device

from lowbit_optim import Lion8bit, gradient_release
from lowbit_optim.subclasses import OptimState8bit

STEPS = 20


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(96, 80), nn.ReLU(), nn.Linear(80, 96)) for _ in range(3)]
    return nn.Sequential(*layers, nn.Linear(96, 5)).to(device(), torch.bfloat16)


def _train(model: nn.Module, released: bool, backward: Any = None) -> Lion8bit:
    sys.modules["lowbit_optim.gradient_release"]._MAX_WAITING_SHARE = 0.2
    optimizer = Lion8bit(model.parameters(), lr=1e-2, weight_decay=0.1, min_quantized_numel=0)
    if released:
        gradient_release(model, optimizer)
    for step in range(STEPS):
        (backward or _backward)(model, step)
        left = sum(p.grad is not None for p in model.parameters())
        assert released or left == len(list(model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def _backward(model: nn.Module, step: int, rank: int | None = None) -> None:
    rank = dist.get_rank() if rank is None else rank
    x = torch.randn(4, 96, generator=torch.Generator().manual_seed(100 * step + rank)).to(device(), torch.bfloat16)
    model(x).square().mean().backward()


def _assert_equal(optimizer: Lion8bit, plain: Lion8bit) -> None:
    for p, q in zip(meshes.parameters(optimizer), meshes.parameters(plain), strict=True):
        assert torch.equal(meshes.local(p), meshes.local(q))
        for a, b in zip(_parts(optimizer, p), _parts(plain, q), strict=True):
            assert torch.equal(meshes.local(a), meshes.local(b))


def _parts(optimizer: Lion8bit, p: Tensor) -> list[Tensor]:
    momentum = optimizer.state[p]["exp_avg"]
    return [momentum.codes, momentum.scale] if isinstance(momentum, OptimState8bit) else [momentum]


def _shard(mesh_shape: tuple[int, ...], offload: bool = False) -> nn.Module:
    model = _model()
    policy = CPUOffloadPolicy(pin_memory=device().type == "cuda") if offload else OffloadPolicy()
    for module in (*model, model):
        fully_shard(module, mesh=device_mesh(mesh_shape), offload_policy=policy)
    return model


@pytest.mark.parametrize(("mesh_shape", "offload"), [((2,), False), ((2,), True), ((3,), False), ((2, 2), False)])
def test_fsdp_gives_the_bits_of_plain_steps(mesh_shape: tuple[int, ...], offload: bool, ranks: Ranks) -> None:
    """Uneven shards, host memory, replicas."""
    ranks.run(meshes.by_hand(mesh_shape).world_size, _fsdp, mesh_shape, offload)


def _fsdp(mesh_shape: tuple[int, ...], offload: bool) -> None:
    model = _shard(mesh_shape, offload)
    optimizer = _train(model, released=True)
    _assert_equal(optimizer, _train(_shard(mesh_shape, offload), released=False))
    _backward(model, STEPS)
    are_left = [p.grad is not None for p in model.parameters()]
    assert not any(are_left) or (offload and device().type == "cuda")


def test_fsdp_accumulates_gradients_that_it_has_not_reduced(ranks: Ranks) -> None:
    ranks.run(2, _accumulation)


def _accumulation() -> None:
    def backward(model: Any, step: int) -> None:
        model.set_requires_gradient_sync(False)
        _backward(model, 2 * step)
        model.set_requires_gradient_sync(True)
        _backward(model, 2 * step + 1)

    _assert_equal(
        _train(_shard((2,)), released=True, backward=backward), _train(_shard((2,)), released=False, backward=backward)
    )
    model = _shard((2,))
    gradient_release(model, Lion8bit(model.parameters()))
    _backward(model, 0)
    with pytest.raises(RuntimeError, match=r"second gradient.*set_requires_gradient_sync"):
        _backward(model, 1)


def test_what_ranks_share_waits_for_the_step(ranks: Ranks) -> None:
    """Tensor parallelism: rows cut away from blocks are stepped together, all else in backward."""
    ranks.run(2, _tensor_parallel)


def _tensor_parallel() -> None:
    models = [_tensor_parallel_model() for _ in range(2)]
    backward = lambda model, step: _backward(model, step, rank=0)  # noqa: E731
    _assert_equal(_train(models[0], True, backward), _train(models[1], False, backward))
    left = []
    for model in models:
        backward(model, STEPS)
        left.append([name for name, p in model.named_parameters() if p.grad is not None])
    assert left[0] == [f"{i}.2.weight" for i in range(3)]
    assert len(left[1]) == 14


def _tensor_parallel_model() -> nn.Module:
    model = _model()
    for layer in list(model)[:-1]:
        parallelize_module(layer, device_mesh((2,)), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return model


def test_ddp_is_refused(ranks: Ranks) -> None:
    ranks.run(2, _ddp)


def _ddp() -> None:
    model = _model()
    optimizer = Lion8bit(model.parameters())
    replica = DistributedDataParallel(model)
    with pytest.raises(TypeError, match="DistributedDataParallel"):
        gradient_release(replica, optimizer)
    gradient_release(model, optimizer)
    with pytest.raises(TypeError, match="DistributedDataParallel"):
        _backward(replica, 0)
