"""The host's side of the fused step: which tensors share a launch, and the table in which the kernel finds them."""

from array import array
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from itertools import compress
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowbit_optim import codec
from lowbit_optim.fused.kernel import FIELDS, PROGRAMS_PER_BUCKET, QUANTIZED, UNEVEN, lion_kernel
from lowbit_optim.hyperparameters import is_capturing
from lowbit_optim.subclasses.blockwise import BlockwiseTensor
from lowbit_optim.triton_launch import alignments, launch
from lowbit_optim.updates import FusedOptions, Updates, watch

# torch's own, and not in every build of it
try:
    from torch._C._dynamo.guards import TensorGuards
except ImportError:
    TensorGuards = None  # type: ignore[assignment, misc]
_addresses_equal = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)

_PROGRAM_NUMEL = 512
_WARPS = 1  # then no thread waits for another warp's share of a block's maximum
_ALIGNMENT = 16  # bytes of the widest load, and elements of one of codes
_TRITON_DTYPES = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


class FusedLion:
    """A Lion step of many tensors, in place and without waiting for the device.

    What is launched is planned once for tensors that stay where they are; gradients may move from step to step. For
    ``updates`` see :class:`lowbit_optim.updates.Updates`; parameters and gradients are plain and contiguous.
    """

    def __init__(self) -> None:
        self._layouts = _Layouts([])
        self._states = _States([])
        self._weights = self._grads = _Addresses([])
        self._key: tuple[Any, ...] = ()
        self._launches: list[_Launch] = []

    def takes(self, updates: Updates, options: FusedOptions) -> bool:
        """Whether these are the tensors of the plan; only gradients may be elsewhere, which it takes note of."""
        residuals = _residuals(updates, options)
        return (
            self._key == (options, updates.indices, updates.firsts)
            and self._layouts.are_those_of([*updates.params, *updates.grads, *residuals])
            and self._weights.are_those_of([*updates.params, *residuals])
            and self._states.are(updates.exp_avgs)
            and self._takes_grads(updates.grads)
        )

    def _takes_grads(self, grads: list[Tensor]) -> bool:
        """They may move by whole _ALIGNMENTs."""
        if self._grads.are_those_of(grads):
            return True
        moved = _Addresses(grads)
        if moved.remainders != self._grads.remainders:
            return False
        self._grads = moved
        return True

    def plan(self, updates: Updates, options: FusedOptions) -> None:
        """Raises RuntimeError if the state or the gradient of a parameter does not fit it."""
        launches: dict[tuple[Any, ...], _Launch] = {}
        for number, (param, grad, exp_avg, residual, index, first) in enumerate(zip(*updates, strict=True)):
            _check(param, grad, exp_avg, residual)
            if param.numel() == 0:
                continue
            block = options.block_size
            if isinstance(exp_avg, BlockwiseTensor):
                block = _own_block_size(param.shape, exp_avg.block_size)
            residual_bits = 0 if residual is None else 8 * residual.element_size()
            kind = (param.device, param.dtype, grad.dtype, block, options.stochastic_rounding, residual_bits)
            if kind not in launches:
                launches[kind] = _Launch(*kind)
            launches[kind].add(number, param, grad, exp_avg, residual, codec.noise_key(options.seed, index), first)
        residuals = _residuals(updates, options)
        self._launches = list(launches.values())
        self._layouts = _Layouts([*updates.params, *updates.grads, *residuals])
        self._weights = _Addresses([*updates.params, *residuals])
        self._states = _States(updates.exp_avgs)
        self._grads = _Addresses(updates.grads)
        self._key = options, updates.indices, updates.firsts

    def run(
        self,
        scalars: Sequence[float | Tensor],
        step: int | Tensor,
        inverse_grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
    ) -> None:
        """Step the tensors that it was planned for, or last took.

        Args:
            scalars: ``lr, decay, beta1, grad_weight1, beta2, grad_weight2``; floats, or the first two 0-D float32.
            step: the number of the step; an int, or 0-D int64 on a device.
            inverse_grad_scale, found_inf: float32 of one element. Gradients are multiplied by the one; unless the
                other is 0, nothing changes.
        """
        for each in self._launches:
            each.run(self._grads, scalars, step, inverse_grad_scale, found_inf)


class _Layouts:
    """Types, devices, dtypes, shapes and strides of tensors, compared by what Dynamo has for its graphs.

    In Python, a look at each of these costs as much as all else that a step does for a tensor.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        self._layouts = list(map(_layout, tensors))
        self._guards = None
        if TensorGuards is not None:
            sizes: list[Any] = [list(x.shape) for x in tensors]
            strides: list[Any] = [list(x.stride()) for x in tensors]
            self._guards = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)

    def are_those_of(self, tensors: list[Tensor]) -> bool:
        if len(tensors) != len(self._layouts):
            return False
        return self._guards.check(*tensors) if self._guards else self._layouts == list(map(_layout, tensors))


def _layout(x: Tensor) -> tuple[Any, ...]:
    return type(x), x.device, x.dtype, x.shape, x.stride(), x.is_neg()


class _Addresses:
    """Where tensors were, compared by what torch has for the graphs that it captures."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.addresses = list(map(Tensor.data_ptr, tensors))
        self._order = list(range(len(tensors)))

    @cached_property
    def remainders(self) -> list[int]:
        return [address % _ALIGNMENT for address in self.addresses]

    def are_those_of(self, tensors: list[Tensor]) -> bool:
        """As many tensors as they were."""
        if _addresses_equal is not None:
            return _addresses_equal(tensors, self.addresses, self._order)
        return self.addresses == list(map(Tensor.data_ptr, tensors))


class _States:
    """Momentum, recognised without looking into what is quantised: that would be a third of a step's host time."""

    def __init__(self, exp_avgs: list[Tensor]) -> None:
        self._ids = list(map(id, exp_avgs))
        self._is_float = [not isinstance(exp_avg, BlockwiseTensor) for exp_avg in exp_avgs]
        self._floats = _Addresses(self._select_floats(exp_avgs))
        self._addresses = list(map(_addresses, exp_avgs))
        self._watches = watch(exp_avgs, self._forget_ids)

    def _forget_ids(self, _: Any) -> None:
        """One has been freed: another object may get its id."""
        self._ids = [0]

    def _select_floats(self, exp_avgs: list[Tensor]) -> list[Tensor]:
        return list(compress(exp_avgs, self._is_float))

    def are(self, exp_avgs: list[Tensor]) -> bool:
        """Whether these are where the others were."""
        if self._ids == list(map(id, exp_avgs)):  # but ``exp_avg.data`` can be replaced
            return self._floats.are_those_of(self._select_floats(exp_avgs))
        return self._addresses == list(map(_addresses, exp_avgs))


def _addresses(exp_avg: Tensor) -> tuple[int, ...]:
    if not isinstance(exp_avg, BlockwiseTensor):
        return (exp_avg.data_ptr(),) if isinstance(exp_avg, Tensor) else ()  # the check that follows names it
    return exp_avg.codes.data_ptr(), exp_avg.scale.data_ptr(), exp_avg.block_size


def _residuals(updates: Updates, options: FusedOptions) -> list[Tensor]:
    if not options.master_weight_bits:
        return []
    return [residual for residual in updates.residuals if residual is not None]


@dataclass
class _Launch:
    """Tensors of one device, dtype, gradient dtype and block size, and their table but for the gradients."""

    device: torch.device
    param_dtype: torch.dtype
    grad_dtype: torch.dtype
    block_size: int
    stochastic_rounding: bool
    residual_bits: int
    members: list[int] = field(default_factory=list)
    fields: array = field(default_factory=lambda: array("q"))
    first_programs: array = field(default_factory=lambda: array("q"))
    buckets: array = field(default_factory=lambda: array("q"))
    programs: int = 0
    kinds: int = 0
    _last: tuple[_Addresses, Any, Tensor] | None = None  # gradients, stream, table

    @cached_property
    def width(self) -> int:
        return triton.next_power_of_2(self.block_size)

    @cached_property
    def rows(self) -> int:
        return max(1, _PROGRAM_NUMEL // self.width)

    @cached_property
    def uneven_rows(self) -> int:
        """Fewer, since their addresses take registers."""
        return max(1, self.rows // 4)

    def add(
        self,
        number: int,
        param: Tensor,
        grad: Tensor,
        exp_avg: Tensor,
        residual: Tensor | None,
        noise_key: int,
        first: int,
    ) -> None:
        """A tensor with at least one element; ``number`` is its place among the gradients."""
        blocks, fields = _fields(param, grad, exp_avg, residual, self.block_size, first)
        fields["noise_key"] = noise_key
        self.first_programs.append(self.programs)
        self.programs += -(-blocks // (self.uneven_rows if fields["kind"] & UNEVEN else self.rows))
        n_buckets = -(-self.programs // PROGRAMS_PER_BUCKET.value)
        self.buckets.extend([len(self.members)] * (n_buckets - len(self.buckets)))
        self.members.append(number)
        self.fields.extend(fields[name] for name in FIELDS)
        self.kinds |= 1 << fields["kind"]

    def run(
        self,
        grads: _Addresses,
        scalars: Sequence[float | Tensor],
        step: int | Tensor,
        inverse_grad_scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        lr = scalars[0]
        args = [self._here(value) for value in (step, *scalars, inverse_grad_scale, found_inf)]
        are_on_device = isinstance(step, Tensor), isinstance(lr, Tensor), isinstance(lr, Tensor) or lr == 0
        # the table always begins on 16 bytes: torch allocates it
        key = self._constants, are_on_device, inverse_grad_scale is None, found_inf is None, alignments(*args)
        with _current(self.device):
            launch(
                lion_kernel,
                (self.programs,),
                key,
                self._table(grads),
                len(self.members),
                *args,
                *are_on_device,
                *self._constants,
                num_warps=max(_WARPS, self.width // _PROGRAM_NUMEL),
                enable_fp_fusion=False,
            )

    @cached_property
    def _constants(self) -> tuple[Any, ...]:
        """The kernel's last."""
        return (
            _TRITON_DTYPES[self.param_dtype],
            _TRITON_DTYPES[self.grad_dtype],
            self.stochastic_rounding and self.param_dtype != torch.float32 and self.residual_bits != 16,
            self.residual_bits,
            self.block_size,
            self.width,
            self.rows,
            self.uneven_rows,
            self.kinds,
        )

    def _table(self, grads: _Addresses) -> Tensor:
        """On the device. Another one if gradients have moved, or it is for another stream or a captured graph.

        So nothing is ever written that an earlier step, a copy under way or a captured graph may still read; torch's
        allocators keep the memory for as long as that.
        """
        if is_capturing():  # the memory is the graph's, and filled when that is replayed
            return self._make_table(grads.addresses)
        stream = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None
        if self._last is None or self._last[0] is not grads or self._last[1] != stream:
            self._last = grads, stream, self._make_table(grads.addresses)
        return self._last[2]

    def _make_table(self, grads: list[int]) -> Tensor:
        numbers = array("q", [grads[number] for number in self.members] if len(self.members) < len(grads) else grads)
        for part in (self.fields, self.first_programs, self.buckets):
            numbers.extend(part)
        numbers.append(len(self.members) - 1)
        table = torch.frombuffer(numbers, dtype=torch.int64)
        return table.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else table.clone()

    def _here(self, value: Any) -> Any:
        return value.to(self.device, non_blocking=True) if isinstance(value, Tensor) else value


def _check(param: Tensor, grad: Tensor, exp_avg: Tensor, residual: Tensor | None) -> None:
    """The kernel would read and write wherever a tensor that does not fit points to."""
    if grad.shape != param.shape or grad.device != param.device:
        raise RuntimeError(
            f"a parameter of shape {tuple(param.shape)} on {param.device} has a gradient of shape {tuple(grad.shape)} "
            f"on {grad.device}, from before it was changed: set p.grad = None when p.data is replaced"
        )
    if grad.dtype not in _TRITON_DTYPES:
        raise TypeError(
            f"a parameter of shape {tuple(param.shape)} has a gradient of {grad.dtype}; float64, float32, bfloat16 and "
            "float16 are allowed with the fused step"
        )
    parts = [(exp_avg, param.shape, torch.float32)]
    if isinstance(exp_avg, BlockwiseTensor):
        scale_shape = torch.Size(codec.scale_shape(param.shape, exp_avg.block_size))
        parts = [(exp_avg.codes, param.shape, torch.int8), (exp_avg.scale, scale_shape, codec.SCALE_DTYPE)]
    if residual is not None:
        parts.append((residual, param.shape, torch.int8 if residual.dtype == torch.int8 else torch.int16))
    for part, shape, dtype in parts:
        if part.device != param.device or part.shape != shape or part.dtype != dtype or not part.is_contiguous():
            raise RuntimeError(
                f"the state of a parameter of shape {tuple(param.shape)} on {param.device} was changed: there is a "
                f"{part.dtype} tensor of shape {tuple(part.shape)} on {part.device}, where a contiguous {dtype} one of "
                f"shape {tuple(shape)} is needed on {param.device}. Put it back, or load a checkpoint."
            )


def _own_block_size(shape: torch.Size, block_size: int) -> int:
    """Rows shorter than a block are blocks themselves; even ones, if they have a power of 2 of elements."""
    _, row_length = codec.row_layout(shape, block_size)
    is_even = _ALIGNMENT <= row_length == triton.next_power_of_2(row_length)
    return row_length if row_length < block_size and is_even else block_size


def _fields(
    param: Tensor, grad: Tensor, exp_avg: Tensor, residual: Tensor | None, block_size: int, first: int
) -> tuple[int, dict[str, int]]:
    """The number of blocks, and what the table has of a tensor but for its noise key."""
    numel = row_length = param.numel()
    block = triton.next_power_of_2(block_size)
    kind, whole, state, scale = 0, _ALIGNMENT, exp_avg, 0
    if isinstance(exp_avg, BlockwiseTensor):
        kind, whole, state, scale = QUANTIZED, block_size, exp_avg.codes, exp_avg.scale.data_ptr()
        _, row_length = codec.row_layout(param.shape, block_size)
        block = block_size
    fields = {
        "param": param.data_ptr(),
        "exp_avg": state.data_ptr(),
        "scale": scale,
        "numel": numel,
        "row_length": row_length,
        "first_element": first,
        "residual": 0 if residual is None else residual.data_ptr(),
    }
    addresses = fields["param"] | grad.data_ptr() | fields["exp_avg"] | fields["residual"]
    is_aligned = addresses % _ALIGNMENT == 0 and first % codec.NOISE_LANES == 0
    if not is_aligned or row_length % whole or block != triton.next_power_of_2(block):
        kind |= UNEVEN
    return numel // row_length * codec.blocks_per_row(row_length, block), {"kind": kind, **fields}


def _current(device: torch.device) -> AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
