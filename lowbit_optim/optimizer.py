"""The optimizer around an update function: groups and their options, state, and the step over all parameters."""

import functools
import operator
import threading
import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._triton import has_triton

from lowbit_optim import checkpoint, codec, offload, sharding, shards, weights
from lowbit_optim.compiled import CompiledUpdate, UpdateFunction
from lowbit_optim.hyperparameters import (
    advance_step,
    as_scalar,
    check_lr,
    is_capturing,
    kernel_scalars,
    on_device,
    step_as_tensor,
)
from lowbit_optim.options import MIN_BLOCK_SIZE, check_group_keys, check_options
from lowbit_optim.subclasses import OptimState8bit
from lowbit_optim.subclasses.blockwise import BlockwiseTensor
from lowbit_optim.updates import NO_UPDATES, FusedOptions, FusedStep, LocalUpdates, Updates, check_dtype

ParamsT: TypeAlias = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]

_SAVING = threading.RLock()  # reentrant, since a user's hook may ask for a state dict too
_MAX_FUSED_BLOCK_SIZE = 4096  # a program of the kernel keeps a block in its registers


class _StateOrder:
    """Where in ``Optimizer.state`` each parameter's state is.

    To find it there, torch hashes a parameter in Python, which can take the host more time than all else that a fused
    step does for it (docs/internals.md).
    """

    def __init__(self, state: Mapping[Tensor, Any], groups: list[list[Tensor]]) -> None:
        self._keys = list(state)
        self._groups = [list(params) for params in groups]
        place = {id(p): i for i, p in enumerate(self._keys)}
        self._places = [[place.get(id(p), -1) for p in params] for params in groups]

    def is_current(self, state: Mapping[Tensor, Any], groups: list[list[Tensor]]) -> bool:
        """Whether state has the same keys and the groups the same parameters, in the same order."""
        return len(groups) == len(self._groups) and all(map(_same, [*groups, list(state)], [*self._groups, self._keys]))

    def select(self, state: Mapping[Tensor, Any]) -> list[list[Any]]:
        """The state of each group's parameters, None where there is none."""
        states = [*state.values(), None]
        return [[states[place] for place in places] for places in self._places]


def _same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(map(operator.is_, a, b))


@dataclass
class _GroupStep:
    """A group's part in a step, checked."""

    group: dict[str, Any]
    scalars: tuple[float | Tensor, ...]
    fused: FusedStep | None  # steps `together`, if there is any
    together: Updates
    one_by_one: Updates
    copied: list[tuple[Tensor, Tensor]]  # parameters that `together` has copies of, and these


@dataclass
class _Plan:
    """What was learned of a group, or a part of one, in earlier steps."""

    fused: FusedStep | None = None
    local: LocalUpdates | None = None  # if there are DTensors


class LowBitOptimizer(Optimizer):
    """Keeps one momentum a parameter, as a :attr:`state_class` where that pays, and steps with :attr:`update`.

    Args:
        params: parameters, named parameters or group dicts, as in torch.optim.
        defaults: every option of :class:`lowbit_optim.Lion8bit`, by name.
    """

    update: ClassVar[UpdateFunction]
    state_class: ClassVar[type[BlockwiseTensor]] = OptimState8bit  # of quantised momentum
    _release: Any = None  # the GradientRelease that steps parameters inside backward, if there is one

    def _scalars(self, group: Mapping[str, Any]) -> tuple[float | Tensor, ...]:
        """The hyper-parameters that :attr:`update` takes after the momentum; it gets them as 0-D float32 tensors.

        Tensors, because a compiled graph reads their values, where it would be made anew for another float.
        """
        raise NotImplementedError("an optimizer defines _scalars beside its update function")

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        self._forget()
        self._offload = offload.Offload()
        super().__init__(params, defaults)

    def _forget(self) -> None:
        """What was learned in earlier steps to save time."""
        self._order = _StateOrder({}, [])
        self._plans: dict[tuple[int, Hashable], _Plan] = {}  # by the group's number and its part, None for all of it

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
                    check_dtype(p)
        except (TypeError, NotImplementedError):
            self.param_groups.pop()
            raise
        group["lr"] = _copy(group["lr"])  # a scheduler writes into a tensor, and groups may have been given the same
        if group["decouple_lr"]:
            group.setdefault("initial_lr", _copy(group["lr"]))
        step_as_tensor(group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget()
        self._offload = offload.Offload()
        for group in self.param_groups:
            step_as_tensor(group)

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
        sharding.check_not_flattened(p)
        check_dtype(p)
        state: dict[str, Tensor] = {"exp_avg": self._new_momentum(p, group)}
        residual = self._new_residual(p, group)
        return state if residual is None else {**state, "master_residual": residual}

    def _new_momentum(self, p: Tensor, group: Mapping[str, Any]) -> Tensor:
        if self._is_quantized(p, group):
            return sharding.zeros(p, self.state_class, group["block_size"])
        return sharding.zeros_like(p, torch.float32)

    def _new_residual(self, p: Tensor, group: Mapping[str, Any]) -> Tensor | None:
        if not group["master_weight_bits"] or p.dtype == torch.float32:
            return None
        return sharding.zeros_like(p, codec.RESIDUAL_DTYPES[group["master_weight_bits"]])

    @torch.compiler.disable
    def _init_missing_state(self) -> None:
        """For every parameter that could get a gradient, so that ranks and later loads agree on what there is."""
        for group in self.param_groups:
            for p in group["params"]:
                if not self.state.get(p) and _is_trained(p):
                    _check_not_capturing()
                    self.state[p] = self._allocate(p, group)

    def _allocate(self, p: Tensor, group: Mapping[str, Any]) -> dict[str, Tensor]:
        """As :meth:`_new_state`, where state lives between steps."""
        state = self._new_state(p, group)
        is_offloaded = self.defaults["offload_state"] and offload.is_offloaded(p)
        return offload.to_host(state) if is_offloaded else state

    def __getstate__(self) -> dict[str, Any]:
        self._offload.wait()
        return super().__getstate__()

    def state_dict(self) -> dict[str, Any]:
        """As in torch.optim, with plain tensors alone, DTensors where a parameter is one; in the state's own memory.

        Returns:
            ``param_groups``, and in ``state`` for each parameter:

            - ``exp_avg``: ``{"codes": int8, "scale": uint8}``, shaped like the parameter and
              ``(*codec.scale_shape(p.shape, block_size), 2)``, the two bytes of each scale. A float32 tensor shaped
              like the parameter where it is not quantised, or in another format than ``OptimState8bit``.
            - ``master_residual``, of bfloat16 and float16 parameters with ``master_weight_bits``: for 24 bits
              ``{"int8": int8}``, shaped like the parameter; for 32 ``{"int16": uint8}``, ``(*p.shape, 2)``, the two
              bytes of each.
        """
        self._offload.wait()
        with _SAVING:  # a thread that logs or saves must not meet another one's hook
            handle = self.register_state_dict_post_hook(_pack_state_dict, prepend=True)
            try:
                return super().state_dict()
            finally:
                handle.remove()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load from this package or another; the formats are in :func:`lowbit_optim.checkpoint.read_state_dict`.

        What is quantised, and how, stays as it is in this optimizer. Sharded state that is cut or quantised otherwise
        here is gathered, which is a collective call.

        Raises:
            ValueError, TypeError: the checkpoint does not fit; the message says which parameter, what came, what is
                allowed and what to do. Nothing has changed.
        """
        self._offload.wait()
        messages = checkpoint.load(self, state_dict, super().load_state_dict, self._allocate)
        self._forget()
        for message in messages:
            warnings.warn(message, stacklevel=2)

    def fp32_state_dict(self, model: nn.Module) -> dict[str, Any]:
        """``model.state_dict()`` with the weights that this optimizer has bits of, in fp32.

        Returns:
            A bfloat16 or float16 parameter is fp32: its master weight if it has a residual (``master_weight_bits``),
            else the same value. Other tensors share the model's memory. Tied parameters are one tensor under each of
            their names, and a DTensor is one with the same placements.
        """
        self._offload.wait()
        return weights.fp32_state_dict(model, self._residual)

    def load_fp32_state_dict(self, model: nn.Module, state_dict: Mapping[str, Any]) -> None:
        """Set a model's weights, and the residuals of those that have ``master_weight_bits``.

        :meth:`load_state_dict` sets residuals too, to those of its checkpoint or to 0: call it before, not after.

        Args:
            model: whose parameters this optimizer steps, sharded before or not.
            state_dict: from :meth:`fp32_state_dict` or ``state_dict()`` of a model like it in fp32; whole tensors, or
                DTensors on any mesh. A tied parameter may be there under one name alone.

        Raises:
            ValueError, TypeError: the name of what is missing, unexpected or does not fit. Nothing has changed.
        """
        self._offload.wait()
        weights.load_fp32_state_dict(model, state_dict, self._residuals_to_set)

    def _residual(self, p: Tensor) -> Tensor | None:
        return self.state[p].get("master_residual") if p in self.state else None

    def _residuals_to_set(self, params: list[Tensor]) -> list[Tensor | None]:
        """With new state before the first step; for all parameters, since torch's tools take it that all have some."""
        if any(group["master_weight_bits"] for group in self.param_groups):
            self._init_missing_state()
        return [self._residual(p) for p in params]

    # --- Step -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient.

        What is wrong with a parameter or a group is found before anything moves; the message says which and what to do.

        Args:
            closure: re-evaluates the model and returns the loss, which ``step`` then returns.

        Raises:
            RuntimeError: a gradient is sparse; it or the state is from before a parameter or an option was changed;
                ``fused=True``, and the kernel cannot run; a CUDA graph is captured that would replay what belongs to
                one step; gradients are released, and a hyper-parameter was changed after backward.
            TypeError: a parameter's dtype; one of it and its gradient is a DTensor, the other is not.
            ValueError: a learning rate is not finite, or weight decay cannot be scaled by it; a DTensor's mesh,
                placements or shard cannot be stepped.
            NotImplementedError: a parameter is part of a flattened buffer (FSDP1, DeepSpeed).
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        stepped_early = self._release is not None and self._release.before_step()
        collected = self._collect()
        if not stepped_early and not any(updates.params for updates in collected):
            self._warn_of_no_gradient()
        # whatever is wrong with a parameter or a group is found before anything moves
        collected, step_offloaded = self._prepare_offloaded(collected)
        prepared = [self._prepare(number, updates) for number, updates in enumerate(collected)]
        step_offloaded()
        shared_blocks = sharding.SharedBlocks()
        for group_step in prepared:
            self._step_group(group_step, shared_blocks)
        shared_blocks.encode()
        if self._release is not None:
            self._release.after_step()
        return loss

    def _step_early(self, number: int, part: int, params: list[Tensor], grads: list[Tensor], indices: list[int]) -> Any:
        """Step parameters of a group as the coming :meth:`step` will step the others, which alone counts it.

        Args:
            number: of the group.
            part: if that has the same number in each iteration, its launch is planned once.
            indices: of the parameters, over all groups.

        Returns:
            The hyper-parameters that they were stepped with.
        """
        collected = [NO_UPDATES] * len(self.param_groups)
        states = [self.state[p] for p in params]
        collected[number] = Updates.of(self.param_groups[number], params, grads, states, indices)
        collected, step_offloaded = self._prepare_offloaded(collected, part)
        prepared = self._prepare(number, collected[number], part)
        step_offloaded()
        self._step_part(prepared)
        return prepared.scalars

    def _prepare_offloaded(
        self, collected: list[Updates], part: int | None = None
    ) -> tuple[list[Updates], Callable[[], None]]:
        """What has its state beside it, and a function that steps the rest."""
        if not self.defaults["offload_state"]:
            return collected, lambda: None
        collected, chunks = self._offload.split(collected)
        prepared = [self._prepare(chunk.group, chunk.updates, (part, i)) for i, chunk in enumerate(chunks)]
        steps = dict(zip(chunks, prepared, strict=True))
        return collected, lambda: self._offload.run(chunks, lambda chunk: self._step_part(steps[chunk]))

    def _step_part(self, step: _GroupStep) -> None:
        """Of a group, with the number of the coming step, which is counted once for all."""
        shared_blocks = sharding.SharedBlocks()
        group = {**step.group, "step": step.group["step"].clone()}
        self._step_group(replace(step, group=group), shared_blocks)
        shared_blocks.encode()

    def _warn_of_no_gradient(self) -> None:
        """What replaces a model's parameters leaves an optimizer with the old ones, which it would step in vain."""
        if any(p.requires_grad for group in self.param_groups for p in group["params"]):
            message = (
                "no parameter has a gradient, so this step changes nothing. If fully_shard or model.to_empty has "
                "replaced the model's parameters since, build the optimizer after it, or put the new ones into "
                "param_groups."
            )
            warnings.warn(message, stacklevel=5)

    def _collect(self) -> list[Updates]:
        """For each group, what has a gradient."""
        collected, first = [], 0
        for group, states in zip(self.param_groups, self._all_states(), strict=True):
            params = group["params"]
            indices = list(range(first, first + len(params)))
            first += len(params)
            updates = Updates.of(group, params, [p.grad for p in params], states, indices)
            if any(grad is None for grad in updates.grads):
                updates = updates.select([grad is not None for grad in updates.grads])
            collected.append(updates)
        return collected

    def _all_states(self) -> list[list[Any]]:
        """For each group, the state of each parameter; nothing for a frozen one that has none."""
        states = self._known_states()
        if not all(map(all, states)) and self._is_state_missing(states):
            self._init_missing_state()
            states = self._known_states()
        return states

    def _known_states(self) -> list[list[Any]]:
        groups = [group["params"] for group in self.param_groups]
        if torch.compiler.is_compiling():
            return [[self.state.get(p) for p in params] for params in groups]
        if not self._order.is_current(self.state, groups):
            self._order = _StateOrder(self.state, groups)
        return self._order.select(self.state)

    def _is_state_missing(self, states: list[list[Any]]) -> bool:
        pairs = zip(self.param_groups, states, strict=True)
        return any(
            not s and _is_trained(p) for group, some in pairs for p, s in zip(group["params"], some, strict=True)
        )

    def _prepare(self, number: int, updates: Updates, part: Hashable = None) -> _GroupStep:
        """Raises whatever is wrong with a group or its parameters."""
        group = self.param_groups[number]
        if group["decouple_lr"]:  # it may have been switched on since, by hand or by a checkpoint
            group.setdefault("initial_lr", _copy(group["lr"]))
        check_lr(group)
        scalars = self._scalars(group)
        if self.defaults["fused"] is False or torch.compiler.is_compiling():
            updates.check(group["master_weight_bits"])
            return _GroupStep(group, scalars, None, NO_UPDATES, updates, [])
        options = FusedOptions.of(group)
        plan = self._plans.setdefault((number, part), _Plan())
        local = plan.local.of(updates) if plan.local else updates
        if plan.fused and local is not None and plan.fused.takes(local, options):
            return _GroupStep(group, scalars, plan.fused, local, NO_UPDATES, [])
        updates.check(group["master_weight_bits"])
        local = updates.in_one_run(lambda p: self._is_fused(p, group))
        plan.local = self._local_updates(updates, local)
        chosen = [self._is_fused(p, group) for p in local.params]
        one_by_one = local.select([not each for each in chosen])
        together, copied = local.select(chosen).as_plain()
        if together.params and (plan.fused is None or not plan.fused.takes(together, options)):
            plan.fused = self._new_fused_step()  # type: ignore[misc]
            plan.fused.plan(together, options)
        return _GroupStep(group, scalars, plan.fused, together, one_by_one, copied)

    def _local_updates(self, whole: Updates, local: Updates) -> LocalUpdates | None:
        """What a rank holds of all of them, if that is plain; not of state that is on its device for one step alone."""
        has_dtensors = any(map(shards.is_dtensor, whole.params))
        if not has_dtensors or any(map(shards.is_dtensor, local.params)) or self.defaults["offload_state"]:
            return None
        return LocalUpdates(whole, local)

    def _step_group(self, step: _GroupStep, shared_blocks: sharding.SharedBlocks) -> None:
        moves_weights = advance_step(step.group, getattr(self, "found_inf", None))
        if step.fused and step.together.params:
            self._step_together(step.fused, step)
        updates = step.one_by_one
        if not moves_weights:
            # 0 * inf is NaN, and 0 + -0.0 is 0.0: at lr 0 the update gets a copy, so that no weight can change
            residuals = [None if residual is None else residual.clone() for residual in updates.residuals]
            updates = updates._replace(params=[p.detach().clone() for p in updates.params], residuals=residuals)
        updates = updates._replace(exp_avgs=[shared_blocks.decode(exp_avg) for exp_avg in updates.exp_avgs])
        self._step_one_by_one(step.group, updates, step.scalars)

    def _step_one_by_one(self, group: dict[str, Any], updates: Updates, scalars: tuple[float | Tensor, ...]) -> None:
        if updates.params and getattr(self, "found_inf", None) is not None:
            raise RuntimeError(
                "GradScaler left its scale to the fused step, which does not run inside torch.compile: give the "
                "optimizer fused=False, or call scaler.step outside of what is compiled"
            )
        update = type(self).update
        if not torch.compiler.is_compiling():  # inside a user's own graph, that compiler fuses it
            update = _compiled_update(update)
        on_device: dict[torch.device, tuple[Tensor, ...]] = {}
        for p, grad, exp_avg, residual, index, _ in zip(*updates, strict=True):
            if p.device not in on_device:
                on_device[p.device] = tuple(as_scalar(value, p.device) for value in scalars)
            noise = self._noise(p, residual, index, group)
            _update_param(update, p, grad, exp_avg, residual, on_device[p.device], noise)

    def _noise(self, p: Tensor, residual: Tensor | None, index: int, group: dict[str, Any]) -> codec.Noise | None:
        is_rounded = p.dtype != torch.float32 and (residual is None or residual.dtype == torch.int8)
        if not group["stochastic_rounding"] or not is_rounded:
            return None
        return codec.Noise(_noise_key(group["seed"], index), on_device(group["step"], p.device))

    # --- Fused step -------------------------------------------------------------------------------------------------

    # None if there is no such kernel.
    _new_fused_step: ClassVar[Callable[[], FusedStep] | None] = None

    def _is_fused(self, p: Tensor, group: Mapping[str, Any]) -> bool:
        """Whether the fused kernel steps this parameter."""
        fused = self.defaults["fused"]
        if fused is False or type(self)._new_fused_step is None:
            return False
        reason = _why_not_fused(p, group)
        if self.state_class is not OptimState8bit:
            reason = f"the kernel does not know {self.state_class.__name__}"
        if reason and fused:
            raise RuntimeError(
                f"fused=True, but a parameter of shape {tuple(p.shape)} cannot be stepped so: {reason}. "
                "With fused=None the kernel is used wherever it can run."
            )
        return reason is None

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Then GradScaler leaves scaled gradients and ``found_inf`` to the step, which waits for neither."""
        if self._release is not None:
            self._release.refuse_scaler()
        params = ((p, group) for group in self.param_groups for p in group["params"] if _is_trained(p))
        return all(not shards.is_dtensor(p) and self._is_fused(p, group) for p, group in params)

    def _step_together(self, fused: FusedStep, step: _GroupStep) -> None:
        count, grad_scale = step.group["step"], getattr(self, "grad_scale", None)
        fused.run(
            kernel_scalars(step.scalars, step.together.params[0].device),
            count.item() if count.device.type == "cpu" else count,
            None if grad_scale is None else grad_scale.double().reciprocal().float(),  # as GradScaler's own unscaling
            getattr(self, "found_inf", None),
        )
        torch.autograd.graph.increment_version(step.together.params)
        for p, values in step.copied:
            p.copy_(values)


def _why_not_fused(p: Tensor, group: Mapping[str, Any]) -> str | None:
    if shards.is_dtensor(p):
        return "this rank holds parts of its rows or blocks, or its gradient is cut otherwise"
    if isinstance(p, FakeTensor):
        return "it is a FakeTensor, which has no memory"
    if not p.is_cuda:
        return f"it is on {p.device}, and the kernel needs CUDA"
    if group["block_size"] > _MAX_FUSED_BLOCK_SIZE:
        return f"block_size is {group['block_size']}, and the kernel has at most {_MAX_FUSED_BLOCK_SIZE}"
    if not has_triton():
        return "Triton cannot be used on this GPU"
    return None


def _is_trained(p: Tensor) -> bool:
    return p.requires_grad or p.grad is not None


def _update_param(
    update: UpdateFunction,
    p: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    residual: Tensor | None,
    scalars: tuple[Tensor, ...],
    noise: codec.Noise | None,
) -> None:
    """What this rank holds of ``p``. Where its memory is not simply its elements in order, on a copy of them."""
    local = shards.to_local(p)
    copied = is_traceable_wrapper_subclass(local) or not local.is_contiguous()
    # detached, since Dynamo looks at p.grad too and trips over a dtype other than p's
    values = shards.plain_copy(local) if copied else local.detach()
    grad = sharding.local_grad(p, grad).resolve_neg().contiguous()
    for step in sharding.local_steps(p, values, grad, exp_avg, residual, noise):
        tensors = step.param, step.grad, step.exp_avg
        update(*tensors, *scalars, noise=step.noise, master_residual=step.master_residual)
    if copied:
        local.copy_(values)


@functools.cache
def _compiled_update(update: UpdateFunction) -> CompiledUpdate:
    """One a process and update function: optimizers share graphs."""
    return CompiledUpdate(update)


def _noise_key(seed: int, parameter_index: int) -> Tensor:
    return torch.tensor(codec.noise_key(seed, parameter_index), device="cpu")


def _check_not_capturing() -> None:
    if is_capturing():
        raise RuntimeError(
            "a CUDA graph would set the optimizer's state to zero in every replay: run a step before it is captured"
        )


def _pack_state_dict(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    state_dict["state"] = {key: checkpoint.pack(state) for key, state in state_dict["state"].items()}
    for group in state_dict["param_groups"]:
        group.update({key: checkpoint.pack_option(value) for key, value in group.items()})
        group["step"] = int(group["step"])
        group["format_version"] = checkpoint.FORMAT_VERSION


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value
