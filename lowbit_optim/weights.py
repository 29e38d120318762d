"""A model's weights in fp32, out of it and into it, by way of the residuals of master weights; and which of them stall.

A residual is looked up by the parameter that it belongs to: int8 or int16, shaped and sharded like it, None where there
is none. Nothing here is a collective call, unless weights are loaded that are sharded otherwise than the model.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lowbit_optim import codec, sharding, shards

_CHUNK_NUMEL = 2**24  # that are counted at a time, since this takes some 40 bytes for each
_WHAT_TO_DO = "Load what optimizer.fp32_state_dict gave for a model like it."
_EXTREME_NOISES = (0, 0xFFFF)  # those between them round to one or the other result


@torch.no_grad()
def fp32_state_dict(model: nn.Module, residual_of: Callable[[Tensor], Tensor | None]) -> dict[str, Any]:
    """See :meth:`lowbit_optim.optimizer.LowBitOptimizer.fp32_state_dict`."""
    state_dict = model.state_dict(keep_vars=True)
    masters: dict[int, Tensor] = {}  # by parameter, as some are there under several names
    for key, value in state_dict.items():
        if isinstance(value, nn.Parameter):
            if id(value) not in masters:
                masters[id(value)] = _master(value, residual_of(value))
            state_dict[key] = masters[id(value)]
        elif isinstance(value, Tensor):
            state_dict[key] = value.detach()
    return state_dict


@torch.no_grad()
def load_fp32_state_dict(
    model: nn.Module, state_dict: Mapping[str, Any], residuals_of: Callable[[list[Tensor]], list[Tensor | None]]
) -> None:
    """See :meth:`lowbit_optim.optimizer.LowBitOptimizer.load_fp32_state_dict`."""
    live = model.state_dict(keep_vars=True)
    _check(live, state_dict)
    parameters = {key: live[key] for key in state_dict if isinstance(live[key], nn.Parameter)}
    residuals = residuals_of(list(parameters.values()))
    others = {key: value for key, value in state_dict.items() if key not in parameters}
    if others:
        model.load_state_dict(others, strict=False)
    for (key, p), residual in zip(parameters.items(), residuals, strict=True):
        _store(p, residual, state_dict[key])


def _master(p: Any, residual: Tensor | None) -> Tensor:
    """fp32, shaped and sharded like ``p``; what is wider than 16 bits is ``p`` itself."""
    if p.dtype not in codec.CUT_BITS:
        return p.detach()
    local = _plain_values(p)
    fine = None if residual is None else shards.to_local(residual).to(local.device)
    master = codec.read_weight(local, fine).contiguous()
    return shards.from_local(master, p, p.shape, p.placements) if shards.is_dtensor(p) else master


def _plain_values(p: Tensor) -> Tensor:
    """What this rank holds of ``p``, as a plain tensor."""
    local = shards.to_local(p).detach()
    if is_traceable_wrapper_subclass(local):
        return shards.plain_copy(local)
    return local


def _store(p: Tensor, residual: Tensor | None, value: Tensor) -> None:
    if p.dtype not in codec.CUT_BITS:
        shards.copy_(p, value)
        return
    master = sharding.zeros_like(p, torch.float32)
    shards.copy_(master, value)
    fine = None if residual is None else shards.to_local(residual)
    codec.write_weight(shards.to_local(p), fine, shards.to_local(master), None)


def _check(live: Mapping[str, Any], state_dict: Mapping[str, Any]) -> None:
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"a state dict is a dict of names and tensors, not {type(state_dict).__name__}")
    unexpected = [key for key in state_dict if key not in live]
    given = {id(live[key]) for key in state_dict if key in live}
    missing = [key for key, value in live.items() if key not in state_dict and id(value) not in given]
    for what, keys in {"the model has no": unexpected, "the state dict lacks": missing}.items():
        if keys:
            more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
            raise ValueError(f"{what} {keys[0]!r}{more}. {_WHAT_TO_DO}")
    for key, value in state_dict.items():
        if isinstance(live[key], Tensor):
            _check_fits(key, live[key], value)


def _check_fits(key: str, live: Tensor, value: Any) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{key!r} is {type(value).__name__} in the state dict, a tensor in the model. {_WHAT_TO_DO}")
    if value.shape != live.shape:
        shapes = f"{tuple(value.shape)} in the state dict, {tuple(live.shape)} in the model"
        raise ValueError(f"{key!r} has shape {shapes}. {_WHAT_TO_DO}")
    if value.layout != live.layout or value.is_meta > live.is_meta:
        where = "on the meta device, without data," if value.is_meta else value.layout
        raise TypeError(
            f"{key!r} is {where} in the state dict, {live.layout} on {live.device} in the model. {_WHAT_TO_DO}"
        )
    if live.is_floating_point() != value.is_floating_point():
        raise TypeError(f"{key!r} is {value.dtype} in the state dict, {live.dtype} in the model. {_WHAT_TO_DO}")


# --- Weights that do not move ---------------------------------------------------------------------------------------


def count_stalled(p: Tensor, residual: Tensor | None, lr: float, stochastic_rounding: bool) -> int:
    """Of the weights that this rank holds, how many are stored the same after an update of ``lr`` up or down."""
    weight = _plain_values(p).flatten()
    fine = None if residual is None else shards.to_local(residual).flatten().to(weight.device)
    stalled = 0
    for start in range(0, weight.numel(), _CHUNK_NUMEL):
        part = weight[start : start + _CHUNK_NUMEL]
        residual_part = None if fine is None else fine[start : start + _CHUNK_NUMEL]
        is_stalled = torch.ones_like(part, dtype=torch.bool)
        master = codec.read_weight(part, residual_part)
        for moved in (master - lr, master + lr):
            for noise in _EXTREME_NOISES if stochastic_rounding else (None,):
                is_stalled &= _is_stored_alike(part, residual_part, moved, noise)
        stalled += int(is_stalled.sum())
    return stalled


def _is_stored_alike(weight: Tensor, residual: Tensor | None, x: Tensor, noise: int | None) -> Tensor:
    new_weight, new_residual = weight.clone(), None if residual is None else residual.clone()
    noises = None if noise is None else torch.full_like(x, noise, dtype=torch.int32)
    codec.write_weight(new_weight, new_residual, x, noises)
    is_alike = new_weight == weight
    return is_alike if new_residual is None or residual is None else is_alike & (new_residual == residual)
