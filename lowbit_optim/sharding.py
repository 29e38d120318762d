"""The state of sharded parameters, and their step on what each rank holds.

A step needs nothing of other ranks, except where a placement cuts through blocks (:class:`SharedBlocks`).
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowbit_optim import codec, shards
from lowbit_optim.subclasses.blockwise import BlockwiseTensor, parts

# --- State ----------------------------------------------------------------------------------------------------------


def zeros(p: Tensor, state_class: type[BlockwiseTensor], block_size: int) -> BlockwiseTensor:
    """Zero momentum shaped and sharded like ``p``, on the device of its shard."""
    if not shards.is_dtensor(p):
        return state_class.zeros(p.shape, block_size, device=p.device)
    whole = state_class.zeros(p.shape, block_size, device="meta")
    layout = shards.block_layout(p, block_size)
    codes = zeros_like(p, whole.codes.dtype)
    scale = torch.zeros(layout.scale_shape, dtype=whole.scale.dtype, device=shards.to_local(codes).device)
    return whole.with_parts(codes, shards.from_local(scale, p, whole.scale.shape, layout.scale_placements))


def zeros_like(p: Any, dtype: torch.dtype) -> Tensor:
    """Shaped and sharded like ``p``, on the device of its shard; contiguous."""
    if not shards.is_dtensor(p):
        return torch.zeros(p.shape, dtype=dtype, device=p.device)
    local = torch.zeros(shards.shard_of(p).shape, dtype=dtype, device=p.to_local().device)
    return shards.from_local(local, p, p.shape, p.placements)


def store(target: Tensor, momentum: Tensor) -> None:
    """Write ``momentum`` into state of the same shape, whichever of the two are sharded or quantised, and how.

    Bits are kept where both are quantised alike. Sharded momentum that ``target`` holds otherwise is
    gathered, one whole tensor at a time, which is a collective call.
    """
    if not _is_sharded(target) and not _is_sharded(momentum):
        target.copy_(momentum.to(target.device))
        return
    if _format(target) != _format(momentum):
        momentum = _whole(momentum)
        if isinstance(target, BlockwiseTensor):
            momentum = target.from_float(momentum, target.block_size)
    for part, source in zip(parts(target), parts(momentum), strict=True):
        shards.copy_(part, source)


def store_residual(target: Tensor, residual: Tensor) -> None:
    """Write the residuals of master weights, whichever of the two are sharded, and of however many bits they are.

    Fewer bits are rounded to; the weight stays, so that what would go to the next one stops halfway to it.
    """
    shards.copy_(target, map_parts(residual, lambda x: codec.convert_residual(x, target.dtype)))


def _whole(momentum: Tensor) -> Tensor:
    """Gathered and decoded."""
    if isinstance(momentum, BlockwiseTensor):
        codes, scale = map(shards.full, parts(momentum))
        return momentum.with_parts(codes, scale).dequantize(torch.float32)
    return shards.full(momentum)


def _is_sharded(momentum: Tensor) -> bool:
    return shards.is_dtensor(parts(momentum)[0])


def map_parts(state: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Momentum, or any other tensor of state, with ``function`` applied to what this rank holds of each part of it.

    ``function`` keeps shapes, and the dtypes of what is quantised. None stays None.
    """
    if state is None:
        return None
    if isinstance(state, BlockwiseTensor):
        return state.with_parts(*(map_parts(part, function) for part in parts(state)))
    if shards.is_dtensor(state):
        return shards.from_local(function(shards.to_local(state)), state, state.shape, state.placements)
    return function(state)


def local_parts(state: Any) -> list[Tensor]:
    """What :func:`map_parts` calls its function with."""
    return [] if state is None else [shards.to_local(part) for part in parts(state)]


def _format(momentum: Tensor) -> tuple[type[BlockwiseTensor], int] | None:
    return (type(momentum), momentum.block_size) if isinstance(momentum, BlockwiseTensor) else None


# --- What can be stepped --------------------------------------------------------------------------------------------


def check_not_flattened(p: Tensor) -> None:
    if getattr(p, "_fsdp_flattened", False) or getattr(p, "_is_flat_param", False) or hasattr(p, "ds_id"):
        raise NotImplementedError(
            f"a parameter of shape {tuple(p.shape)} is part of a flattened buffer (FullyShardedDataParallel, DeepSpeed "
            "ZeRO), which hides the shapes that blocks follow. Use FSDP2: torch.distributed.fsdp.fully_shard(model)"
        )


def check(p: Any, grad: Any, name: str) -> None:
    """That a step of ``p`` can be done, before anything moves."""
    check_not_flattened(p)
    if shards.is_dtensor(p):
        shards.shard_of(p)
    if shards.is_dtensor(p) != shards.is_dtensor(grad):
        kind = {True: "a DTensor", False: "a plain tensor"}
        raise TypeError(
            f"{name} of shape {tuple(p.shape)} is {kind[shards.is_dtensor(p)]}, its gradient "
            f"{kind[shards.is_dtensor(grad)]}. Make the gradient DTensor.from_local(grad, p.device_mesh, "
            "p.placements, shape=p.shape, stride=p.stride()), or let FSDP or the tensor-parallel style do it."
        )
    if shards.is_dtensor(p) and p.device_mesh != grad.device_mesh:
        raise ValueError(
            f"{name} of shape {tuple(p.shape)} is on {p.device_mesh}, its gradient on {grad.device_mesh}. "
            "They must be on one mesh."
        )


def needs_other_ranks(p: Any, grad: Any, exp_avg: Any) -> bool:
    """Whether the step of ``p`` is a collective call: its gradient is cut otherwise, or ranks share its blocks."""
    if not shards.is_dtensor(p):
        return False
    is_quantized = isinstance(exp_avg, BlockwiseTensor)
    shares_blocks = is_quantized and bool(shards.block_layout(exp_avg.codes, exp_avg.block_size).shared)
    return shares_blocks or not shards.same_sharding(p, grad)


def local_grad(p: Any, grad: Any) -> Tensor:
    """What this rank holds of the gradient, cut like ``p``: one with other placements (Partial, say) is redistributed.

    Every rank of the mesh takes part in that.
    """
    if shards.is_dtensor(p) and not shards.same_sharding(p, grad):
        grad = grad.redistribute(placements=p.placements)
    return shards.to_local(grad)


# --- The step on local tensors --------------------------------------------------------------------------------------


class LocalStep(NamedTuple):
    """What to call an update function on: plain tensors of one shape, and the noise of where they lie."""

    param: Tensor
    grad: Tensor
    exp_avg: Tensor
    master_residual: Tensor | None
    noise: codec.Noise | None


def local_steps(
    whole: Tensor, param: Tensor, grad: Tensor, exp_avg: Tensor, residual: Tensor | None, noise: codec.Noise | None
) -> Iterator[LocalStep]:
    """One for most shards; none for an empty one.

    Args:
        whole: the parameter, sharded or not.
        param, grad: what this rank holds of it, contiguous.
        exp_avg: its momentum: a block-wise tensor whose blocks are held whole, or a float tensor, or of such the
            local part.
        residual: the master weights', sharded like the parameter; None if there are none.
        noise: of the parameter; None if its weights are not rounded stochastically.
    """
    if not shards.is_dtensor(whole):
        yield LocalStep(param, grad, exp_avg, residual, noise)
        return
    residual = None if residual is None else shards.to_local(residual)
    exp_avg = exp_avg.local_rows() if isinstance(exp_avg, BlockwiseTensor) else shards.to_local(exp_avg)
    pieces = shards.shard_of(whole).pieces
    if noise is None:  # then it does not matter where elements lie
        if pieces:
            weights, gradients, fine = _shaped_like(exp_avg, param, grad, residual)
            yield LocalStep(weights, gradients, exp_avg, fine, None)
        return
    start = 0
    for piece in pieces:
        end = start + piece.rows * piece.length
        state = exp_avg if len(pieces) == 1 else _slice(exp_avg, start, end)
        cut = [x if x is None else x.view(-1)[start:end] for x in (param, grad, residual)]
        weights, gradients, fine = _shaped_like(state, *cut)
        yield LocalStep(weights, gradients, state, fine, noise._replace(position=piece.position()))
        start = end


def one_run(
    param: Any, grad: Any, exp_avg: Any, residual: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, int] | None:
    """What this rank holds of a DTensor, its gradient, momentum and residual, if it lies in one run of whole blocks.

    Returns:
        Plain tensors of one shape, in the same memory, and the index of their first element in the whole parameter.
        None for any other shard, or if the gradient is not cut like the parameter.
    """
    pieces = shards.shard_of(param).pieces
    if len(pieces) > 1 or any(piece.rows > 1 for piece in pieces) or not shards.same_sharding(param, grad):
        return None
    is_quantized = isinstance(exp_avg, BlockwiseTensor)
    if is_quantized and shards.block_layout(exp_avg.codes, exp_avg.block_size).shared:
        return None
    values, gradient = shards.to_local(param), shards.to_local(grad)
    if not values.is_contiguous() or not gradient.is_contiguous():
        return None
    state = exp_avg.local_rows() if is_quantized else shards.to_local(exp_avg)
    values, gradient, residual = _shaped_like(state, values, gradient, shards.to_local(residual))
    return values, gradient, state, residual, pieces[0].first if pieces else 0


def _shaped_like(state: Tensor, *tensors: Tensor | None) -> tuple[Any, ...]:
    return tuple(x if x is None else x.view(state.shape) for x in tensors)


def _slice(exp_avg: Tensor, start: int, end: int) -> Tensor:
    """Elements that follow each other in memory: some whole rows, or some whole blocks of one."""
    if not isinstance(exp_avg, BlockwiseTensor):
        return exp_avg.view(-1)[start:end]
    row_length, n_blocks = exp_avg.shape[1], exp_avg.scale.shape[1]
    part_length = min(row_length, end - start)
    codes = exp_avg.codes.view(-1)[start:end].view(-1, part_length)
    part_blocks = codec.blocks_per_row(part_length, exp_avg.block_size)
    first = start // row_length * n_blocks + start % row_length // exp_avg.block_size
    scale = exp_avg.scale.view(-1)[first : first + codes.shape[0] * part_blocks].view(-1, part_blocks)
    return exp_avg.with_parts(codes, scale)


class SharedBlocks:
    """Momentum whose blocks several ranks hold parts of: stored after one small all-reduce for all of it.

    :meth:`decode` gives the update function float momentum to write to; :meth:`encode`, once all are updated, stores
    that. In between, the float momentum of these parameters is in memory.
    """

    def __init__(self) -> None:
        self._decoded: dict[Any, list[tuple[BlockwiseTensor, Tensor]]] = {}

    def decode(self, exp_avg: Tensor) -> Tensor:
        """``exp_avg`` itself, unless it has such blocks; then the fp32 values that this rank holds, in rows."""
        if not isinstance(exp_avg, BlockwiseTensor) or not shards.is_dtensor(exp_avg.codes):
            return exp_avg
        shared = shards.block_layout(exp_avg.codes, exp_avg.block_size).shared
        if not shared:
            return exp_avg
        codes: Any = exp_avg.codes
        values = exp_avg.dequantize_local()
        self._decoded.setdefault((codes.device_mesh, shared), []).append((exp_avg, values))
        return values

    def encode(self) -> None:
        """Every rank of the mesh takes part, in the same order: the one in which they were decoded."""
        for (mesh, shared), decoded in self._decoded.items():
            maxima = self._reduce_maxima(mesh, shared, [_maxima(exp_avg, values) for exp_avg, values in decoded])
            for (exp_avg, values), absmax in zip(decoded, maxima, strict=True):
                block = shards.block_layout(exp_avg.codes, exp_avg.block_size).blocks(values.device)
                codes, scale = exp_avg._encode_part(values, absmax, block)
                local = exp_avg.local_rows()
                local.codes.copy_(codes)
                local.scale.copy_(scale)
        self._decoded.clear()

    @staticmethod
    def _reduce_maxima(mesh: Any, shared: tuple[int, ...], maxima: list[Tensor]) -> list[Tensor]:
        """The larger of all ranks' along the dimensions ``shared`` of ``mesh``."""
        import torch.distributed as dist

        reduced = torch.cat([x.flatten().to(mesh.device_type) for x in maxima])
        for dim in shared:
            dist.all_reduce(reduced, dist.ReduceOp.MAX, group=mesh.get_group(dim))
        pieces = reduced.split([x.numel() for x in maxima])
        return [piece.view(x.shape).to(x.device) for piece, x in zip(pieces, maxima, strict=True)]


def _maxima(exp_avg: BlockwiseTensor, values: Tensor) -> Tensor:
    layout = shards.block_layout(exp_avg.codes, exp_avg.block_size)
    return codec.absmax_of_part(values, layout.blocks(values.device), layout.n_blocks)
