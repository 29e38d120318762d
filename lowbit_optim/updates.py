"""What a step works on: parameters, their gradients and state, in lists, and what the fused kernel takes of them."""

import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lowbit_optim import codec, sharding, shards
from lowbit_optim.subclasses.blockwise import BlockwiseTensor, parts

_PARAM_DTYPES = {torch.float32, torch.bfloat16, torch.float16}


class Updates(NamedTuple):
    """What is to be stepped: lists of equal length.

    ``residuals`` are those of master weights, None where there is none. ``indices`` count over all groups; ``firsts``
    are the indices of first elements, where the others are shards.
    """

    params: list[Tensor]
    grads: list[Tensor]
    exp_avgs: list[Tensor]
    residuals: list[Tensor | None]
    indices: list[int]
    firsts: list[int]

    @classmethod
    def of(
        cls, group: Mapping[str, Any], params: list[Any], grads: list[Any], states: Sequence[Any], indices: list[int]
    ) -> "Updates":
        """Of parameters of ``group``; ``states`` are the optimizer's, None of a parameter that is not to be stepped."""
        exp_avgs: list[Any] = [state["exp_avg"] if state else None for state in states]
        residuals: list[Any] = [None] * len(params)
        if group["master_weight_bits"]:
            residuals = [state.get("master_residual") if state else None for state in states]
        return cls(params, grads, exp_avgs, residuals, indices, [0] * len(params))

    @property
    def state(self) -> dict[str, list[Any]]:
        """What lives where a parameter's state does."""
        return {"exp_avgs": self.exp_avgs, "residuals": self.residuals}

    def select(self, chosen: list[bool]) -> "Updates":
        columns: list[list[Any]] = [list(itertools.compress(column, chosen)) for column in self]
        return Updates(*columns)

    def check(self, master_weight_bits: int | None) -> None:
        """Raises whatever is wrong with a parameter, its gradient or its state."""
        for p, grad, exp_avg, residual, index, _ in zip(*self, strict=True):
            sharding.check(p, grad, f"parameter {index}")
            check_dtype(p)
            if grad.layout != torch.strided:
                raise RuntimeError(
                    f"{_name(p, index)} has a sparse gradient ({grad.layout}); this "
                    "optimizer needs dense ones: build the embedding with sparse=False"
                )
            _check_state(p, grad, exp_avg, residual, index, master_weight_bits)

    def in_one_run(self, is_fused: Callable[[Tensor], bool]) -> "Updates":
        """With what this rank holds in place of each DTensor that the fused step can take so."""
        rows: list[tuple[Any, ...]] = []
        for p, grad, exp_avg, residual, index, first in zip(*self, strict=True):
            run = sharding.one_run(p, grad, exp_avg, residual) if shards.is_dtensor(p) else None
            if run is not None and is_fused(run[0]):
                rows.append((*run[:4], index, run[4]))
            else:
                rows.append((p, grad, exp_avg, residual, index, first))
        return Updates(*(list(column) for column in zip(*rows, strict=True))) if rows else self

    def as_plain(self) -> tuple["Updates", list[tuple[Tensor, Tensor]]]:
        """With copies where need be, and which parameters are to be copied back from where."""
        params, grads, copied = [], [], []
        for p, grad in zip(self.params, self.grads, strict=True):
            values = p
            if is_traceable_wrapper_subclass(p) or not p.is_contiguous():
                values = shards.plain_copy(p)
                copied.append((p, values))
            params.append(values)
            if is_traceable_wrapper_subclass(grad):
                grad = shards.plain_copy(grad)
            grads.append(grad.resolve_neg().contiguous())
        return self._replace(params=params, grads=grads), copied


NO_UPDATES = Updates([], [], [], [], [], [])


class FusedOptions(NamedTuple):
    """What the fused step needs to know of a group beside its hyper-parameters."""

    block_size: int  # unquantised momentum is stepped in blocks, too
    seed: int
    stochastic_rounding: bool
    master_weight_bits: int | None

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> "FusedOptions":
        return cls(*(group[name] for name in cls._fields))


class FusedStep(Protocol):
    """Steps tensors together: :class:`lowbit_optim.fused.FusedLion`, seen from where there may be no Triton."""

    def takes(self, updates: Updates, options: FusedOptions) -> bool: ...

    def plan(self, updates: Updates, options: FusedOptions) -> None: ...

    def run(
        self,
        scalars: Sequence[float | Tensor],
        step: int | Tensor,
        inverse_grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
    ) -> None: ...


class LocalUpdates:
    """What this rank holds of updates, kept for the steps to come.

    A look at the shards of a parameter, its gradient and its state takes the host ten times what all else in a fused
    step takes for it.

    Args:
        whole: with DTensors.
        local: from :meth:`Updates.in_one_run`, with plain tensors in place of every one.
    """

    def __init__(self, whole: Updates, local: Updates) -> None:
        self._ids = _ids(whole)
        self._kept = kept = [local._replace(params=[], grads=[])]  # those may be freed
        self._addresses = _addresses(whole)
        self._cuts = list(map(_cut, whole.grads))
        shapes = zip(_held(whole.params), local.params, strict=True)
        self._rows = [(i, p.shape) for i, (held, p) in enumerate(shapes) if held.shape != p.shape]
        # no reference to self: a cycle would keep what was freed until the garbage collector comes
        self._watches = watch(itertools.chain(*whole.state.values()), lambda _: kept.clear())

    def of(self, updates: Updates) -> Updates | None:
        """What this rank holds of ``updates``; None if more than the memory of gradients may have changed."""
        if not self._kept or self._ids != _ids(updates) or self._addresses != _addresses(updates):
            return None
        if self._cuts != list(map(_cut, updates.grads)):
            return None
        params, grads = _held(updates.params), _held(updates.grads)
        for i, shape in self._rows:
            if not grads[i].is_contiguous() or grads[i].numel() != shape.numel():
                return None
            params[i], grads[i] = params[i].view(shape), grads[i].view(shape)
        return self._kept[0]._replace(params=params, grads=grads, indices=updates.indices)


def _ids(updates: Updates) -> list[list[int]]:
    return [list(map(id, column)) for column in (updates.params, *updates.state.values())]


def watch(state: Iterable[Any], freed: Callable[[Any], None]) -> list[Any]:
    """Call ``freed`` when one of these, or a part of one, is freed, for as long as what is returned is kept."""
    return [weakref.ref(x, freed) for each in state if each is not None for x in (each, *parts(each))]


def _held(tensors: Sequence[Any]) -> list[Tensor]:
    """What this rank holds: the tensors themselves, where ``to_local`` would make new ones of parameters."""
    return [x._local_tensor if shards.is_dtensor(x) else x for x in tensors]


def _addresses(updates: Updates) -> list[int]:
    """Of all but quantised state."""
    tensors = [*updates.params, *updates.exp_avgs, *filter(lambda x: x is not None, updates.residuals)]
    return [x.data_ptr() for x in _held(tensors) if not isinstance(x, BlockwiseTensor)]


def _cut(x: Any) -> tuple[Any, ...] | None:
    return (x.device_mesh, x.placements) if shards.is_dtensor(x) else None


def _check_state(
    p: Tensor, grad: Tensor, exp_avg: Tensor, residual: Tensor | None, index: int, master_weight_bits: int | None
) -> None:
    """That gradient and state are of the parameter and the options as they are now."""
    if not isinstance(exp_avg, Tensor):
        raise TypeError(
            f"{_name(p, index)} has its momentum as it is saved, a {type(exp_avg).__name__}, where a tensor belongs: "
            "something wrote it into the state, as torch's ZeroRedundancyOptimizer does. Call this optimizer's own "
            "load_state_dict."
        )
    if not p.shape == grad.shape == exp_avg.shape:
        raise RuntimeError(
            f"{_name(p, index)} has a gradient of shape {tuple(grad.shape)} and state of shape {tuple(exp_avg.shape)}, "
            "from before it was changed. When p.data is replaced by another shape, set p.grad = None and del "
            "optimizer.state[p]."
        )
    if residual is not None and p.dtype == torch.float32:
        raise RuntimeError(
            f"{_name(p, index)} was changed to float32, and its state has a residual for 16 bits. Take "
            "optimizer.fp32_state_dict(model) before the change, and load it into the model of a new optimizer."
        )
    if residual is None and master_weight_bits and p.dtype in codec.CUT_BITS:
        raise RuntimeError(
            f"{_name(p, index)} is {p.dtype}, with master_weight_bits={master_weight_bits}. It or that was changed "
            "since its state was made, which has no residual: optimizer.load_state_dict(optimizer.state_dict()) gives "
            "it one."
        )


def _name(p: Tensor, index: int) -> str:
    return f"parameter {index} of shape {tuple(p.shape)}"


def check_dtype(p: Tensor) -> None:
    if p.dtype not in _PARAM_DTYPES:
        raise TypeError(
            f"a parameter of shape {tuple(p.shape)} is {p.dtype}; parameters must be float32, bfloat16 or float16. "
            "Convert the model with model.to(torch.float32), or leave the parameter out."
        )
