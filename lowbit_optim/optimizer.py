"""The optimizer around an update function: groups and their options, state, and the step over all parameters."""

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lowbit_optim import checkpoint, codec
from lowbit_optim.compiled import CompiledUpdate, UpdateFunction
from lowbit_optim.subclasses import OptimState8bit

ParamsT: TypeAlias = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]

_MIN_BLOCK_SIZE = 16  # also of a row: with fewer elements a scale costs more than the codes save
_PARAM_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_WHOLE_OPTIMIZER_OPTIONS = {"seed", "fused", "offload_state"}
# Options of other optimizers, which torch.optim would keep in a group and ignore. Other unknown keys are metadata.
_FOREIGN_OPTIONS = {
    "amsgrad",
    "block_wise",
    "capturable",
    "differentiable",
    "eps",
    "foreach",
    "is_paged",
    "max_unorm",
    "min_8bit_size",
    "momentum",
    "nesterov",
    "optim_bits",
    "percentile_clipping",
}


class LowBitOptimizer(Optimizer):
    """Keeps one momentum a parameter, in 8 bits where that pays, and steps with :attr:`update`.

    Args:
        params: parameters, named parameters or group dicts, as in torch.optim.
        defaults: every option of :class:`lowbit_optim.Lion8bit`, by name.
    """

    update: ClassVar[UpdateFunction]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with options of their own. Raises as the constructor does."""
        _check_group_keys(param_group)
        options = {**self.defaults, **param_group}
        _check_options(options)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for p in group["params"]:
            _check_param(p)
        group.setdefault("step", 0)
        if group["decouple_lr"]:
            group.setdefault("initial_lr", _copy(group["lr"]))
        _step_as_tensor(group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            _step_as_tensor(group)

    # --- State ------------------------------------------------------------------------------------------------------

    def _is_quantized(self, p: Tensor, group: Mapping[str, Any]) -> bool:
        """By the parameter's own shape and its group's options alone, so that every mesh decides alike."""
        _, row_length = codec.row_layout(p.shape, group["block_size"])
        return (
            group["quantize"]
            and p.ndim >= 2
            and p.numel() >= group["min_quantized_numel"]
            and row_length >= _MIN_BLOCK_SIZE
        )

    def _new_state(self, p: Tensor, group: Mapping[str, Any]) -> dict[str, Tensor]:
        """Zero state; contiguous and of plain tensors, whatever the parameter is."""
        _check_not_sharded(p)
        if self._is_quantized(p, group):
            return {"exp_avg": OptimState8bit.zeros(p.shape, group["block_size"], device=p.device)}
        return {"exp_avg": torch.zeros(p.shape, dtype=torch.float32, device=p.device)}

    @torch.compiler.disable
    def _init_missing_state(self) -> None:
        """For every parameter that could get a gradient, so that ranks and later loads agree on what there is."""
        for group in self.param_groups:
            for p in group["params"]:
                if p not in self.state and _is_trained(p):
                    self.state[p] = self._new_state(p, group)

    def state_dict(self) -> dict[str, Any]:
        """As in torch.optim, with plain tensors alone: an 8-bit momentum is ``{"codes": int8, "scale": int16}``."""
        handle = self.register_state_dict_post_hook(_pack_state_dict, prepend=True)
        try:
            return super().state_dict()
        finally:
            handle.remove()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load from this package or another; the formats are in :func:`lowbit_optim.checkpoint.read_state_dict`.

        What is quantised, and how, stays as it is in this optimizer. A checkpoint that does not fit raises and changes
        nothing.
        """
        checkpoint.load(self, state_dict, super().load_state_dict, self._new_state)

    # --- Step -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient.

        Args:
            closure: re-evaluates the model and returns the loss, which ``step`` then returns.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if any(p not in self.state for group in self.param_groups for p in group["params"] if _is_trained(p)):
            self._init_missing_state()
        is_compiling = torch.compiler.is_compiling()
        update = type(self).update if is_compiling else _compiled_update(type(self).update)
        first_index = 0
        for group in self.param_groups:
            self._step_group(group, first_index, update)
            first_index += len(group["params"])
        return loss

    def _step_group(self, group: dict[str, Any], first_index: int, update: UpdateFunction) -> None:
        _advance_step(group)
        scalars: dict[torch.device, tuple[Tensor, ...]] = {}
        for index, p in enumerate(group["params"], first_index):
            if p.grad is None:
                continue
            if p.device not in scalars:
                scalars[p.device] = _scalars(group, p.device)
            noise = self._noise(p, index, group)
            _update_param(update, p, _checked_grad(p, index), self.state[p]["exp_avg"], *scalars[p.device], *noise)

    def _noise(self, p: Tensor, index: int, group: dict[str, Any]) -> tuple[Tensor | None, Tensor | None]:
        if not group["stochastic_rounding"] or p.dtype == torch.float32:
            return None, None
        return _noise_key(group["seed"], index), group["step"]


def _is_trained(p: Tensor) -> bool:
    return p.requires_grad or p.grad is not None


def _update_param(update: UpdateFunction, p: Tensor, grad: Tensor, exp_avg: Tensor, *scalars: Tensor | None) -> None:
    """Where the parameter's memory is not simply its elements in order, on a copy of them."""
    if is_traceable_wrapper_subclass(p) or not p.is_contiguous():
        values = torch.empty(p.shape, dtype=p.dtype, device=p.device).copy_(p)
        update(values, grad.contiguous(), exp_avg, *scalars)
        p.copy_(values)
    else:  # detached, since Dynamo looks at p.grad too and trips over a dtype other than p's
        update(p.detach(), grad.contiguous(), exp_avg, *scalars)


@functools.cache
def _compiled_update(update: UpdateFunction) -> CompiledUpdate:
    """One a process and update function: optimizers share graphs."""
    return CompiledUpdate(update)


def _noise_key(seed: int, parameter_index: int) -> Tensor:
    if torch.compiler.is_compiling():  # a user's compiler warns of caches that it would trace through
        return torch.tensor(codec.noise_key(seed, parameter_index))
    return _cached_noise_key(seed, parameter_index)


@functools.lru_cache(maxsize=1 << 16)
def _cached_noise_key(seed: int, parameter_index: int) -> Tensor:
    return torch.tensor(codec.noise_key(seed, parameter_index))


# --- Hyper-parameters as tensors: a compiled graph reads their values, where it would be made anew for other floats ---


def _scalars(group: Mapping[str, Any], device: torch.device) -> tuple[Tensor, ...]:
    """``lr, decay, beta1, grad_weight1, beta2, grad_weight2`` of the update, 0-D float32."""
    beta1, beta2 = group["betas"]
    sign = -1.0 if group["maximize"] else 1.0
    values = (_host_value(group["lr"]), _decay(group), beta1, sign * (1 - beta1), beta2, sign * (1 - beta2))
    return tuple(_scalar(value, device) for value in values)


def _scalar(value: float | Tensor, device: torch.device) -> Tensor:
    """Values of the host stay there: a kernel takes them as arguments."""
    if not isinstance(value, Tensor):
        return torch.tensor(value, dtype=torch.float32)
    value = value.detach().reshape(()).float()
    return value if value.device == device or value.device.type == "cpu" else value.to(device)


def _host_value(value: float | Tensor) -> float | Tensor:
    """A float wherever reading it waits for no device, since products of floats are formed in fp64."""
    if not isinstance(value, Tensor) or value.device.type != "cpu" or torch.compiler.is_compiling():
        return value
    return value.item()


def _decay(group: Mapping[str, Any]) -> float | Tensor:
    """The share of itself that a weight loses in this step."""
    lr, weight_decay = _host_value(group["lr"]), group["weight_decay"]
    if not group["decouple_lr"]:
        return lr * weight_decay
    initial_lr = _host_value(group["initial_lr"])
    if not isinstance(lr, Tensor) and lr == 0.0:
        return 0.0
    if not isinstance(initial_lr, Tensor) and initial_lr == 0.0:
        raise ValueError(
            f"decouple_lr scales weight decay by lr / initial_lr, and initial_lr is 0 while lr is {lr}. Give the "
            "optimizer its full learning rate (a warm-up belongs in a scheduler), or set group['initial_lr']."
        )
    return weight_decay * (lr / initial_lr)


def _advance_step(group: dict[str, Any]) -> None:
    """Count the steps that move weights: DCP creates state with a hidden step at lr 0."""
    lr = _host_value(group["lr"])
    if isinstance(lr, Tensor):
        group["step"] = group["step"].to(lr.device) + (lr.detach().reshape(()) != 0)
    elif lr != 0.0:
        group["step"] = group["step"] + 1


def _step_as_tensor(group: dict[str, Any]) -> None:
    group["step"] = torch.as_tensor(group.get("step", 0), dtype=torch.int64)


def _pack_state_dict(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    state_dict["state"] = {key: checkpoint.pack(state) for key, state in state_dict["state"].items()}
    for group in state_dict["param_groups"]:
        group["step"] = int(group["step"])
        group["format_version"] = checkpoint.FORMAT_VERSION


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


# --- Checks: each error names the argument, what came, what is allowed and what to do --------------------------------


def _check_group_keys(group: Mapping[str, Any]) -> None:
    misplaced = sorted(_WHOLE_OPTIMIZER_OPTIONS & set(group))
    if misplaced:
        raise ValueError(f"{misplaced[0]} holds for the whole optimizer: pass it to the constructor, not in a group")
    foreign = sorted(_FOREIGN_OPTIONS & set(group))
    if foreign:
        raise ValueError(
            f"{foreign[0]}={group[foreign[0]]!r} in a parameter group is not an option of this optimizer. To keep a "
            "group's momentum in 32 bits use quantize=False; for small tensors, min_quantized_numel."
        )


def _check_options(options: Mapping[str, Any]) -> None:
    lr, betas = options["lr"], options["betas"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"lr is a tensor of shape {tuple(lr.shape)}; it must be a float or a tensor of one element")
    if not isinstance(lr, Tensor) or lr.device.type == "cpu":
        _check_range("lr", lr, "a finite number of at least 0", lambda x: 0 <= x < math.inf)
    if not (isinstance(betas, (tuple, list)) and len(betas) == 2):
        raise ValueError(f"betas={betas!r}; it must be two numbers in [0, 1), for example (0.9, 0.99)")
    for i, beta in enumerate(betas):
        _check_range(f"betas[{i}]", beta, "in [0, 1)", lambda x: 0 <= x < 1)
    _check_range("weight_decay", options["weight_decay"], "a finite number of at least 0", lambda x: 0 <= x < math.inf)
    _check_int("block_size", options["block_size"], _MIN_BLOCK_SIZE)
    _check_int("min_quantized_numel", options["min_quantized_numel"], 0)
    _check_int("seed", options["seed"], None)
    for name in ("quantize", "stochastic_rounding", "decouple_lr", "maximize", "offload_state"):
        if not isinstance(options[name], bool):
            raise TypeError(f"{name}={options[name]!r}; it must be True or False")
    if options["fused"] not in (None, True, False):
        raise TypeError(f"fused={options['fused']!r}; it must be None, True or False")
    _check_available(options)


def _check_available(options: Mapping[str, Any]) -> None:
    if options["master_weight_bits"] not in (None, 24, 32):
        raise ValueError(f"master_weight_bits={options['master_weight_bits']!r}; it must be None, 24 or 32")
    for name, instead in {
        "master_weight_bits": "leave it None; with stochastic_rounding=True small updates of bfloat16 weights count",
        "offload_state": "leave it False",
        "fused": "leave it None, which runs the compiled step",
    }.items():
        if options[name]:
            raise NotImplementedError(f"{name}={options[name]!r} is not available yet: {instead}")


def _check_range(name: str, value: Any, allowed: str, is_allowed: Callable[[float], bool]) -> None:
    is_number = isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)
    if isinstance(value, bool) or not is_number:
        raise TypeError(f"{name}={value!r} is {type(value).__name__}; it must be a number, {allowed}")
    if not is_allowed(float(value)):
        raise ValueError(f"{name}={value!r}; it must be {allowed}")


def _check_int(name: str, value: Any, minimum: int | None) -> None:
    allowed = "an integer" if minimum is None else f"an integer of at least {minimum}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r} is {type(value).__name__}; it must be {allowed}")
    if minimum is not None and value < minimum:
        hint = "; to keep momentum in 32 bits use quantize=False" if name == "block_size" else ""
        raise ValueError(f"{name}={value!r}; it must be {allowed}{hint}")


def _check_param(p: Tensor) -> None:
    if p.dtype not in _PARAM_DTYPES:
        raise TypeError(
            f"a parameter of shape {tuple(p.shape)} is {p.dtype}; parameters must be float32, bfloat16 or float16. "
            "Convert the model with model.to(torch.float32), or leave the parameter out."
        )


def _check_not_sharded(p: Tensor) -> None:
    if hasattr(p, "device_mesh"):  # a DTensor; asking for its class would import torch.distributed
        raise NotImplementedError(
            f"a parameter of shape {tuple(p.shape)} is a DTensor (FSDP2, tensor parallel), which is not available yet: "
            "train on one device, or with DistributedDataParallel"
        )


def _checked_grad(p: Tensor, index: int) -> Tensor:
    grad = p.grad
    assert grad is not None, "called for parameters with a gradient"
    if grad.is_sparse or grad.layout != torch.strided:
        raise RuntimeError(
            f"parameter {index} of shape {tuple(p.shape)} has a sparse gradient ({grad.layout}); this optimizer needs "
            "dense ones: build the embedding with sparse=False"
        )
    return grad
