"""What every block-wise quantised state tensor has in common: one op table.

A format derives from :class:`BlockwiseTensor` and supplies two functions, ``_encode`` and ``_decode``, and for shards
that cut blocks ``_encode_part`` and ``_decode_part``. Which ops keep the class is an allow-list. Any other out-of-place
op sees the decoded values; any other in-place op is refused.
"""

import itertools
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torchao.utils import TorchAOBaseTensor

from lowbit_optim import codec, shards

aten = torch.ops.aten


class BlockwiseTensor(TorchAOBaseTensor):
    """A float tensor stored as integer codes and one scale for each block of a row (:func:`codec.row_layout`).

    Attributes:
        codes: integer codes, shaped like the tensor. A DTensor for a sharded parameter, and ``scale`` likewise.
        scale: a scale a block, shaped as :func:`codec.scale_shape` says.
        block_size: elements that share a scale.
        dtype: the float dtype it appears to have, and decodes to.
    """

    tensor_data_names = ["codes", "scale"]
    tensor_attribute_names = ["block_size", "dtype"]

    codes: Tensor
    scale: Tensor
    block_size: int

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor, block_size: int, dtype: torch.dtype = torch.float32) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, codes.shape, strides=codes.stride(), dtype=dtype, device=codes.device
        )

    def __init__(self, codes: Tensor, scale: Tensor, block_size: int, dtype: torch.dtype = torch.float32) -> None:
        self.codes = codes
        self.scale = scale
        self.block_size = block_size

    @staticmethod
    def _encode(x: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
        """``x`` -> ``(codes, scale)``, both all zeros if ``x`` is."""
        raise NotImplementedError("a block-wise format defines _encode")

    @staticmethod
    def _decode(codes: Tensor, scale: Tensor, block_size: int, dtype: torch.dtype) -> Tensor:
        """The inverse of :meth:`_encode`."""
        raise NotImplementedError("a block-wise format defines _decode")

    @staticmethod
    def _encode_part(x: Tensor, absmax: Tensor, block: Tensor) -> tuple[Tensor, Tensor]:
        """As :meth:`_encode`, of rows that are held in part (:func:`codec.encode_part`)."""
        raise NotImplementedError("a block-wise format defines _encode_part")

    @staticmethod
    def _decode_part(codes: Tensor, scale: Tensor, block: Tensor) -> Tensor:
        """The inverse of :meth:`_encode_part`, fp32."""
        raise NotImplementedError("a block-wise format defines _decode_part")

    @classmethod
    def from_float(cls, x: Tensor, block_size: int = 64, dtype: torch.dtype | None = None) -> "BlockwiseTensor":
        """Quantise ``x``, a float tensor of at least one dimension with finite values.

        Args:
            x: any float dtype; its shape and device are kept.
            block_size: elements that share a scale.
            dtype: the dtype to appear to have, ``x.dtype`` if None.
        """
        _check_shape(x.shape, block_size)
        if not x.dtype.is_floating_point:
            raise TypeError(f"from_float quantises float tensors, not {x.dtype}")
        if shards.is_dtensor(x):  # whose view as another dtype converts values
            raise TypeError(
                "from_float takes plain tensors, not DTensors: write into sharded state with state.copy_(x)"
            )
        return cls(*cls._encode(x.detach(), block_size), block_size, dtype or x.dtype)

    @classmethod
    def zeros(
        cls,
        shape: tuple[int, ...] | torch.Size,
        block_size: int = 64,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> "BlockwiseTensor":
        """All zeros, of a shape with at least one dimension."""
        _check_shape(shape, block_size)
        # encoding real zeros would take many times the memory of the result
        codes, scale = cls._encode(torch.empty(shape, device="meta"), block_size)
        return cls(
            torch.zeros(codes.shape, dtype=codes.dtype, device=device),
            torch.zeros(scale.shape, dtype=scale.dtype, device=device),
            block_size,
            dtype,
        )

    def with_parts(self, codes: Tensor, scale: Tensor, dtype: torch.dtype | None = None) -> "BlockwiseTensor":
        """Other codes and scales in the same format, that appear to be of ``dtype`` (``self.dtype`` if None)."""
        return type(self)(codes, scale, self.block_size, dtype or self.dtype)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values as a plain tensor of ``dtype`` (``self.dtype`` if None)."""
        dtype = dtype or self.dtype
        if not shards.is_dtensor(self.codes):
            return self._decode(self.codes, self.scale, self.block_size, dtype)
        codes: Any = self.codes
        values = self.dequantize_local().to(dtype).view(codes.to_local().shape)
        return shards.from_local(values, codes, self.shape, codes.placements)

    def dequantize_local(self) -> Tensor:
        """What this rank holds of a sharded tensor, fp32, in rows as blocks see it."""
        layout = shards.block_layout(self.codes, self.block_size)
        local = self.local_rows()
        if layout.shared:
            return self._decode_part(local.codes, local.scale, layout.blocks(local.device))
        return local.dequantize(torch.float32)

    def local_rows(self) -> "BlockwiseTensor":
        """What this rank holds of a sharded tensor, in rows as blocks see it; in the same memory.

        Where blocks are held in part, this has more scales than its shape says.
        """
        layout = shards.block_layout(self.codes, self.block_size)
        codes = shards.to_local(self.codes).view(layout.rows, layout.row_length)
        scale = shards.to_local(self.scale).view(layout.rows, layout.n_blocks)
        return self.with_parts(codes, scale)

    def as_rows(self, row_length: int) -> "BlockwiseTensor":
        """A ``(numel / row_length, row_length)`` view; ``row_length`` is the block size or the rows' own length."""
        n_blocks = codec.blocks_per_row(row_length, self.block_size)
        return self.with_parts(self.codes.view(-1, row_length), self.scale.view(-1, n_blocks))

    # torch's own of the next three reach for the storage that a wrapper does not have, and crash the process

    def share_memory_(self) -> "BlockwiseTensor":
        self.codes.share_memory_()
        self.scale.share_memory_()
        return self

    def apply_(self, callable: Any) -> Any:
        raise _in_place_error("apply_")

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        return self.dequantize().__dlpack__(*args, **kwargs)

    def is_shared(self) -> bool:
        return self.codes.is_shared() and self.scale.is_shared()

    def _stable_hash_for_caching(self) -> str:
        """What a compiled graph depends on, for torch's on-disk cache of graphs."""
        parts = [(p.shape, p.stride(), p.dtype, p.device) for p in (self.codes, self.scale)]
        return f"{type(self).__qualname__}{(self.block_size, self.dtype, self.requires_grad, parts)}"

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return (
            f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device}, "
            f"block_size={self.block_size}, codes={self.codes.dtype}, scale={self.scale.dtype})"
        )

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in cls._ATEN_OP_TABLE[cls]:
            return cls._ATEN_OP_TABLE[cls][func](func, types, args, kwargs)
        return _run_on_values(func, args, kwargs)


def _check_shape(shape: tuple[int, ...] | torch.Size, block_size: int) -> None:
    if len(shape) == 0:
        raise ValueError("a block-wise tensor needs at least one dimension, got shape (): keep a scalar in float32")
    if block_size < 1:
        raise ValueError(f"block_size={block_size}: at least 1 element must share a scale")


def _run_on_values(func: Any, args: Any, kwargs: Any) -> Any:
    """Any op outside the table: on the decoded values, unless it would have to write into a quantised tensor."""
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.is_write and _contains_blockwise(value):
            raise _in_place_error(func)
    if any(a.is_write and _contains_blockwise(kwargs.get(a.name)) for a in func._schema.arguments):
        raise _in_place_error(func)
    args, kwargs = tree_map_only(BlockwiseTensor, lambda t: t.dequantize(), (args, kwargs))
    return func(*args, **kwargs)


def _contains_blockwise(value: Any) -> bool:
    values = value if isinstance(value, (list, tuple)) else [value]
    return any(isinstance(v, BlockwiseTensor) for v in values)


def _in_place_error(func: Any) -> NotImplementedError:
    return NotImplementedError(
        f"{func} would write into a quantised tensor, which would lose precision without saying so. "
        "Compute on x.dequantize() and store the result with x.copy_(result)."
    )


# --- The op table: these keep the class -----------------------------------------------------------------------------


def _if_blocks_whole(x: BlockwiseTensor, codes: Tensor, scale: Tensor) -> BlockwiseTensor | None:
    """The parts as a tensor of their own, or None if its shape implies other blocks than the scale has."""
    if codes.ndim == 0 or scale.shape != codec.scale_shape(codes.shape, x.block_size):
        return None
    return x.with_parts(codes, scale)


@BlockwiseTensor.implements([aten.clone.default, aten.contiguous.default])
def _clone(func: Any, types: Any, args: Any, kwargs: Any) -> Tensor:
    x = args[0]
    return x.with_parts(func(x.codes, *args[1:], **kwargs), x.scale.clone())  # scale may have no such memory format


@BlockwiseTensor.implements([aten._to_copy.default])
def _to_copy(func: Any, types: Any, args: Any, kwargs: Any) -> Tensor:
    x = args[0]
    dtype = kwargs.pop("dtype", None) or x.dtype
    if not dtype.is_floating_point:
        return func(x.dequantize(), dtype=dtype, **kwargs)
    scale_kwargs = {k: v for k, v in kwargs.items() if k != "memory_format"}
    return x.with_parts(func(x.codes, **kwargs), func(x.scale, **scale_kwargs), dtype)


@BlockwiseTensor.implements([aten._pin_memory.default])
def _pin_memory(func: Any, types: Any, args: Any, kwargs: Any) -> Tensor:
    x = args[0]
    return x.with_parts(func(x.codes, *args[1:], **kwargs), func(x.scale, *args[1:], **kwargs))


@BlockwiseTensor.implements([aten.is_pinned.default])
def _is_pinned(func: Any, types: Any, args: Any, kwargs: Any) -> bool:
    return args[0].codes.is_pinned() and args[0].scale.is_pinned()


@BlockwiseTensor.implements([aten.copy_.default])
def _copy_(func: Any, types: Any, args: Any, kwargs: Any) -> Tensor:
    """All four combinations of quantised and float; a broadcast source works as it does for plain tensors.

    Where the target is sharded, a plain source is taken for the whole. A float one that is sharded is gathered to be
    encoded, and a quantised one that is cut otherwise, which are collective calls.
    """
    target, source = args[0], args[1]
    if not isinstance(target, BlockwiseTensor):
        return func(target, source.dequantize(), *args[2:], **kwargs)
    if type(source) is type(target) and source.shape == target.shape and source.block_size == target.block_size:
        codes, scale = source.codes, source.scale
    else:
        values = shards.full(dequantize(source))
        codes, scale = target._encode(values.expand(target.shape), target.block_size)
    if shards.is_dtensor(target.codes):
        shards.copy_(target.codes, codes)
        shards.copy_(target.scale, scale)
        return target
    target.codes.copy_(codes, *args[2:])
    target.scale.copy_(scale, *args[2:])
    return target


@BlockwiseTensor.implements([aten.zero_.default])
def _zero_(func: Any, types: Any, args: Any, kwargs: Any) -> Tensor:
    args[0].codes.zero_()
    args[0].scale.zero_()
    return args[0]


@BlockwiseTensor.implements(
    [
        aten.zeros_like.default,
        aten.empty_like.default,
        aten.new_zeros.default,
        aten.new_empty.default,
    ]
)
def _new(func: Any, types: Any, args: Any, kwargs: Any) -> Tensor:
    """New tensors are zero where torch leaves them undefined: arbitrary bytes could decode to NaN."""
    x = args[0]
    dtype, device = kwargs.get("dtype") or x.dtype, kwargs.get("device") or x.device
    if len(args) == 1 and dtype.is_floating_point:
        return x.with_parts(*(torch.zeros_like(part, device=device) for part in parts(x)), dtype)  # and as sharded
    shape = args[1] if len(args) > 1 else x.shape
    if len(shape) == 0 or not dtype.is_floating_point:
        return torch.zeros(shape, dtype=dtype, device=device)
    return type(x).zeros(shape, x.block_size, dtype, device)


@BlockwiseTensor.implements([aten.view.default, aten._unsafe_view.default])
def _view(func: Any, types: Any, args: Any, kwargs: Any) -> Tensor:
    x = args[0]
    codes = func(x.codes, args[1])
    if codes.shape == x.shape:
        return x.with_parts(codes, x.scale)
    return func(x.dequantize(), args[1])


@BlockwiseTensor.implements([aten.view.dtype])
def _view_dtype(func: Any, types: Any, args: Any, kwargs: Any) -> Tensor:
    x, dtype = args
    if not dtype.is_floating_point:
        raise NotImplementedError(f"a quantised tensor has no bits to see as {dtype}: use x.codes, or x.dequantize()")
    return x.with_parts(x.codes, x.scale, dtype)


@BlockwiseTensor.implements([aten.slice.Tensor])
def _slice(func: Any, types: Any, args: Any, kwargs: Any) -> Tensor:
    x, dim, start, end, step = _slice_arguments(*args, **kwargs)
    codes = func(x.codes, dim, start, end, step)
    if codes.shape == x.shape:
        return x.with_parts(codes, x.scale)
    scale = _slice_scale(func, x, dim, start, end, step)
    kept = None if scale is None else _if_blocks_whole(x, codes, scale)
    return func(x.dequantize(), dim, start, end, step) if kept is None else kept


def _slice_arguments(x: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> tuple:
    dim = dim % x.ndim
    length = x.shape[dim]
    start, end, _ = slice(start, end).indices(length)
    return x, dim, start, max(start, end), step


def _slice_scale(func: Any, x: BlockwiseTensor, dim: int, start: int, end: int, step: int) -> Tensor | None:
    """The scales of a slice of ``x``; None if it cuts a block."""
    if _is_leading(x, dim):
        return func(x.scale, dim, start, end, step)
    starts_block = start % x.block_size == 0
    ends_block = end % x.block_size == 0 or end == x.shape[dim]
    if dim != x.ndim - 1 or x.scale.ndim != x.ndim or step != 1 or not (starts_block and ends_block):
        return None
    return func(x.scale, dim, start // x.block_size, codec.blocks_per_row(end, x.block_size), 1)


def _is_leading(x: BlockwiseTensor, dim: int) -> bool:
    """Whether blocks leave this dimension alone, so that codes and scale can be cut there alike."""
    return dim < x.scale.ndim - 1


@BlockwiseTensor.implements([aten.select.int])
def _select(func: Any, types: Any, args: Any, kwargs: Any) -> Tensor:
    x, dim, index = args
    dim = dim % x.ndim
    kept = None
    if _is_leading(x, dim):
        kept = _if_blocks_whole(x, func(x.codes, dim, index), func(x.scale, dim, index))
    return func(x.dequantize(), dim, index) if kept is None else kept


@BlockwiseTensor.implements_torch_function(
    [
        torch.split,
        torch.Tensor.split,
        torch.split_with_sizes,
        torch.Tensor.split_with_sizes,
        torch.chunk,
        torch.Tensor.chunk,
    ]
)
def _split(func: Any, types: Any, args: Any, kwargs: Any) -> tuple[Tensor, ...]:
    """As slices: below this level autograd rewraps the parts of an op with several outputs as plain tensors."""
    x, dim = args[0], kwargs.get("dim", args[2] if len(args) > 2 else 0)
    sizes = [piece.shape[dim] for piece in func(x.codes, *args[1:], **kwargs)]
    ends = itertools.accumulate(sizes)
    return tuple(x.narrow(dim, end - size, size) for end, size in zip(ends, sizes, strict=True))


@BlockwiseTensor.implements_torch_function([torch.Tensor.contiguous])
def _contiguous(func: Any, types: Any, args: Any, kwargs: Any) -> Tensor:
    """As a clone where it is one: torchao asks the parts, and a scale may have no such memory format."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


@BlockwiseTensor.implements_torch_function([torch.Tensor.__setitem__])
def _setitem(func: Any, types: Any, args: Any, kwargs: Any) -> None:
    """Refused where the indexed part is decoded values: the write would be lost with them."""
    x, index, _ = args
    if isinstance(x, BlockwiseTensor) and not isinstance(x[index], BlockwiseTensor):
        raise _in_place_error("x[index] = value, where the index cuts a block,")
    with torch._C.DisableTorchFunctionSubclass():
        func(*args, **kwargs)


@BlockwiseTensor.implements([aten.cat.default])
def _cat(func: Any, types: Any, args: Any, kwargs: Any) -> Tensor:
    tensors, dim = args[0], (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % args[0][0].ndim
    first = tensors[0]
    alike = isinstance(first, BlockwiseTensor) and all(
        type(t) is type(first) and t.block_size == first.block_size and t.dtype == first.dtype and _is_leading(t, dim)
        for t in tensors
    )
    kept = None
    if alike:
        codes, scale = func([t.codes for t in tensors], dim), func([t.scale for t in tensors], dim)
        kept = _if_blocks_whole(first, codes, scale)
    return func([dequantize(t) for t in tensors], dim) if kept is None else kept


# --- Momentum, quantised or not -------------------------------------------------------------------------------------


def dequantize(x: Tensor) -> Tensor:
    return x.dequantize() if isinstance(x, BlockwiseTensor) else x


def parts(x: Tensor) -> tuple[Tensor, ...]:
    """What ``x`` is stored in."""
    return (x.codes, x.scale) if isinstance(x, BlockwiseTensor) else (x,)
