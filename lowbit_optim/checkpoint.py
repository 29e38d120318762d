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

from lowbit_optim import codec, sharding, shards
from lowbit_optim.options import check_options
from lowbit_optim.subclasses import OptimState8bit
from lowbit_optim.subclasses.blockwise import BlockwiseTensor

FORMAT_VERSION = 1

State = dict[str, Any]
Allocate = Callable[[Tensor, dict[str, Any]], State]

_FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
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
_FOREIGN_OPTIONS = {"eps", "alpha", "t_alpha", "t_beta3", "fused", "foreach", "capturable", "differentiable"}
_BITSANDBYTES_KEY = "__bnb_optimizer_quant_state__"
_BITSANDBYTES_BLOCK_SIZES = (256, 2048)  # 2048 in older versions
_FLASHOPTIM_OPTION = "master_bytewidth"
_FLASHOPTIM_BLOCK_SIZE = 32
_RESIDUAL = "master_residual"
_CORRECTIONS = {"errors", "error_bits"}  # of the weight's rounding, in llm-foundry and FlashLion


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
    if key == _RESIDUAL:
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
    if dtype not in _FLOAT_DTYPES:
        raise ValueError(f"dtype is {dtype}; the momentum can be written as {_list(_FLOAT_DTYPES)}")
    saved = _parse(source.state_dict() if isinstance(source, Optimizer) else source)
    states, groups = {}, []
    for group in saved:
        for key, name, state in zip(group.keys, group.names, group.states, strict=True):
            if state is not None:
                states[key] = {"exp_avg": _as_float(_read_momentum(state, group.options, name), dtype)}
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
    momentum = _read_momentum(saved, saved_options, name)
    if momentum.shape != p.shape:
        raise ValueError(
            f"{name}: the saved momentum has shape {tuple(momentum.shape)}, the parameter {tuple(p.shape)}. "
            "Load into an optimizer over the model that was saved, with its parameters in the same order."
        )
    residual = _read_residual(saved[_RESIDUAL], p, name) if _RESIDUAL in saved else None
    state = allocate(p, group)
    sharding.store(state["exp_avg"], momentum)
    if residual is not None and _RESIDUAL in state:
        sharding.store_residual(state[_RESIDUAL], residual)
    return state


def _read_residual(saved: Any, p: Tensor, name: str) -> Tensor:
    where = f"{name}: {_RESIDUAL}"
    if not isinstance(saved, Mapping) or set(saved) not in ({"int8"}, {"int16"}):
        came = f"a dict of {_list(sorted(saved)) or 'nothing'}" if isinstance(saved, Mapping) else type(saved).__name__
        raise ValueError(
            f"{where} is {came}, not a dict of either int8 or int16. torch's broadcast_from_rank0 mixes them if the "
            "optimizer has another number of master_weight_bits: load without it. Else the checkpoint is damaged."
        )
    if "int8" in saved:
        return _checked(saved["int8"], (torch.int8,), where, tuple(p.shape))
    return shards.from_bytes(_checked(saved["int16"], (torch.uint8,), where, (*p.shape, 2)))


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
        in_order = [_unwrapped(states.pop(str(key), None), name) for key, name in zip(keys, names, strict=True)]
        groups.append(_SavedGroup(options, keys, names, in_order))
        start += len(keys)
    if states:
        raise ValueError(
            f"the checkpoint holds state for {_list(states)}, which no parameter group lists "
            f"(they list {start} parameters). It is damaged: save it again."
        )
    return groups


def _unwrapped(state: Any, name: str) -> State | None:
    """A parameter's state, with the tensors that bitsandbytes hides from FSDP in an inner dict beside the others."""
    if state is not None and not isinstance(state, Mapping):
        raise TypeError(f"{name}: its state is {type(state).__name__}, not a dict. The checkpoint is damaged.")
    if not state:
        return None
    return {**{k: v for k, v in state.items() if k != _BITSANDBYTES_KEY}, **state.get(_BITSANDBYTES_KEY, {})}


def _names(group: Mapping[str, Any], group_index: int, start: int) -> list[str]:
    names, count = group.get("param_names"), len(group["params"])
    if names is not None and len(names) == count:
        return [f"parameter {name!r}" for name in names]
    return [f"parameter {start + i} (group {group_index})" for i in range(count)]


def _list(items: Iterable[Any], limit: int = 8) -> str:
    items = [str(item) for item in items]
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(items[:limit]) + more


def _check_layout(state_dict: Mapping[str, Any]) -> None:
    is_right = isinstance(state_dict.get("state"), Mapping) and isinstance(
        state_dict.get("param_groups"), (list, tuple)
    )
    if not is_right:
        raise _not_a_state_dict(f"a dict with the keys {_list(state_dict) or 'none'}")


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
        names = f" Only in the checkpoint: {_list(sorted(only_saved)) or 'none'}."
        names += f" Only in the optimizer: {_list(sorted(only_live)) or 'none'}."
    elif saved_names or live_names:
        side = "checkpoint" if saved_names else "optimizer"
        names = f" The {side}'s parameters are {_list(saved_names or live_names)}."
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
        yield f"the checkpoint has no state for {_list(absent)}: that momentum starts from zero"


def _unread_corrections(saved: Sequence[_SavedGroup]) -> Iterator[str]:
    keys = {key for group in saved for state in group.states if state for key in state}
    if keys & _CORRECTIONS:
        yield f"weight corrections {_list(keys & _CORRECTIONS)} were not read: weights go on as the model has them"


def _dropped_residuals(saved: Sequence[_SavedGroup], states: Sequence[State | None]) -> Iterator[str]:
    """The weights of the model are then all there is."""
    olds = [state for group in saved for state in group.states]
    if any(old and _RESIDUAL in old and new and _RESIDUAL not in new for old, new in zip(olds, states, strict=True)):
        yield (
            f"the checkpoint's {_RESIDUAL} was not read, and its weights lose what 16 bits have no room for: this "
            "optimizer has no master_weight_bits, or its parameters are float32. To keep them, load into an optimizer "
            "and a model like those that were saved, and take optimizer.fp32_state_dict(model)."
        )


# --- Group options --------------------------------------------------------------------------------------------------


def _read_options(saved: _SavedGroup, where: str) -> dict[str, Any]:
    """The options to take over: all but how state is stored, so that what schedulers keep in a group comes along."""
    ignored = {"param_names"} | _STORAGE_OPTIONS | _FOREIGN_OPTIONS | {_FLASHOPTIM_OPTION, "format_version"}
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
        raise ValueError(f"{where}: the checkpoint lacks {_list(sorted(lacking))}. It is damaged: save it again.")


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


# --- Momentum, in every format that is read -------------------------------------------------------------------------
# A reader takes one parameter's saved state, its group's saved options and a name for errors. It returns the momentum
# as a finite float tensor or as an OptimState8bit.


def _read_momentum(saved: State, options: dict[str, Any], name: str) -> Tensor:
    for key, (others, read) in _READERS.items():
        if key in saved:
            _check_keys(saved, {key} | others, name)
            return read(saved, options, name)
    raise ValueError(
        f"{name}: the saved state has the keys {_list(sorted(saved, key=str))}, none of which is a Lion momentum "
        f"({_list(_READERS)}). Load the checkpoint of a Lion, or start without one."
    )


def _check_keys(saved: State, allowed: set[str], name: str) -> None:
    extra = set(saved) - allowed
    if extra:
        raise ValueError(
            f"{name}: the saved state has the keys {_list(sorted(extra, key=str))}, which no Lion has; allowed are "
            f"{_list(sorted(allowed, key=str))}. The momentum of Adam and others is not Lion's: start without it."
        )


def _read_exp_avg(saved: State, options: dict[str, Any], name: str) -> Tensor:
    momentum = saved["exp_avg"]
    if isinstance(momentum, Mapping):
        return _read_own(momentum, options, name)
    return _checked_floats(momentum, f"{name}: exp_avg")


def _read_own(momentum: Mapping[str, Any], options: dict[str, Any], name: str) -> OptimState8bit:
    if set(momentum) != {"codes", "scale"}:
        raise ValueError(
            f"{name}: exp_avg has the parts {_list(sorted(momentum, key=str)) or 'none'} instead of codes, scale. "
            "The checkpoint is damaged: save it again."
        )
    codes = _checked(momentum["codes"], (torch.int8,), f"{name}: codes")
    block_size = options.get("block_size")
    if not isinstance(block_size, int) or block_size < 1:
        raise ValueError(f"{name}: its group's block_size is {block_size!r} in the checkpoint; it must be at least 1.")
    shape = (*codec.scale_shape(codes.shape, block_size), 2)
    scale = shards.from_bytes(_checked(momentum["scale"], (torch.uint8,), f"{name}: scale", shape))
    if (shards.to_local(codes) == -128).any():
        raise ValueError(f"{name}: a saved code is -128; codes are -127 ... 127. Load an earlier checkpoint.")
    if not codec.unpack_scale(shards.to_local(scale)).isfinite().all():
        raise ValueError(f"{name}: a saved scale is not finite. Load an earlier checkpoint.")
    return OptimState8bit(codes, scale, block_size)


def _read_bitsandbytes(saved: State, options: dict[str, Any], name: str) -> Tensor:
    """``state1``: fp32, or uint8 indices into the table ``qmap1`` times ``absmax1``, along the flattened parameter."""
    state1 = _checked(saved["state1"], (torch.uint8, *_FLOAT_DTYPES), f"{name}: state1")
    if state1.dtype != torch.uint8:
        return _checked_floats(state1, f"{name}: state1")
    table = _checked(saved.get("qmap1"), (torch.float32,), f"{name}: qmap1", (256,))
    absmax = _checked(saved.get("absmax1"), (torch.float32,), f"{name}: absmax1")
    values = table.to(state1.device)[state1.flatten().int()]
    for block_size in _BITSANDBYTES_BLOCK_SIZES:
        if absmax.shape == (codec.blocks_per_row(values.numel(), block_size),):
            return _checked_floats(_scaled(values, absmax, block_size).view(state1.shape), f"{name}: state1 x absmax1")
    raise ValueError(
        f"{name}: absmax1 has shape {tuple(absmax.shape)} for {values.numel()} elements; one value each "
        f"{' or '.join(map(str, _BITSANDBYTES_BLOCK_SIZES))} is allowed. Save the checkpoint with block-wise state."
    )


def _read_flashoptim(saved: State, options: dict[str, Any], name: str) -> Tensor:
    """int8 ``q`` and fp16 scales a group of 32: ``y / (2 - |y|)`` with ``y = q / 127``, along the flattened parameter.

    llm-foundry's DecoupledLionW_8bit uses the same keys for codes of a closed-source kernel. Only the options of the
    group tell the two apart.
    """
    if _FLASHOPTIM_OPTION not in options:
        raise ValueError(
            f"{name}: exp_avg::quantized is the compressed format of llm-foundry's DecoupledLionW_8bit, which is not "
            "public. Load it there with compress_state_dict=False, save again, and load that."
        )
    q = _checked(saved["exp_avg::quantized"], (torch.int8,), f"{name}: exp_avg::quantized")
    shape = (codec.blocks_per_row(q.numel(), _FLASHOPTIM_BLOCK_SIZE),)
    scales = _checked(saved.get("exp_avg::scales"), (torch.float16, torch.bfloat16), f"{name}: exp_avg::scales", shape)
    if not q.is_contiguous():
        raise ValueError(
            f"{name}: exp_avg::quantized has strides {q.stride()}, and its scales follow memory order. "
            "Save it in FlashLion with compress_state_dict=False."
        )
    y = q.flatten().float() / 127
    # for bfloat16 parameters the fp16 bits are saved under the name of bfloat16
    scales = scales.view(torch.float16).float()
    values = _scaled(y / (2 - y.abs()), scales, _FLASHOPTIM_BLOCK_SIZE)
    return _checked_floats(values.view(q.shape), f"{name}: exp_avg::quantized x exp_avg::scales")


def _scaled(values: Tensor, scales: Tensor, block_size: int) -> Tensor:
    return values * scales.to(values.device).repeat_interleave(block_size)[: values.numel()]


def _checked(value: Any, dtypes: Sequence[torch.dtype], where: str, shape: tuple[int, ...] | None = None) -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(f"{where} is {type(value).__name__}, not a tensor. The checkpoint is damaged: save it again.")
    if value.dtype not in dtypes:
        raise TypeError(
            f"{where} is {value.dtype}; allowed: {_list(dtypes)}. Convert the checkpoint, or save it again."
        )
    if value.is_meta or value.layout != torch.strided:
        kind = "on the meta device, without values" if value.is_meta else f"sparse ({value.layout})"
        raise ValueError(f"{where} is {kind}; it must be a dense tensor with values. Save the checkpoint again.")
    if shape is not None and value.shape != shape:
        raise ValueError(
            f"{where} has shape {tuple(value.shape)}, not {shape}. The checkpoint is damaged: save it again."
        )
    return value


def _checked_floats(value: Any, where: str) -> Tensor:
    values = _checked(value, _FLOAT_DTYPES, where).float()
    if not shards.to_local(values).isfinite().all():
        raise ValueError(f"{where} has values that are not finite. Load an earlier checkpoint.")
    return values


_READERS: dict[str, tuple[set[str], Callable[[State, dict[str, Any], str], Tensor]]] = {
    "exp_avg": ({"step", _RESIDUAL} | _CORRECTIONS, _read_exp_avg),
    "exp_avg::quantized": ({"step", "exp_avg::scales"} | _CORRECTIONS, _read_flashoptim),
    "state1": ({"step", "qmap1", "absmax1"}, _read_bitsandbytes),
}
