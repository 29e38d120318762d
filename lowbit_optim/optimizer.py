"""The optimizer around an update function: groups and their options, state, and the step over all parameters."""

import functools
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lowbit_optim import checkpoint, codec, sharding, shards
from lowbit_optim.compiled import CompiledUpdate, UpdateFunction
from lowbit_optim.options import MIN_BLOCK_SIZE, check_group_keys, check_options

ParamsT: TypeAlias = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]

_PARAM_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class LowBitOptimizer(Optimizer):
    """Keeps one momentum a parameter, in 8 bits where that pays, and steps with :attr:`update`.

    Args:
        params: parameters, named parameters or group dicts, as in torch.optim.
        defaults: every option of :class:`lowbit_optim.Lion8bit`, by name.
    """

    update: ClassVar[UpdateFunction]

    def _scalars(self, group: Mapping[str, Any], device: torch.device) -> tuple[Tensor, ...]:
        """What :attr:`update` takes after the momentum: hyper-parameters as 0-D float32 tensors.

        Tensors, because a compiled graph reads their values, where it would be made anew for another float.
        """
        raise NotImplementedError("an optimizer defines _scalars beside its update function")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with options of their own. Raises as the constructor does."""
        check_group_keys(param_group, self.defaults)
        check_options({**self.defaults, **param_group})
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            for p in group["params"]:
                sharding.check_not_flattened(p)
                if p.requires_grad:
                    _check_dtype(p)
        except (TypeError, NotImplementedError):
            self.param_groups.pop()
            raise
        group["lr"] = _copy(group["lr"])  # a scheduler writes into a tensor, and groups may have been given the same
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
            and row_length >= MIN_BLOCK_SIZE
        )

    def _new_state(self, p: Tensor, group: Mapping[str, Any]) -> dict[str, Tensor]:
        """Zero state, contiguous; of DTensors if the parameter is one, else of plain tensors."""
        _check_dtype(p)
        return {"exp_avg": sharding.zeros(p, group["block_size"] if self._is_quantized(p, group) else None)}

    @torch.compiler.disable
    def _init_missing_state(self) -> None:
        """For every parameter that could get a gradient, so that ranks and later loads agree on what there is."""
        for group in self.param_groups:
            for p in group["params"]:
                if p not in self.state and _is_trained(p):
                    self.state[p] = self._new_state(p, group)

    def state_dict(self) -> dict[str, Any]:
        """As in torch.optim, with plain tensors alone: an 8-bit momentum is ``{"codes": int8, "scale": uint8}``."""
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
        self._check_params()
        update = type(self).update
        if not torch.compiler.is_compiling():  # inside a user's own graph, that compiler fuses it
            update = _compiled_update(update)
        first_index, shared_blocks = 0, sharding.SharedBlocks()
        for group in self.param_groups:
            self._step_group(group, first_index, update, shared_blocks)
            first_index += len(group["params"])
        shared_blocks.encode()
        return loss

    def _step_group(
        self, group: dict[str, Any], first_index: int, update: UpdateFunction, shared_blocks: sharding.SharedBlocks
    ) -> None:
        if group["decouple_lr"]:  # it may have been switched on since, by hand or by a checkpoint
            group.setdefault("initial_lr", _copy(group["lr"]))
        moves_weights = _advance_step(group)
        scalars: dict[torch.device, tuple[Tensor, ...]] = {}
        for index, p in enumerate(group["params"], first_index):
            if p.grad is None:
                continue
            if p.device not in scalars:
                scalars[p.device] = self._scalars(group, p.device)
            noise = self._noise(p, index, group)
            # 0 * inf is NaN, and 0 + -0.0 is 0.0: at lr 0 the update gets a copy, so that no weight can change
            target = shards.to_local(p if moves_weights else p.detach().clone())
            exp_avg = shared_blocks.decode(self.state[p]["exp_avg"])
            _update_param(update, p, target, sharding.local_grad(p), exp_avg, scalars[p.device], noise)

    def _noise(self, p: Tensor, index: int, group: dict[str, Any]) -> tuple[Tensor | None, Tensor | None]:
        if not group["stochastic_rounding"] or p.dtype == torch.float32:
            return None, None
        return _noise_key(group["seed"], index), _on_device(group["step"], p.device)

    def _check_params(self) -> None:
        """Before any of them moves."""
        params = [p for group in self.param_groups for p in group["params"]]
        _warn_if_none_has_a_gradient(params)
        for index, p in enumerate(params):
            sharding.check(p, f"parameter {index}")
            if p.grad is None:
                continue
            _check_dtype(p)
            if p.grad.layout != torch.strided:
                raise RuntimeError(
                    f"parameter {index} of shape {tuple(p.shape)} has a sparse gradient ({p.grad.layout}); this "
                    "optimizer needs dense ones: build the embedding with sparse=False"
                )


def _warn_if_none_has_a_gradient(params: list[Tensor]) -> None:
    """What replaces a model's parameters leaves an optimizer with the old ones, which it would step in vain."""
    if all(p.grad is None for p in params) and any(p.requires_grad for p in params):
        message = (
            "no parameter has a gradient, so this step changes nothing. If fully_shard or model.to_empty has replaced "
            "the model's parameters since, build the optimizer after it, or put the new ones into param_groups."
        )
        warnings.warn(message, stacklevel=6)


def _is_trained(p: Tensor) -> bool:
    return p.requires_grad or p.grad is not None


def _update_param(
    update: UpdateFunction,
    whole: Tensor,
    p: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    scalars: tuple[Tensor, ...],
    noise: tuple[Tensor | None, Tensor | None],
) -> None:
    """``p`` is what this rank holds. Where its memory is not simply its elements in order, on a copy of them."""
    copied = is_traceable_wrapper_subclass(p) or not p.is_contiguous()
    # detached, since Dynamo looks at p.grad too and trips over a dtype other than p's
    values = torch.empty(p.shape, dtype=p.dtype, device=p.device).copy_(p) if copied else p.detach()
    for step in sharding.local_steps(whole, values, grad.contiguous(), exp_avg, noisy=noise[0] is not None):
        update(step.param, step.grad, step.exp_avg, *scalars, *noise, step.position)
    if copied:
        p.copy_(values)


@functools.cache
def _compiled_update(update: UpdateFunction) -> CompiledUpdate:
    """One a process and update function: optimizers share graphs."""
    return CompiledUpdate(update)


def _noise_key(seed: int, parameter_index: int) -> Tensor:
    return torch.tensor(codec.noise_key(seed, parameter_index), device="cpu")


# --- Hyper-parameters -----------------------------------------------------------------------------------------------


def as_scalar(value: float | Tensor, device: torch.device) -> Tensor:
    """0-D float32. A value of the host stays there: a kernel takes it as an argument."""
    if not isinstance(value, Tensor):
        return torch.tensor(value, dtype=torch.float32, device="cpu")
    return _on_device(value.detach().reshape(()).float(), device)


def host_value(value: float | Tensor) -> float | Tensor:
    """A float wherever reading it waits for no device, since products of floats are formed in fp64."""
    if not isinstance(value, Tensor) or value.device.type != "cpu" or torch.compiler.is_compiling():
        return value
    return value.item()


def decay_of_step(group: Mapping[str, Any]) -> float | Tensor:
    """The share of itself that a weight loses in this step: never NaN, and 0 where lr is."""
    lr, weight_decay = host_value(group["lr"]), group["weight_decay"]
    if not group["decouple_lr"]:
        return lr * weight_decay
    initial_lr = host_value(group["initial_lr"])
    if isinstance(lr, Tensor) or isinstance(initial_lr, Tensor):
        lr, initial_lr = torch.as_tensor(lr), torch.as_tensor(initial_lr)
        return torch.where(lr == 0, 0.0, weight_decay * (lr / initial_lr))
    if lr == 0.0:
        return 0.0
    if initial_lr == 0.0:
        raise ValueError(
            f"decouple_lr scales weight decay by lr / initial_lr, and initial_lr is 0 while lr is {lr}. Give the "
            "optimizer its full learning rate (a warm-up belongs in a scheduler), or set group['initial_lr']."
        )
    return weight_decay * (lr / initial_lr)


def _on_device(value: Tensor, device: torch.device) -> Tensor:
    return value if value.device == device or value.device.type == "cpu" else value.to(device)


def _advance_step(group: dict[str, Any]) -> bool:
    """Count a step if it moves weights, and say whether it does: DCP creates state with a hidden step at lr 0.

    A learning rate on a device is not waited for; there the answer is True and the count is the device's.
    """
    lr = host_value(group["lr"])
    if isinstance(lr, Tensor):
        group["step"] = group["step"].to(lr.device) + (lr.detach().reshape(()) != 0)
        return True
    if not math.isfinite(lr):
        raise ValueError(f"lr is {lr} in this step; it must be finite. Look at what set it: a scheduler, or by hand")
    if lr == 0.0:
        return False
    group["step"] = group["step"] + 1
    return True


def _step_as_tensor(group: dict[str, Any]) -> None:
    if not isinstance(group.get("step"), Tensor):
        group["step"] = torch.tensor(group.get("step", 0), dtype=torch.int64, device="cpu")


def _pack_state_dict(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    state_dict["state"] = {key: checkpoint.pack(state) for key, state in state_dict["state"].items()}
    for group in state_dict["param_groups"]:
        group.update({key: checkpoint.pack_option(value) for key, value in group.items()})
        group["step"] = int(group["step"])
        group["format_version"] = checkpoint.FORMAT_VERSION


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _check_dtype(p: Tensor) -> None:
    if p.dtype not in _PARAM_DTYPES:
        raise TypeError(
            f"a parameter of shape {tuple(p.shape)} is {p.dtype}; parameters must be float32, bfloat16 or float16. "
            "Convert the model with model.to(torch.float32), or leave the parameter out."
        )
