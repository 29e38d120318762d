"""State dicts: what is saved, and how it is read back, whether this package or another wrote it.

A saved state is plain tensors, and DTensors where parameters are. A quantised momentum is ``"exp_avg": {"codes",
"scale"}`` and never a bare tensor: torch would cast one to the parameter's dtype, and a plain Lion would train on the
codes. A master residual is ``{"int8"}`` or ``{"int16"}``: torch's checkpoint tools copy one tensor into another without
a look at their dtypes, and even broadcast it. What is int16 is saved as bytes, since these tools send it between ranks,
and no backend sends int16.

Loading turns the whole checkpoint into new state of the live optimizer's layout before any of it is installed, so
that a broken checkpoint changes nothing.
"""

import math
import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lowbit_optim import sharding, shards
from lowbit_optim.formats import (
    CORRECTIONS,
    FLASHOPTIM_OPTION,
    FLOAT_DTYPES,
    RESIDUAL,
    State,
    listed,
    read_momentum,
    read_residual,
    unwrapped,
)
from lowbit_optim.options import check_options
from lowbit_optim.subclasses import OptimState8bit
from lowbit_optim.subclasses.blockwise import BlockwiseTensor

FORMAT_VERSION = 1

Allocate = Callable[[Tensor, dict[str, Any]], State]

# How state is stored is up to the optimizer that loads it, not to the checkpoint.
_STORAGE_OPTIONS = {
    "quantize",
    "block_size",
    "min_quantized_numel",
    "master_weight_bits",
    "stochastic_rounding",
    "offload_state",
}
# What these mean in the groups of other optimizers they would not mean in ours.
_DROPPED_OPTIONS = {"eps", "alpha", "t_alpha", "t_beta3", "fused", "foreach", "capturable", "differentiable"}


# --- Out ------------------------------------------------------------------------------------------------------------


def pack(state: Mapping[str, Any]) -> State:
    """One parameter's live state as plain tensors that share its memory, as ``torch.optim`` does.

    An :class:`OptimState8bit` becomes ``{"codes": int8, shaped like the parameter, "scale": uint8}``, the two bytes of
    each scale along a last dimension. A master residual becomes ``{"int8": int8, shaped like the parameter}``, or
    ``{"int16": uint8}``, the bytes likewise.
    """
    return {key: _pack_value(key, value) for key, value in state.items()}


def pack_option(value: Any) -> Any:
    """A group's option without NumPy's scalars, which schedulers may make and ``weights_only`` loading refuses."""
    if isinstance(value, (list, tuple)):
        return type(value)(pack_option(v) for v in value)
    is_numpy_scalar = isinstance(value, numbers.Number) and hasattr(value, "item")
    return value.item() if is_numpy_scalar else value


def _pack_value(key: str, value: Any) -> Any:
    if key == RESIDUAL:
        value = value.detach()
        return {"int8": value} if value.dtype == torch.int8 else {"int16": shards.as_bytes(value)}
    if isinstance(value, OptimState8bit):
        return {"codes": value.codes.detach(), "scale": shards.as_bytes(value.scale.detach())}
    if isinstance(value, BlockwiseTensor):  # a format that only those know who made it (docs/extending.md)
        return value.dequantize()
    return value.detach() if isinstance(value, Tensor) else value


@torch.no_grad()
def float_state_dict(source: Optimizer | Mapping[str, Any], dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """A state dict that a plain Lion loads: ``exp_avg`` is a tensor of ``dtype`` shaped like the parameter.

    Args:
        source: a ``Lion`` or ``Lion8bit``, or any state dict that they load.
        dtype: float32, bfloat16, float16 or float64.
    """
    if dtype not in FLOAT_DTYPES:
        raise ValueError(f"dtype is {dtype}; the momentum can be written as {listed(FLOAT_DTYPES)}")
    saved = _parse(source.state_dict() if isinstance(source, Optimizer) else source)
    states, groups = {}, []
    for group in saved:
        for key, name, state in zip(group.keys, group.names, group.states, strict=True):
            if state is not None:
                states[key] = {"exp_avg": _as_float(read_momentum(state, group.options, name), dtype)}
        options = {k: v for k, v in group.options.items() if k not in _STORAGE_OPTIONS | {"fused", "format_version"}}
        groups.append({**options, "params": group.keys})
    return {"state": states, "param_groups": groups}


def _as_float(momentum: Tensor, dtype: torch.dtype) -> Tensor:
    if isinstance(momentum, OptimState8bit):
        return momentum.dequantize(dtype)
    return momentum.to(dtype, copy=True)


# --- In -------------------------------------------------------------------------------------------------------------


def load(
    optimizer: Optimizer,
    state_dict: Mapping[str, Any],
    base_load: Callable[[Any], None],
    allocate: Allocate,
) -> list[str]:
    """Load ``state_dict`` into ``optimizer`` through ``base_load``, its base class's ``load_state_dict``.

    The base class would cast state to each parameter's dtype, so it is given none: one hook reads the state, after
    the user's own hooks have seen it, and another installs it, before theirs look. Both live for this call alone,
    since an optimizer that is copied or pickled loses its hooks.

    Args:
        optimizer: its ``param_groups`` say what is loaded where.
        state_dict: see :func:`read_state_dict`.
        base_load: called once with ``state_dict``.
        allocate: ``(parameter, group) -> state``: zero state of the live layout, on the parameter's device.

    Returns:
        What to warn of. The caller does, who alone knows how far away the user's line is.

    Raises:
        ValueError, TypeError: the checkpoint does not fit. The optimizer is as it was.
    """
    states: list[State | None] = []
    messages: list[str] = []

    def read(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        live = optimizer.param_groups
        states[:], options, messages[:] = read_state_dict(state_dict, live, allocate)
        groups = [{**group, **new} for group, new in zip(live, options, strict=True)]
        return {**state_dict, "state": {}, "param_groups": _number_parameters(groups)}

    def install(optimizer: Optimizer) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for p, state in zip(parameters, states, strict=True):
            if state is not None:
                optimizer.state[p] = state

    if not isinstance(state_dict, Mapping):  # what is in it may be for the user's hooks to change
        raise _not_a_state_dict(type(state_dict).__name__)
    hooks = [
        optimizer.register_load_state_dict_pre_hook(read),
        optimizer.register_load_state_dict_post_hook(install, prepend=True),
    ]
    try:
        base_load(state_dict)
    finally:
        for hook in hooks:
            hook.remove()
    return messages


def _number_parameters(groups: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The groups with each parameter replaced by its number, as in a state dict."""
    numbered, start = [], 0
    for group in groups:
        end = start + len(group["params"])
        numbered.append({**group, "params": list(range(start, end))})
        start = end
    return numbered


@torch.no_grad()
def read_state_dict(
    state_dict: Mapping[str, Any], groups: Sequence[dict[str, Any]], allocate: Allocate
) -> tuple[list[State | None], list[dict[str, Any]], list[str]]:
    """Check a whole checkpoint and convert it to the live layout. Changes nothing that exists.

    Momentum that is quantised alike on both sides keeps its bits. Any other is decoded and stored anew.

    Args:
        state_dict: from this package, a plain Lion (``exp_avg`` in any float dtype), bitsandbytes' Lion or Lion8bit,
            or FlashLion, compressed or not.
        groups: the live optimizer's ``param_groups``.
        allocate: ``(parameter, group) -> state``: zero state of the live layout, on the parameter's device.

    Returns:
        New state for each parameter in order, None where the checkpoint has none; for each group the options that it
        takes over; and what to warn of, a message each.

    Raises:
        ValueError, TypeError: saying which parameter, what came, what is allowed and what to do.
    """
    saved = _parse(state_dict)
    _check_counts(saved, groups)
    _check_order(saved, groups)
    options = [_read_options(group, f"parameter group {i}") for i, group in enumerate(saved)]
    for i, (loaded, live) in enumerate(zip(options, groups, strict=True)):
        try:
            check_options({**live, **loaded, "lr": 0.0})  # a schedule may have left a negative lr, here or there
        except (TypeError, ValueError) as error:
            raise type(error)(f"parameter group {i} of the checkpoint: {error}") from error
    states: list[State | None] = []
    absent = []
    for index, (saved_group, group) in enumerate(zip(saved, groups, strict=True)):
        names = saved_group.names if "param_names" not in group else _names(group, index, len(states))
        for p, state, name in zip(group["params"], saved_group.states, names, strict=True):
            states.append(None if state is None else _read_state(state, saved_group.options, name, p, group, allocate))
            if state is None and p.requires_grad:
                absent.append(name)
    _check_not_lost(absent, states, options)
    messages = [*_absent_states(absent, states), *_unread_corrections(saved), *_dropped_residuals(saved, states)]
    return states, options, messages


def _read_state(
    saved: State, saved_options: State, name: str, p: Tensor, group: dict[str, Any], allocate: Allocate
) -> State:
    momentum = read_momentum(saved, saved_options, name)
    if momentum.shape != p.shape:
        raise ValueError(
            f"{name}: the saved momentum has shape {tuple(momentum.shape)}, the parameter {tuple(p.shape)}. "
            "Load into an optimizer over the model that was saved, with its parameters in the same order."
        )
    residual = read_residual(saved[RESIDUAL], p, name) if RESIDUAL in saved else None
    state = allocate(p, group)
    sharding.store(state["exp_avg"], momentum)
    if residual is not None and RESIDUAL in state:
        sharding.store_residual(state[RESIDUAL], residual)
    return state


# --- The parts of a state dict --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _SavedGroup:
    """A parameter group and the state of its parameters, as they were saved. One entry a parameter in each list."""

    options: dict[str, Any]
    keys: list[Any]
    names: list[str]  # what errors call the parameters
    states: list[State | None]


def _parse(state_dict: Mapping[str, Any]) -> list[_SavedGroup]:
    """Match states with groups. Some converters turn the integer keys of the state into strings."""
    _check_layout(state_dict)
    states = {str(key): state for key, state in state_dict["state"].items()}
    groups: list[_SavedGroup] = []
    start = 0
    for i, group in enumerate(state_dict["param_groups"]):
        _check_group(group, i)
        keys, names = list(group["params"]), _names(group, i, start)
        options = {k: v for k, v in group.items() if k != "params"}
        in_order = [unwrapped(states.pop(str(key), None), name) for key, name in zip(keys, names, strict=True)]
        groups.append(_SavedGroup(options, keys, names, in_order))
        start += len(keys)
    if states:
        raise ValueError(
            f"the checkpoint holds state for {listed(states)}, which no parameter group lists "
            f"(they list {start} parameters). It is damaged: save it again."
        )
    return groups


def _names(group: Mapping[str, Any], group_index: int, start: int) -> list[str]:
    names, count = group.get("param_names"), len(group["params"])
    if names is not None and len(names) == count:
        return [f"parameter {name!r}" for name in names]
    return [f"parameter {start + i} (group {group_index})" for i in range(count)]


def _check_layout(state_dict: Mapping[str, Any]) -> None:
    is_right = isinstance(state_dict.get("state"), Mapping) and isinstance(
        state_dict.get("param_groups"), (list, tuple)
    )
    if not is_right:
        raise _not_a_state_dict(f"a dict with the keys {listed(state_dict) or 'none'}")


def _not_a_state_dict(came: str) -> TypeError:
    return TypeError(
        f"a state dict is a dict of 'state' (a dict) and 'param_groups' (a list), not {came}. "
        "Pass what optimizer.state_dict() returned."
    )


def _check_group(group: Any, index: int) -> None:
    if not isinstance(group, Mapping) or not isinstance(group.get("params"), (list, tuple)):
        raise TypeError(
            f"parameter group {index} has no 'params' that are a list. The checkpoint is damaged: save it again."
        )
    names = group.get("param_names", [])
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"parameter group {index}: param_names is {names!r}; it must be a list of strings.")
    version = group.get("format_version", FORMAT_VERSION)
    if version != FORMAT_VERSION:
        raise ValueError(
            f"parameter group {index}: format_version is {version!r}, this lowbit_optim reads {FORMAT_VERSION}. "
            "Load it with the version that wrote it, or upgrade."
        )


def _check_counts(saved: Sequence[_SavedGroup], live: Sequence[dict[str, Any]]) -> None:
    saved_sizes, live_sizes = [len(g.keys) for g in saved], [len(g["params"]) for g in live]
    if saved_sizes == live_sizes:
        return
    saved_names = [n for g in saved for n in g.options.get("param_names") or []]
    live_names = [n for g in live for n in g.get("param_names") or []]
    names = ""
    if saved_names and live_names:
        only_saved, only_live = set(saved_names) - set(live_names), set(live_names) - set(saved_names)
        names = f" Only in the checkpoint: {listed(sorted(only_saved)) or 'none'}."
        names += f" Only in the optimizer: {listed(sorted(only_live)) or 'none'}."
    elif saved_names or live_names:
        side = "checkpoint" if saved_names else "optimizer"
        names = f" The {side}'s parameters are {listed(saved_names or live_names)}."
    raise ValueError(
        f"the checkpoint has parameter groups of sizes {saved_sizes}, the optimizer of sizes {live_sizes}.{names} "
        "Build the optimizer over the same parameters in the same groups; freeze a parameter with "
        "requires_grad_(False), but leave it in."
    )


def _check_order(saved: Sequence[_SavedGroup], live: Sequence[dict[str, Any]]) -> None:
    """Parameters are matched by position, as in torch.optim. Names, where both sides have them, must not contradict."""
    for index, (saved_group, group) in enumerate(zip(saved, live, strict=True)):
        before, now = saved_group.options.get("param_names"), group.get("param_names")
        if before and now and list(before) != list(now) and sorted(before) == sorted(now):
            first = next((a, b) for a, b in zip(before, now, strict=True) if a != b)
            raise ValueError(
                f"parameter group {index} has the same names in another order: {first[0]!r} was saved where the "
                f"optimizer has {first[1]!r}. Build the optimizer with its parameters in the saved order."
            )


def _check_not_lost(absent: list[str], states: list[State | None], options: list[dict[str, Any]]) -> None:
    """A parameter that was frozen has no state. If none has any after a step, it was lost on the way."""
    if absent and not any(states) and any(group.get("step", 0) > 0 for group in options):
        raise ValueError(
            "the checkpoint says that steps were taken, but holds no state. torch's get_optimizer_state_dict and "
            "set_optimizer_state_dict drop it without a word if gradients exist: call zero_grad() before them."
        )


def _absent_states(absent: list[str], states: list[State | None]) -> Iterator[str]:
    if absent and any(states):
        yield f"the checkpoint has no state for {listed(absent)}: that momentum starts from zero"


def _unread_corrections(saved: Sequence[_SavedGroup]) -> Iterator[str]:
    keys = {key for group in saved for state in group.states if state for key in state}
    if keys & CORRECTIONS:
        yield f"weight corrections {listed(keys & CORRECTIONS)} were not read: weights go on as the model has them"


def _dropped_residuals(saved: Sequence[_SavedGroup], states: Sequence[State | None]) -> Iterator[str]:
    """The weights of the model are then all there is."""
    olds = [state for group in saved for state in group.states]
    if any(old and RESIDUAL in old and new and RESIDUAL not in new for old, new in zip(olds, states, strict=True)):
        yield (
            f"the checkpoint's {RESIDUAL} was not read, and its weights lose what 16 bits have no room for: this "
            "optimizer has no master_weight_bits, or its parameters are float32. To keep them, load into an optimizer "
            "and a model like those that were saved, and take optimizer.fp32_state_dict(model)."
        )


# --- Group options --------------------------------------------------------------------------------------------------


def _read_options(saved: _SavedGroup, where: str) -> dict[str, Any]:
    """The options to take over: all but how state is stored, so that what schedulers keep in a group comes along."""
    ignored = {"param_names"} | _STORAGE_OPTIONS | _DROPPED_OPTIONS | {FLASHOPTIM_OPTION, "format_version"}
    options = {key: value for key, value in saved.options.items() if key not in ignored}
    if "format_version" in saved.options:
        _check_complete(options, where)
    # bitsandbytes has one a parameter
    steps = [_read_step(state["step"], where) for state in saved.states if state and "step" in state]
    if steps:
        options.setdefault("step", max(steps))
    for key in {"weight_decay", "initial_lr"} & set(options):
        _check_number(options[key], key, where)
    if "lr" in options and not (_is_number(options["lr"]) and math.isfinite(options["lr"])):
        raise ValueError(f"{where}: lr is {options['lr']!r} in the checkpoint. It must be a finite number.")
    if "step" in options:
        options["step"] = _read_step(options["step"], where)
    if "betas" in options:
        _check_betas(options["betas"], where)
        options["betas"] = tuple(options["betas"])  # torch's full state dicts make it a list
    return options


def _check_complete(options: dict[str, Any], where: str) -> None:
    lacking = {"lr", "betas", "weight_decay", "step"} - set(options)
    if lacking:
        raise ValueError(f"{where}: the checkpoint lacks {listed(sorted(lacking))}. It is damaged: save it again.")


def _check_number(value: Any, key: str, where: str) -> None:
    if not (_is_number(value) and 0 <= float(value) < math.inf):
        raise ValueError(f"{where}: {key} is {value!r} in the checkpoint. It must be a finite number of at least 0.")


def _read_step(value: Any, where: str) -> int:
    """Other optimizers keep it as a float."""
    if not (_is_number(value) and 0 <= float(value) < 2**63 and float(value).is_integer()):
        raise ValueError(f"{where}: step is {value!r} in the checkpoint. It must be a whole number of at least 0.")
    return int(value)


def _check_betas(betas: Any, where: str) -> None:
    is_pair = isinstance(betas, (list, tuple)) and len(betas) == 2
    if not is_pair or not all(_is_number(b) and 0 <= float(b) < 1 for b in betas):
        raise ValueError(f"{where}: betas is {betas!r} in the checkpoint. It must be two numbers in [0, 1).")


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not (value.is_meta or value.is_complex())
    return isinstance(value, numbers.Real)
