"""Stepping parameters inside backward, so that their gradients are not in memory all at once."""

import functools
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lowbit_optim import sharding, shards
from lowbit_optim.optimizer import LowBitOptimizer

# Gradients wait until a launch is worth what it costs the host: at most this many bytes of them, and this share of all.
_MAX_WAITING_BYTES = 256 << 20
_MAX_WAITING_SHARE = 1 / 16


def gradient_release(model: nn.Module, optimizer: LowBitOptimizer) -> "GradientRelease":
    """Step each parameter of a model as its gradient arrives in backward, and free the gradient.

    The results are the same in every bit. ``loss.backward()`` leaves ``p.grad`` None; ``optimizer.step()`` is called as
    ever, after each backward: it steps what is left and counts the step, so that closures and schedulers work. Besides
    the newest gradient at most a sixteenth of all, and 256 MiB, wait to be stepped together. With FSDP2, call
    ``fully_shard`` and build the optimizer first.

    What needs all gradients before the first parameter is stepped cannot be had: clipping by the norm (it would see no
    gradient, and cannot be detected), gradient accumulation by several calls of ``backward``, GradScaler,
    DistributedDataParallel. Learning rates must be set before ``backward``, not between it and ``step``.

    Args:
        model: whose parameters are stepped so, if the optimizer has them; frozen ones once they are trained.
        optimizer: a :class:`lowbit_optim.Lion8bit` or :class:`lowbit_optim.Lion`.

    Returns:
        A handle; its ``remove()`` undoes this.

    Raises:
        TypeError: the optimizer is another one, or the model is a DistributedDataParallel or holds one.
        NotImplementedError: the model's parameters are flattened (FSDP1, DeepSpeed ZeRO).
        ValueError: the optimizer has none of the model's parameters, or they are released already.
        RuntimeError: later, in ``backward``, at a second gradient of a parameter before ``step``; in ``step``, if a
            learning rate has changed since ``backward``; in ``GradScaler.step``.
    """
    return GradientRelease(model, optimizer)


@dataclass
class _Waiting:
    """Parameters of one group whose gradients were made on one stream."""

    params: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    nbytes: int = 0


class GradientRelease:
    """What :func:`gradient_release` returns."""

    def __init__(self, model: nn.Module, optimizer: LowBitOptimizer) -> None:
        self._model = model
        self._optimizer = optimizer
        self._check()
        self._lock = threading.Lock()  # backward has a thread for each device
        self._hooks: dict[int, Any] = {}  # by id of the parameter
        self._sides: dict[torch.device, tuple[Any, deque[Any]]] = {}  # streams, and events in their work
        self._reset()
        optimizer._release = self
        self._hooks[id(model)] = model.register_forward_pre_hook(_refuse_ddp)
        self._hook_parameters()

    def remove(self) -> None:
        """Undo it: gradients stay where backward puts them, for ``step`` to take."""
        self._put_back()
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        if self._optimizer._release is self:
            self._optimizer._release = None

    # --- What the optimizer calls -----------------------------------------------------------------------------------

    def before_step(self) -> bool:
        """Give back the gradients that wait, for this step to take. Returns whether any parameter has been stepped."""
        for number, scalars in self._scalars.items():
            self._check_unchanged(number, scalars)
        self._put_back()
        return bool(self._scalars)

    def after_step(self) -> None:
        for p in self._seen.values():
            p.grad = None
        self._reset()
        self._hook_parameters()

    def refuse_scaler(self) -> NoReturn:
        raise RuntimeError(
            "GradScaler cannot be used with gradient_release: the gradients are still scaled when their parameters are "
            "stepped, and an overflow would be found too late. Train in bfloat16 without a scaler, or call "
            "handle.remove() before the first backward."
        )

    # --- Inside backward --------------------------------------------------------------------------------------------

    def _take(self, p: Tensor) -> None:
        """The hook of a parameter whose gradient is complete."""
        with self._lock:
            if not self._seen:
                self._begin()
            if id(p) in self._seen:
                raise _second_gradient(p)
            self._seen[id(p)] = p
            grad = p.grad
            if grad is not None and id(p) in self._places and self._can_step(p, grad):
                self._wait(p, grad)
                p.grad = None
                while self._waiting_bytes > self._limit:
                    self._step_most()

    @torch.no_grad()
    def _begin(self) -> None:
        """With the groups as they are now, and state for all parameters, as in the first of all steps."""
        self._optimizer._all_states()
        self._places = {id(p): place for p, *place in self._own_parameters()}
        hooked = [shards.to_local(p) for p, *_ in self._own_parameters() if id(p) in self._hooks]
        self._limit = min(_MAX_WAITING_BYTES, _MAX_WAITING_SHARE * sum(p.nbytes for p in hooked))

    def _can_step(self, p: Any, grad: Tensor) -> bool:
        """All else is left to ``step``: ranks might meet in another order, or be hindered from going on.

        Where FSDP keeps shards in host memory, a gradient is still on its way there when this is called. A sparse one
        is refused there.
        """
        if not shards.is_dtensor(p):
            return grad.layout == torch.strided
        if p.to_local().device.type != p.device_mesh.device_type:
            return False
        return not sharding.needs_other_ranks(p, grad, self._optimizer.state[p]["exp_avg"])

    def _wait(self, p: Tensor, grad: Tensor) -> None:
        local = shards.to_local(grad)
        number, index = self._places[id(p)]
        stream = torch.cuda.current_stream(local.device) if local.is_cuda else None
        waiting = self._waiting.setdefault((number, stream), _Waiting())
        waiting.params.append(p)
        waiting.grads.append(grad)
        waiting.indices.append(index)
        waiting.nbytes += local.nbytes
        self._waiting_bytes += local.nbytes

    @torch.no_grad()
    def _step_most(self) -> None:
        """As many as share a launch, so that small tensors do not cost one each."""
        number, stream = max(self._waiting, key=lambda key: self._waiting[key].nbytes)
        waiting = self._waiting[number, stream]
        part = self._parts[number] = self._parts.get(number, 0) + 1
        beside = self._beside if stream is not None and self._optimizer.defaults["offload_state"] else _on
        with beside(stream, waiting.grads):
            self._scalars[number] = self._optimizer._step_early(
                number, part, waiting.params, waiting.grads, waiting.indices
            )
        del self._waiting[number, stream]  # not before: after an error they wait on
        self._waiting_bytes -= waiting.nbytes

    @contextmanager
    def _beside(self, stream: Any, grads: list[Tensor]) -> Iterator[None]:
        """On a stream of its own, so that backward goes on while state comes and goes; its end waits for it.

        The host waits if two such are under way already, since their gradients cannot be freed before they are done.
        """
        if stream.device not in self._sides:
            self._sides[stream.device] = torch.cuda.Stream(stream.device), deque()
        side, ends = self._sides[stream.device]
        if len(ends) == 2:
            ends.popleft().synchronize()
        side.wait_stream(stream)
        for grad in grads:
            shards.to_local(grad).record_stream(side)
        with torch.cuda.stream(side):
            yield
        ends.append(side.record_event())
        torch.autograd.Variable._execution_engine.queue_callback(functools.partial(_wait_for, side))

    def _put_back(self) -> None:
        for waiting in self._waiting.values():
            for p, grad in zip(waiting.params, waiting.grads, strict=True):
                p.grad = grad
        self._waiting.clear()
        self._waiting_bytes = 0

    def _reset(self) -> None:
        """To nothing seen since the last step."""
        self._seen: dict[int, Tensor] = {}
        self._waiting: dict[tuple[int, Any], _Waiting] = {}
        self._waiting_bytes = 0
        self._parts: dict[int, int] = {}  # how many of a group have been stepped
        self._scalars: dict[int, Any] = {}  # and with what

    # --- Parameters -------------------------------------------------------------------------------------------------

    def _own_parameters(self) -> Iterator[tuple[Tensor, int, int]]:
        """Each parameter of the optimizer, the number of its group and its own."""
        index = 0
        for number, group in enumerate(self._optimizer.param_groups):
            for p in group["params"]:
                yield p, number, index
                index += 1

    def _hook_parameters(self) -> None:
        """Those that are trained and have no hook: new ones, and ones that were frozen before."""
        new = {id(p) for p, *_ in self._own_parameters() if p.requires_grad and not self._is_hooked(p)}
        if new:  # to go through a model takes longer than to go through the groups
            found = [p for p in self._model.parameters() if id(p) in new]
            self._hooks |= {id(p): p.register_post_accumulate_grad_hook(self._take) for p in found}

    def _is_hooked(self, p: Any) -> bool:
        """One that was freed leaves its id to another one, but not its hooks."""
        return id(p) in self._hooks and bool(p._post_accumulate_grad_hooks)

    # --- Checks -----------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        if not isinstance(self._optimizer, LowBitOptimizer):
            raise TypeError(f"gradient_release takes a Lion8bit or Lion, not {type(self._optimizer).__name__}")
        if any(isinstance(module, DistributedDataParallel) for module in self._model.modules()):
            raise _ddp_error()
        if self._optimizer._release is not None:
            raise ValueError("this optimizer's gradients are released already: call remove() on that handle first")
        own = {id(p) for p, *_ in self._own_parameters()}
        params = [p for p in self._model.parameters() if id(p) in own]
        if not params:
            raise ValueError(
                "the optimizer has none of the model's parameters. If fully_shard or model.to_empty has replaced them, "
                "build the optimizer after it"
            )
        for p in params:
            sharding.check_not_flattened(p)
            if any(_is_release(hook) for hook in (p._post_accumulate_grad_hooks or {}).values()):
                raise ValueError(
                    f"a parameter of shape {tuple(p.shape)} is released by another optimizer already, and would be "
                    "stepped by both: call remove() on that handle first"
                )

    def _check_unchanged(self, number: int, scalars: tuple[Any, ...]) -> None:
        group = self._optimizer.param_groups[number]
        for before, now in zip(scalars, self._optimizer._scalars(group), strict=True):
            if isinstance(before, float) and before != now:
                raise RuntimeError(
                    f"learning rate, betas or weight decay of parameter group {number} were changed between backward "
                    f"and step ({before:g} became {now:g}). With gradient_release parameters are stepped in backward: "
                    "change them before it, or after step, as a scheduler does."
                )


def _is_release(hook: Any) -> bool:
    return isinstance(getattr(hook, "__self__", None), GradientRelease)


def _on(stream: Any, grads: list[Tensor]) -> AbstractContextManager[Any]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def _wait_for(stream: Any) -> None:
    torch.cuda.current_stream(stream.device).wait_stream(stream)


def _refuse_ddp(module: nn.Module, args: Any) -> None:
    """A function, not a method, since a copy of the model copies its hooks."""
    if not torch.compiler.is_compiling() and DistributedDataParallel._get_active_ddp_module() is not None:
        raise _ddp_error()


def _ddp_error() -> TypeError:
    return TypeError(
        "gradient_release cannot be used with DistributedDataParallel: a parameter would be stepped before its "
        "gradient is averaged over the ranks. Use FSDP2: torch.distributed.fsdp.fully_shard(model)"
    )


def _second_gradient(p: Tensor) -> RuntimeError:
    return RuntimeError(
        f"a parameter of shape {tuple(p.shape)} got a second gradient before optimizer.step(). With gradient_release "
        "the first one has moved it already, so gradients cannot be accumulated, nor can a step be skipped. Call "
        "optimizer.step() after each backward; to accumulate, call handle.remove() first, or with FSDP2 "
        "model.set_requires_gradient_sync(False) until the last backward. A module that FSDP2 or a reentrant "
        "checkpoint runs twice in a forward does this, too."
    )
