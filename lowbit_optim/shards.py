"""Which elements of a tensor a rank holds, and which blocks they belong to.

Everything follows from the whole tensor's shape, the mesh and the placements, so that a rank knows without asking.
``torch.distributed`` is imported where a DTensor has been met, since some builds of torch are without it.
"""

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowbit_optim import codec

Runs = tuple[tuple[int, int], ...]  # (start, length) of consecutive indices, none empty, none adjacent
Splits = list[tuple[int, int, int]]  # (parts, which of them, split factor), one a mesh dimension


# --- DTensors -------------------------------------------------------------------------------------------------------


def is_dtensor(x: Any) -> bool:
    return hasattr(x, "device_mesh")  # some builds of torch have no class to ask for


def to_local(x: Tensor) -> Tensor:
    """What this rank holds of ``x``: a plain tensor that shares its memory."""
    return x.to_local() if is_dtensor(x) else x  # type: ignore[attr-defined]


def plain_copy(x: Tensor) -> Tensor:
    """A plain, contiguous tensor with the values of ``x``, which may be of a subclass or laid out otherwise."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)


def from_local(local: Tensor, like: Any, shape: Sequence[int], placements: Sequence[Any]) -> Tensor:
    """A contiguous DTensor of ``shape`` on the mesh of ``like``, around what this rank holds of it.

    ``DTensor.from_local`` would move it to the device of the mesh, where FSDP's CPU offload does not want it.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    meta = TensorMeta(torch.Size(shape), contiguous_strides(shape), local.dtype)
    spec = DTensorSpec(like.device_mesh, tuple(placements), tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)


def same_sharding(x: Any, y: Any) -> bool:
    """Whether each rank holds the same elements of both, two tensors of one shape."""
    if not is_dtensor(x) or not is_dtensor(y):
        return not is_dtensor(x) and not is_dtensor(y)
    return x.device_mesh == y.device_mesh and x.placements == y.placements


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


# --- The elements that a rank holds ---------------------------------------------------------------------------------


class Piece(NamedTuple):
    """Consecutive elements of a shard's memory and where they lie in the whole tensor's.

    They are ``rows`` runs of ``length`` elements. The first begins at ``first``, each next one ``stride`` later.
    """

    rows: int
    length: int
    first: int
    stride: int

    def position(self) -> codec.Position | None:
        """What rounding noise needs to know; None if index in the shard and index in the tensor are the same."""
        if self.rows > 1:
            return _position(self.first, (self.length, self.stride))
        return _position(self.first, None) if self.first else None


@dataclass(frozen=True)
class Shard:
    """This rank's part of a tensor.

    Args:
        shape: of the local tensor.
        runs: for each dimension, the indices that are held.
        pieces: all of its memory, in order.
    """

    shape: tuple[int, ...]
    runs: tuple[Runs, ...]
    pieces: tuple[Piece, ...]


def shard_of(x: Any) -> Shard:
    """Of a DTensor, whose local tensor must have the shape that its placements imply."""
    shard = _shard(tuple(x.shape), tuple(x.placements), x.device_mesh)
    held = tuple(x.to_local().shape)
    if held != shard.shape:
        raise ValueError(
            f"this rank holds a shard of shape {held} of a DTensor of shape {tuple(x.shape)} whose placements "
            f"{_names(x.placements)} on a mesh of shape {tuple(x.device_mesh.shape)} imply {shard.shape}. "
            "Pass shape and stride to DTensor.from_local, and cut as torch.chunk does."
        )
    return shard


@functools.cache
def _shard(shape: tuple[int, ...], placements: tuple[Any, ...], mesh: Any) -> Shard:
    if any(placement.is_partial() for placement in placements):
        raise ValueError(
            f"a parameter of shape {shape} has the placements {_names(placements)}; Shard and Replicate are allowed. "
            "Redistribute it before it is given to the optimizer."
        )
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ValueError(f"a parameter of shape {shape} lives on {mesh}, which this rank is not part of: leave it out")
    for dim, size in enumerate(shape):
        _check_order_of_splits(dim, size, placements, mesh)
    runs = tuple(_runs(size, _splits(dim, placements, mesh.shape, coordinate)) for dim, size in enumerate(shape))
    local_shape = tuple(map(_length, runs))
    pieces = tuple(_pieces(shape, runs)) if math.prod(local_shape) else ()
    return Shard(local_shape, runs, pieces)


def _splits(dim: int, placements: Sequence[Any], mesh_shape: Sequence[int], coordinate: Sequence[int]) -> Splits:
    """How the mesh cuts a dimension, from its first dimension to its last."""
    return [
        (mesh_shape[i], coordinate[i], getattr(placement, "split_factor", 1))
        for i, placement in enumerate(placements)
        if getattr(placement, "dim", None) == dim
    ]


def _runs(size: int, splits: Splits) -> Runs:
    """The indices of a dimension that remain after each split: ``torch.chunk``, or FSDP's over an earlier one.

    A split factor cuts into that many chunks first, and each of them into the parts (``_StridedShard``).
    """
    runs: Runs = ((0, size),)
    for parts, index, factor in splits:
        length = _length(runs)
        kept: list[tuple[int, int]] = []
        for chunk in range(factor):
            start, chunk_length = _chunk(length, factor, chunk)
            offset, part_length = _chunk(chunk_length, parts, index)
            kept += _cut(runs, start + offset, part_length)
        runs = _merged(kept)
    return _merged(runs)


def _chunk(length: int, parts: int, index: int) -> tuple[int, int]:
    """``(start, length)`` of one chunk; the last ones may be short or empty."""
    size = -(-length // parts)
    start = min(index * size, length)
    return start, min(size, length - start)


def _cut(runs: Runs, start: int, length: int) -> Iterator[tuple[int, int]]:
    """Elements ``start ... start + length`` of the concatenated runs."""
    for run_start, run_length in runs:
        begin, end = max(start, 0), min(start + length, run_length)
        if begin < end:
            yield run_start + begin, end - begin
        start -= run_length


def _merged(runs: Sequence[tuple[int, int]]) -> Runs:
    merged: list[tuple[int, int]] = []
    for start, length in runs:
        if merged and sum(merged[-1]) == start:
            merged[-1] = (merged[-1][0], merged[-1][1] + length)
        elif length:
            merged.append((start, length))
    return tuple(merged)


def _length(runs: Runs) -> int:
    return sum(length for _, length in runs)


def _check_order_of_splits(dim: int, size: int, placements: Sequence[Any], mesh: Any) -> None:
    """FSDP over tensor parallelism cuts the last mesh dimension first, and writes it as if it had been the other way.

    Uneven cuts can come out differently; then torch itself gathers such a tensor wrongly.
    """
    cuts = [i for i, placement in enumerate(placements) if getattr(placement, "dim", None) == dim]
    if not any(hasattr(placements[i], "split_factor") for i in cuts):
        return
    for coordinate in _coordinates(mesh.shape, cuts):
        splits = _splits(dim, placements, mesh.shape, coordinate)
        if _runs(size, splits) != _runs(size, [(parts, index, 1) for parts, index, _ in reversed(splits)]):
            raise ValueError(
                f"dimension {dim} of a parameter has size {size}, which FSDP and tensor parallelism cut unevenly on a "
                f"mesh of shape {tuple(mesh.shape)} ({_names(placements)}), so that torch mistakes which rank holds "
                "what. Make the size a multiple of both, or shard another dimension."
            )


def _coordinates(mesh_shape: Sequence[int], dims: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Of all ranks along these dimensions of the mesh."""
    return itertools.product(*(range(size if i in dims else 1) for i, size in enumerate(mesh_shape)))


def _pieces(shape: Sequence[int], runs: Sequence[Runs]) -> Iterator[Piece]:
    """Memory is held in runs along the last dimension that is cut; two of those that are cut make one piece."""
    strides = contiguous_strides(shape)
    cut = [dim for dim, held in enumerate(runs) if _length(held) < shape[dim]]
    if not cut:
        yield Piece(1, math.prod(shape), 0, 0)
        return
    inner, outer = cut[-1], cut[-2] if len(cut) > 1 else 0
    if len(runs[inner]) > 1:
        outer = inner
    for index in itertools.product(*map(_indices, runs[:outer])):
        before = sum(i * stride for i, stride in zip(index, strides, strict=False))
        for start, length in runs[outer]:
            first = before + start * strides[outer]
            if outer == inner:
                yield Piece(1, length * strides[inner], first, 0)
            else:
                (inner_start, inner_length), rows = runs[inner][0], length * math.prod(shape[outer + 1 : inner])
                first += inner_start * strides[inner]
                yield Piece(rows, inner_length * strides[inner], first, strides[inner - 1])


def _indices(runs: Runs) -> Iterator[int]:
    return itertools.chain.from_iterable(range(start, start + length) for start, length in runs)


@functools.cache
def _position(first: int, runs: tuple[int, int] | None) -> codec.Position:
    in_groups = all(n % codec.NOISE_LANES == 0 for n in (first, *(runs or ())))
    unit = codec.NOISE_LANES if in_groups else 1
    scalars = [torch.tensor(n // unit, device="cpu") for n in (first, *(runs or ()))]
    return codec.Position(scalars[0], (scalars[1], scalars[2]) if runs else None, in_groups)


def _names(placements: Sequence[Any]) -> str:
    return f"({', '.join(map(str, placements))})"


# --- Blocks ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BlockLayout:
    """Codes and scale of a quantised tensor, as this rank holds them.

    Args:
        rows, row_length: of the local codes, as blocks see them.
        n_blocks: scales of a row that are held here.
        scale_shape: of the local scale.
        scale_placements: those of the codes, but Replicate where shards hold parts of the same blocks.
        shared: the mesh dimensions whose ranks do.
        row_shape: of a row in the whole tensor; more than one dimension where blocks run along the flattened ones.
        row_runs: for each dimension of a row, the indices that are held.
        block_size: elements that share a scale.
    """

    rows: int
    row_length: int
    n_blocks: int
    scale_shape: tuple[int, ...]
    scale_placements: tuple[Any, ...]
    shared: tuple[int, ...]
    row_shape: tuple[int, ...]
    row_runs: tuple[Runs, ...]
    block_size: int

    def blocks(self, device: torch.device) -> Tensor:
        """The block in its row that each held element of a row belongs to, int64 ``(row_length,)``."""
        return _blocks(self.row_shape, self.row_runs, self.block_size, device)


def block_layout(x: Any, block_size: int) -> BlockLayout:
    """Of the codes of a DTensor's shape, mesh and placements."""
    return _block_layout(shard_of(x), tuple(x.shape), tuple(x.placements), x.device_mesh, block_size)


@functools.cache
def _block_layout(
    shard: Shard, shape: tuple[int, ...], placements: tuple[Any, ...], mesh: Any, block_size: int
) -> BlockLayout:
    *leading, n_blocks = codec.scale_shape(shape, block_size)
    row_dim = len(leading)  # the first dimension that blocks run along; those before it are rows
    cuts_rows = [i for i, p in enumerate(placements) if getattr(p, "dim", -1) >= row_dim and mesh.shape[i] > 1]
    shared = tuple(cuts_rows) if _is_block_cut(shape, placements, mesh.shape, cuts_rows, row_dim, block_size) else ()
    held = _length(_runs(n_blocks, _splits(row_dim, placements, mesh.shape, mesh.get_coordinate())))
    n_blocks = n_blocks if shared else held
    return BlockLayout(
        rows=math.prod(shard.shape[:row_dim]),
        row_length=math.prod(shard.shape[row_dim:]),
        n_blocks=n_blocks,
        scale_shape=(*shard.shape[:row_dim], n_blocks),
        scale_placements=tuple(_replicate() if i in shared else p for i, p in enumerate(placements)),
        shared=shared,
        row_shape=shape[row_dim:],
        row_runs=shard.runs[row_dim:],
        block_size=block_size,
    )


def _is_block_cut(
    shape: Sequence[int],
    placements: Sequence[Any],
    mesh_shape: Sequence[int],
    cuts_rows: Sequence[int],
    row_dim: int,
    block_size: int,
) -> bool:
    """Whether any rank's part of a row is not the blocks that it would hold if the scale were cut like the codes."""
    if any(placements[i].dim > row_dim for i in cuts_rows):
        return True
    row_length, inner = math.prod(shape[row_dim:]), math.prod(shape[row_dim + 1 :])
    n_blocks = codec.blocks_per_row(row_length, block_size)
    for coordinate in _coordinates(mesh_shape, cuts_rows):
        splits = _splits(row_dim, placements, mesh_shape, coordinate)
        blocks = []
        for start, length in _runs(shape[row_dim], splits):
            if start * inner % block_size:  # or an end, which is where another rank starts, or the end of the row
                return True
            blocks.append((start * inner // block_size, codec.blocks_per_row(length * inner, block_size)))
        if tuple(blocks) != _runs(n_blocks, splits):
            return True
    return False


@functools.cache
def _blocks(row_shape: Sequence[int], row_runs: Sequence[Runs], block_size: int, device: torch.device) -> Tensor:
    column = torch.zeros(1, dtype=torch.int64)
    for size, runs in zip(row_shape, row_runs, strict=True):
        column = (column[:, None] * size + torch.tensor([*_indices(runs)], dtype=torch.int64)).flatten()
    return (column // block_size).to(device)


def _replicate() -> Any:
    from torch.distributed.tensor import Replicate

    return Replicate()


# --- Whole tensors --------------------------------------------------------------------------------------------------


def full(x: Any) -> Tensor:
    """The whole of ``x`` as a plain tensor on every rank. A collective call, if ``x`` is a DTensor."""
    if not is_dtensor(x):
        return x
    return from_bytes(as_bytes(x).full_tensor()) if x.dtype == torch.int16 else x.full_tensor()


def copy_(target: Tensor, source: Tensor) -> None:
    """Write ``source`` into ``target``, of the same shape, whichever of them are DTensors.

    A collective call if ``source`` is one whose mesh or placements differ from those of ``target``.
    """
    if not same_sharding(target, source):
        source = full(source)
        if is_dtensor(target):
            source = _part(source, shard_of(target))
    to_local(target).copy_(to_local(source))


def _part(x: Tensor, shard: Shard) -> Tensor:
    for dim, runs in enumerate(shard.runs):
        x = torch.cat([x.narrow(dim, start, length) for start, length in runs or ((0, 0),)], dim)
    return x


def as_bytes(x: Any) -> Any:
    """int16 -> the same memory as uint8, with a new last dimension of 2. No backend sends int16 to other ranks."""
    pairs = to_local(x).unsqueeze(-1).view(torch.uint8)
    return from_local(pairs, x, (*x.shape, 2), x.placements) if is_dtensor(x) else pairs


def from_bytes(x: Any) -> Any:
    """The inverse of :func:`as_bytes`; a copy."""
    values = to_local(x).clone(memory_format=torch.contiguous_format).view(torch.int16).squeeze(-1)
    return from_local(values, x, x.shape[:-1], x.placements) if is_dtensor(x) else values
