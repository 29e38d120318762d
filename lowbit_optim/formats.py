"""What a parameter's saved state holds, in every format that is read: ours, a plain Lion's, bitsandbytes', FlashLion's.

A reader takes one parameter's saved state, its group's saved options and a name for errors. It returns the momentum as
a finite float tensor or as an :class:`OptimState8bit`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lowbit_optim import codec, shards
from lowbit_optim.subclasses import OptimState8bit

State = dict[str, Any]

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_BITSANDBYTES_KEY = "__bnb_optimizer_quant_state__"
_BITSANDBYTES_BLOCK_SIZES = (256, 2048)  # 2048 in older versions
FLASHOPTIM_OPTION = "master_bytewidth"
_FLASHOPTIM_BLOCK_SIZE = 32
RESIDUAL = "master_residual"
CORRECTIONS = {"errors", "error_bits"}  # of the weight's rounding, in llm-foundry and FlashLion


def unwrapped(state: Any, name: str) -> State | None:
    """A parameter's state, with the tensors that bitsandbytes hides from FSDP in an inner dict beside the others."""
    if state is not None and not isinstance(state, Mapping):
        raise TypeError(f"{name}: its state is {type(state).__name__}, not a dict. The checkpoint is damaged.")
    if not state:
        return None
    return {**{k: v for k, v in state.items() if k != _BITSANDBYTES_KEY}, **state.get(_BITSANDBYTES_KEY, {})}


def read_momentum(saved: State, options: dict[str, Any], name: str) -> Tensor:
    for key, (others, read) in _READERS.items():
        if key in saved:
            _check_keys(saved, {key} | others, name)
            return read(saved, options, name)
    raise ValueError(
        f"{name}: the saved state has the keys {listed(sorted(saved, key=str))}, none of which is a Lion momentum "
        f"({listed(_READERS)}). Load the checkpoint of a Lion, or start without one."
    )


def _check_keys(saved: State, allowed: set[str], name: str) -> None:
    extra = set(saved) - allowed
    if extra:
        raise ValueError(
            f"{name}: the saved state has the keys {listed(sorted(extra, key=str))}, which no Lion has; allowed are "
            f"{listed(sorted(allowed, key=str))}. The momentum of Adam and others is not Lion's: start without it."
        )


def read_residual(saved: Any, p: Tensor, name: str) -> Tensor:
    where = f"{name}: {RESIDUAL}"
    if not isinstance(saved, Mapping) or set(saved) not in ({"int8"}, {"int16"}):
        came = f"a dict of {listed(sorted(saved)) or 'nothing'}" if isinstance(saved, Mapping) else type(saved).__name__
        raise ValueError(
            f"{where} is {came}, not a dict of either int8 or int16. torch's broadcast_from_rank0 mixes them if the "
            "optimizer has another number of master_weight_bits: load without it. Else the checkpoint is damaged."
        )
    if "int8" in saved:
        return _checked(saved["int8"], (torch.int8,), where, tuple(p.shape))
    return shards.from_bytes(_checked(saved["int16"], (torch.uint8,), where, (*p.shape, 2)))


def listed(items: Iterable[Any], limit: int = 8) -> str:
    items = [str(item) for item in items]
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(items[:limit]) + more


# --- One format each --------------------------------------------------------------------------------------------------


def _read_exp_avg(saved: State, options: dict[str, Any], name: str) -> Tensor:
    momentum = saved["exp_avg"]
    if isinstance(momentum, Mapping):
        return _read_own(momentum, options, name)
    return _checked_floats(momentum, f"{name}: exp_avg")


def _read_own(momentum: Mapping[str, Any], options: dict[str, Any], name: str) -> OptimState8bit:
    if set(momentum) != {"codes", "scale"}:
        raise ValueError(
            f"{name}: exp_avg has the parts {listed(sorted(momentum, key=str)) or 'none'} instead of codes, scale. "
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
    state1 = _checked(saved["state1"], (torch.uint8, *FLOAT_DTYPES), f"{name}: state1")
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
    if FLASHOPTIM_OPTION not in options:
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
            f"{where} is {value.dtype}; allowed: {listed(dtypes)}. Convert the checkpoint, or save it again."
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
    values = _checked(value, FLOAT_DTYPES, where).float()
    if not shards.to_local(values).isfinite().all():
        raise ValueError(f"{where} has values that are not finite. Load an earlier checkpoint.")
    return values


_READERS: dict[str, tuple[set[str], Callable[[State, dict[str, Any], str], Tensor]]] = {
    "exp_avg": ({"step", RESIDUAL} | CORRECTIONS, _read_exp_avg),
    "exp_avg::quantized": ({"step", "exp_avg::scales"} | CORRECTIONS, _read_flashoptim),
    "state1": ({"step", "qmap1", "absmax1"}, _read_bitsandbytes),
}
