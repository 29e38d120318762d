"""Steps of sharded parameters: every mesh gives the bits of one process, given the same gradients."""

import meshes
import pytest
import torch
from meshes import OPTIONS, SHAPES, by_hand, make_meshes
from torch.distributed.tensor import Replicate, Shard
from workers import Ranks

from lowbit_optim import Lion8bit

BY_HAND = {
    "rows on 2": by_hand((2,), Shard(0)),
    "dim 1 on 2": by_hand((2,), Shard(1)),
    "last dim on 2": by_hand((2,), Shard(-1)),
    "copies on 2": by_hand((2,), Replicate()),
    "dim 1 on 3": by_hand((3,), Shard(1)),
    "last dim on 3": by_hand((3,), Shard(-1)),
    "last dim on 4": by_hand((4,), Shard(-1)),
    "copies x last dim": by_hand((2, 2), Replicate(), Shard(-1)),
    "rows x last dim": by_hand((2, 2), Shard(0), Shard(-1)),
    "rows x rows": by_hand((2, 2), Shard(0), Shard(0)),
    "dim 1 x dim 1": by_hand((2, 2), Shard(1), Shard(1)),
    "dim 1 x last dim": by_hand((2, 2), Shard(1), Shard(-1)),
}
MESHES = {**make_meshes(SHAPES), **BY_HAND}


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_mesh_gives_the_bits_of_one_process(world_size: int, ranks: Ranks) -> None:
    """20 steps with stochastic rounding; weights, codes and scales."""
    ranks.run(world_size, _every_mesh, world_size)


def _every_mesh(world_size: int) -> None:
    for mesh in MESHES.values():
        if mesh.world_size == world_size:
            bag = mesh.make(SHAPES)
            optimizer = Lion8bit(bag.parameters(), **OPTIONS)
            with torch.compiler.set_stance("force_eager"):
                meshes.train(mesh, optimizer, 20)
            meshes.assert_same_bits(mesh, optimizer, meshes.reference(tuple(SHAPES), 20))
