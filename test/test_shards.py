"""Which elements a rank holds, against torch.chunk of an index; meshes of any size, in one process."""

import itertools
import math
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from lowbit_optim import codec, shards


class FakeMesh(NamedTuple):
    shape: tuple[int, ...]
    coordinate: tuple[int, ...]

    def get_coordinate(self) -> tuple[int, ...]:
        return self.coordinate


def ranks(mesh_shape: tuple[int, ...]) -> list[FakeMesh]:
    return [FakeMesh(mesh_shape, coordinate) for coordinate in itertools.product(*map(range, mesh_shape))]


def cut(whole: Tensor, mesh: FakeMesh, placements: tuple[Placement, ...]) -> Tensor:
    """As the placements say, from the first mesh dimension to the last."""
    for size, index, placement in zip(mesh.shape, mesh.coordinate, placements, strict=True):
        if isinstance(placement, (Shard, _StridedShard)):
            first = whole.chunk(getattr(placement, "split_factor", 1), placement.dim)
            parts = [chunk_at(piece, size, index, placement.dim) for piece in first]
            whole = torch.cat(parts, placement.dim)
    return whole


def chunk_at(x: Tensor, parts: int, index: int, dim: int) -> Tensor:
    chunks = x.chunk(parts, dim)
    return chunks[index] if index < len(chunks) else x.narrow(dim, 0, 0)


def indices_of(piece: shards.Piece) -> Tensor:
    rows = piece.first + piece.stride * torch.arange(piece.rows)
    return (rows[:, None] + torch.arange(piece.length)).flatten()


SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple)


@st.composite
def cases(draw: Any) -> tuple[tuple[int, ...], tuple[int, ...], tuple[Placement, ...]]:
    shape = draw(SIZES)
    mesh_shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple))
    placement = st.one_of(st.just(Replicate()), st.integers(0, len(shape) - 1).map(Shard))
    return shape, mesh_shape, tuple(draw(placement) for _ in mesh_shape)


@given(cases())
@settings(max_examples=200, deadline=None)
def test_pieces_are_the_elements_of_the_shard_in_order(case: Any) -> None:
    shape, mesh_shape, placements = case
    index = torch.arange(math.prod(shape)).reshape(shape)
    for mesh in ranks(mesh_shape):
        shard, expected = shards._shard(shape, placements, mesh), cut(index, mesh, placements)
        assert shard.shape == tuple(expected.shape)
        held = torch.cat([*map(indices_of, shard.pieces), torch.empty(0, dtype=torch.int64)])
        assert torch.equal(held, expected.flatten())


@given(cases())
@settings(max_examples=50, deadline=None)
def test_positions_number_the_elements_as_the_whole_tensor_does(case: Any) -> None:
    """Rounding noise, in rows that are seen as the step sees them."""
    shape, mesh_shape, placements = case
    shape = (*shape[:-1], shape[-1] * 32)  # so that some lie at multiples of 64
    index = torch.arange(math.prod(shape)).reshape(shape)
    for mesh in ranks(mesh_shape):
        expected = cut(index, mesh, placements).flatten()
        for piece in shards._shard(shape, placements, mesh).pieces:
            numel = piece.rows * piece.length
            wanted, expected = expected[:numel], expected[numel:]
            views = [(numel,), (1, numel)] + ([(numel // 64, 64)] if numel % 64 == 0 else [])
            for view in views:
                group, lane = codec.element_index(view, torch.device("cpu"), piece.position())
                assert torch.equal((group.long() * 64 + lane).expand(view).flatten(), wanted)


@pytest.mark.parametrize("shape", [(12, 8), (16, 3, 2), (24,)])
@pytest.mark.parametrize("factor", [1, 2, 3])
def test_strided_shards(shape: tuple[int, ...], factor: int) -> None:
    """FSDP over tensor parallelism cuts the last mesh dimension first; torch calls that a strided shard."""
    placements = (_StridedShard(0, split_factor=factor), Shard(0))
    index = torch.arange(math.prod(shape)).reshape(shape)
    for mesh in ranks((2, factor)):
        tp_first = chunk_at(chunk_at(index, factor, mesh.coordinate[1], 0), 2, mesh.coordinate[0], 0)
        shard = shards._shard(shape, placements, mesh)
        assert torch.equal(torch.cat([*map(indices_of, shard.pieces)]), tp_first.flatten())


def test_a_strided_shard_of_its_own_is_refused_if_torch_reads_it_in_two_ways() -> None:
    """13 rows over 2 for tensor parallelism are 7 and 6; over 3 for FSDP, 3, 3, 1 and 2, 2, 2. Not so in torch."""
    placements = (_StridedShard(0, split_factor=2), Shard(0))
    for mesh in ranks((3, 2)):  # on every rank, not on those alone that hold something else
        with pytest.raises(ValueError, match=r"dimension 0 of a parameter has size 13.*unevenly"):
            shards._shard((13, 64), placements, mesh)


def test_partial_placements_are_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \(4, 4\) has the placements .*Shard and Replicate are allowed"):
        shards._shard((4, 4), (Partial(),), FakeMesh((2,), (0,)))


def layouts(shape: tuple[int, ...], mesh_shape: tuple[int, ...], *placements: Placement) -> list[shards.BlockLayout]:
    return [
        shards._block_layout(shards._shard(shape, placements, mesh), shape, placements, mesh, 64)
        for mesh in ranks(mesh_shape)
    ]


@pytest.mark.parametrize(
    ("shape", "mesh_shape", "placements", "shared"),
    [
        ((100, 130), (3,), (Shard(0),), ()),
        ((100, 128), (2,), (Shard(1),), ()),
        ((100, 130), (2,), (Shard(1),), (0,)),
        ((100, 8192), (3,), (Shard(1),), (0,)),
        ((100, 382), (3,), (Shard(1),), ()),  # 128, 128 and 126
        ((100, 256), (3,), (Shard(1),), (0,)),
        ((100, 300), (3,), (Shard(1),), (0,)),
        ((100, 130), (1,), (Shard(1),), ()),
        ((4, 64, 96), (2,), (Shard(1),), ()),
        ((4, 64, 96), (2,), (Shard(2),), (0,)),
        ((64, 8, 3, 3), (2,), (Shard(0),), ()),
        ((64, 8, 3, 3), (2,), (Shard(1),), (0,)),
        ((64, 8, 8, 8), (2,), (Shard(1),), ()),
        ((64, 8, 8, 8), (2,), (Shard(2),), (0,)),
        ((64, 130), (2, 2), (Shard(0), Shard(1)), (1,)),
        ((64, 256), (2, 2), (Shard(1), Shard(1)), ()),
        ((64, 128), (2, 2), (Shard(1), Shard(1)), (0, 1)),
        ((64, 130), (2, 2), (Replicate(), Shard(1)), (1,)),
        ((64, 512), (2, 2), (_StridedShard(1, split_factor=2), Shard(1)), ()),
        ((64, 192), (2, 2), (_StridedShard(1, split_factor=2), Shard(1)), (0, 1)),
    ],
)
def test_where_shards_hold_parts_of_the_same_blocks(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], placements: tuple[Placement, ...], shared: tuple[int, ...]
) -> None:
    """All ranks agree, there the scale is a copy on each, and elsewhere each holds the scales of its own blocks."""
    scale = np.arange(math.prod(codec.scale_shape(shape, 64))).reshape(codec.scale_shape(shape, 64))
    for mesh, layout in zip(ranks(mesh_shape), layouts(shape, mesh_shape, *placements), strict=True):
        assert layout.shared == shared
        assert [i for i, p in enumerate(layout.scale_placements) if p != placements[i]] == list(shared)
        held = cut(torch.from_numpy(scale), mesh, layout.scale_placements)
        assert layout.scale_shape == tuple(held.shape)
        assert (layout.rows, layout.n_blocks) == (math.prod(held.shape[:-1]), held.shape[-1])
        assert layout.row_length == math.prod(shards._shard(shape, placements, mesh).shape) // layout.rows
        if shared:
            row = torch.arange(math.prod(shape)).reshape(shape)
            columns = cut(row, mesh, placements).reshape(layout.rows, -1)[0] % math.prod(layout.row_shape)
            assert torch.equal(layout.blocks(torch.device("cpu")), columns // 64)
