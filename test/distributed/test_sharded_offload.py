"""State in host memory of sharded parameters: every mesh gives the bits of one process without, checkpoints too.

On a CPU the same code runs, told that state can live elsewhere.
"""

from typing import Any
from unittest import mock

import meshes
import pytest
import torch
from host_streams import streams_of
from meshes import OPTIONS, SHAPES, by_hand, make_meshes
from test_checkpoints import OPTIONS_THAT_WORK
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Shard
from workers import Ranks

from lowbit_optim import Lion8bit, offload
from lowbit_optim.subclasses import OptimState8bit

MESHES = {**make_meshes(SHAPES), "last dim on 2": by_hand((2,), Shard(-1))}
STEPS = 20


def _offloaded() -> Any:
    """In a rank, which is a process of its own."""
    return mock.patch.multiple(offload, _CHUNK_BYTES=8192, is_offloaded=lambda p: True, _CudaStreams=streams_of)


def _optimizer(mesh: meshes.Mesh) -> tuple[meshes.Bag, Lion8bit]:
    bag = mesh.make(SHAPES)
    return bag, Lion8bit(bag.parameters(), offload_state=True, **OPTIONS)


@pytest.mark.parametrize("name", ["2", "3", "hsdp", "fsdp x tp", "last dim on 2"])
def test_every_mesh_gives_the_bits_of_one_process(name: str, ranks: Ranks) -> None:
    """Uneven and empty shards, and blocks that ranks share, whose maxima they exchange in the same order."""
    ranks.run(MESHES[name].world_size, _train, name)


def _train(name: str) -> None:
    mesh = MESHES[name]
    with _offloaded():
        _, optimizer = _optimizer(mesh)
        meshes.train(mesh, optimizer, STEPS)
    meshes.assert_same_bits(mesh, optimizer, meshes.reference(tuple(SHAPES), STEPS))
    for p in meshes.parameters(optimizer):
        momentum = optimizer.state[p]["exp_avg"]
        parts = [momentum.codes, momentum.scale] if isinstance(momentum, OptimState8bit) else [momentum]
        assert all(isinstance(part, DTensor) and part.to_local().device.type == "cpu" for part in parts)


def test_checkpoints_in_every_mode_that_works_for_adamw(ranks: Ranks) -> None:
    ranks.run(2, _checkpoints)


def _checkpoints() -> None:
    mesh = MESHES["2"]
    for full, cpu_offload, broadcast, flatten in OPTIONS_THAT_WORK:
        options = StateDictOptions(
            full_state_dict=full,
            cpu_offload=cpu_offload,
            broadcast_from_rank0=broadcast,
            flatten_optimizer_state_dict=flatten,
        )
        with _offloaded():
            saved_bag, saved = _optimizer(mesh)
            meshes.train(mesh, saved, 3)
            bag, optimizer = _optimizer(mesh)
            with torch.no_grad():
                for p, q in zip(bag.parameters(), saved_bag.parameters(), strict=True):
                    p.copy_(q)
            state = get_optimizer_state_dict(saved_bag, saved, options=options)
            set_optimizer_state_dict(bag, optimizer, state, options=options)
            meshes.train(mesh, optimizer, 3, first=3)
        meshes.assert_same_bits(mesh, optimizer, meshes.reference(tuple(SHAPES), 6))
