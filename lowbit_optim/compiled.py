"""Running an update function compiled: which graphs there are, and when it runs uncompiled instead.

An update function takes plain tensors and, for a quantised momentum, an :class:`OptimState8bit`. It is compiled for
whole classes of shapes, so that one graph serves all parameters of a dtype and kind:

- aligned rows, seen as ``(blocks, block_size)``, with a dynamic number of blocks;
- unquantised, seen as ``(numel,)``, with a dynamic size;
- ragged rows, seen as ``(rows, row_length)``, with both sizes *unbacked*: Dynamo knows nothing of them. With dynamic
  ones it would make graphs of their own for one row and for one block. The price is that little is fused.

A dynamic size of 0 or 1 would be a graph of its own, too; so small a tensor runs uncompiled.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.decorators import mark_unbacked, maybe_mark_dynamic
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from lowbit_optim import codec
from lowbit_optim.subclasses.blockwise import BlockwiseTensor

# Rounds where an eager step does, in every bit: this also keeps a multiplication and an addition apart.
_OPTIONS = {"emulate_precision_casts": True}
_MAX_GRAPHS = 64  # dtypes x rounding x block sizes x layouts; Dynamo's own limit is 8

UpdateFunction = Callable[..., None]  # as lion_update: each has scalars of its own between what all have


class CompiledUpdate:
    """Calls ``update(param, grad, exp_avg, *scalars, noise=..., master_residual=...)``, compiled where that works.

    Args:
        update: writes ``param``, ``exp_avg`` and ``master_residual``. Momentum is an ``OptimState8bit`` or a float
            tensor; the other two and ``grad`` are plain, contiguous, and shaped like it. ``scalars`` are 0-D float32
            tensors; ``noise`` and ``master_residual`` may be None.
    """

    def __init__(self, update: UpdateFunction) -> None:
        self._update = update
        compiler = functools.partial(torch.compile, fullgraph=True, dynamic=False, options=_OPTIONS)
        self._compiled_plain = compiler(update)
        self._compiled_quantized = compiler(_on_parts(update))
        self._uncompilable: set[tuple[str, str]] = set()  # device type, kind

    def __call__(
        self,
        param: Tensor,
        grad: Tensor,
        exp_avg: Tensor,
        *scalars: Tensor,
        noise: codec.Noise | None = None,
        master_residual: Tensor | None = None,
    ) -> None:
        """One step of one parameter, of any shape."""
        param, grad, exp_avg = _as_rows(param, grad, exp_avg)
        residual = None if master_residual is None else master_residual.view(param.shape)
        kind = _kind(exp_avg)
        if not self._is_worth_compiling(kind, param):
            self._update(param, grad, exp_avg, *scalars, noise=noise, master_residual=residual)
            return
        try:
            self._run_within_limit(kind, param, grad, exp_avg, *scalars, noise=noise, residual=residual)
        except TorchDynamoException as error:  # raised before the graph ran: nothing has been written yet
            self._warn(param.device.type, error)
            self._uncompilable.add((param.device.type, kind))
            self._update(param, grad, exp_avg, *scalars, noise=noise, master_residual=residual)

    def _is_worth_compiling(self, kind: str, param: Tensor) -> bool:
        # Dynamo would leave the function alone, now and later, but compile what that calls; since 2.13 it also raises
        if torch._dynamo.config.disable or is_in_torch_dispatch_mode():
            return False
        too_small = param.shape[0] < 2 and kind != "ragged"
        return not too_small and (param.device.type, kind) not in self._uncompilable

    def _run_within_limit(self, *args: Any, **kwargs: Any) -> None:
        try:
            self._run_compiled(*args, **kwargs)
        except FailOnRecompileLimitHit:  # raising the limit takes longer than a step: not before it is needed
            with torch._dynamo.config.patch(recompile_limit=_MAX_GRAPHS):
                self._run_compiled(*args, **kwargs)

    def _run_compiled(
        self,
        kind: str,
        param: Tensor,
        grad: Tensor,
        exp_avg: Tensor,
        *scalars: Tensor,
        noise: codec.Noise | None,
        residual: Tensor | None,
    ) -> None:
        if not isinstance(exp_avg, BlockwiseTensor):
            _mark(maybe_mark_dynamic, 0, param, grad, exp_avg, residual)
            self._compiled_plain(param, grad, exp_avg, *scalars, noise=noise, master_residual=residual)
            return
        tensors = param, grad, exp_avg.codes, exp_avg.scale
        if kind == "aligned":
            _mark(maybe_mark_dynamic, 0, *tensors, residual)
        else:
            _mark(mark_unbacked, 0, *tensors, residual)
            _mark(mark_unbacked, 1, *tensors, residual)
        part_of = type(exp_avg), exp_avg.block_size, kind
        self._compiled_quantized(*part_of, *tensors, *scalars, noise=noise, master_residual=residual)

    def _warn(self, device_type: str, error: Exception) -> None:
        """Once a device type, however many kinds of graph cannot be had."""
        if all(kind[0] != device_type for kind in self._uncompilable):
            reason = next(iter(str(error).splitlines()), "")
            warnings.warn(
                f"cannot compile the optimizer step for {device_type} ({type(error).__name__}: {reason}); "
                "it runs uncompiled: slower, with the same results",
                stacklevel=6,
            )


def _on_parts(update: UpdateFunction) -> Callable[..., None]:
    """``update`` with the momentum given as parts: Dynamo cannot leave the sizes of a subclass unbacked."""

    def update_on_parts(
        state_class: type[BlockwiseTensor],
        block_size: int,
        kind: str,
        param: Tensor,
        grad: Tensor,
        codes: Tensor,
        scale: Tensor,
        *scalars: Tensor,
        noise: codec.Noise | None,
        master_residual: Tensor | None,
    ) -> None:
        if kind == "ragged":  # a guard, too: the graph of ragged rows would serve aligned ones, slowly
            alike = (grad, codes) if master_residual is None else (grad, codes, master_residual)
            for tensor in (*alike, scale):  # Dynamo knows nothing of unbacked sizes but what it is told
                torch._check(tensor.shape[0] == param.shape[0])
            for tensor in alike:
                torch._check(tensor.shape[1] == param.shape[1])
            torch._check(scale.shape[1] == codec.blocks_per_row(param.shape[1], block_size))
        exp_avg = state_class(codes, scale, block_size)
        update(param, grad, exp_avg, *scalars, noise=noise, master_residual=master_residual)

    return update_on_parts


def _as_rows(param: Tensor, grad: Tensor, exp_avg: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Views with the sizes that the graphs are made for."""
    if not isinstance(exp_avg, BlockwiseTensor):
        return param.view(-1), grad.view(-1), exp_avg.view(-1)
    _, row_length = codec.row_layout(param.shape, exp_avg.block_size)
    length = exp_avg.block_size if row_length % exp_avg.block_size == 0 else row_length
    return param.view(-1, length), grad.view(-1, length), exp_avg.as_rows(length)


def _kind(exp_avg: Tensor) -> str:
    """Of graph, by a view from :func:`_as_rows`."""
    if not isinstance(exp_avg, BlockwiseTensor):
        return "unquantized"
    return "aligned" if exp_avg.shape[1] == exp_avg.block_size else "ragged"


def _mark(mark: Callable[[Tensor, int], None], dim: int, *tensors: Tensor | None) -> None:
    for tensor in tensors:
        if tensor is not None:
            mark(tensor, dim)
