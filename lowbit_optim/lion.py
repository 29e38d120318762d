"""Lion (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", algorithm 2), in 32 or 8 bits."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lowbit_optim import codec, shards, weights
from lowbit_optim.hyperparameters import decay_of_step, host_value
from lowbit_optim.optimizer import LowBitOptimizer, ParamsT
from lowbit_optim.subclasses.blockwise import dequantize


def lion_update(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    lr: Tensor,
    decay: Tensor,
    beta1: Tensor,
    grad_weight1: Tensor,
    beta2: Tensor,
    grad_weight2: Tensor,
    noise: codec.Noise | None = None,
    master_residual: Tensor | None = None,
) -> None:
    """One Lion step, in place; all arithmetic in fp32, in the paper's order.

    Args:
        param: float32, bfloat16 or float16.
        grad: any float dtype, shaped like ``param``.
        exp_avg: the momentum, a float32 tensor or an ``OptimState8bit``, shaped like ``param``.
        lr, decay: 0-D float32; ``decay`` is what a weight loses of itself, the learning rate times the weight decay.
        beta1, beta2: 0-D float32.
        grad_weight1, grad_weight2: 0-D float32, ``1 - beta``; negative to maximise.
        noise: to round the stored weight stochastically; None rounds to nearest.
        master_residual: int8 or int16, shaped like ``param``: what a bfloat16 or float16 weight lacks of its master
            weight (:func:`lowbit_optim.codec.split_weight`); noise then acts on the last bit of 24, and not on 32.
    """
    p, g, m = codec.read_weight(param, master_residual), grad.float(), dequantize(exp_avg)

    p = p - decay * p
    p = p - _times_sign(lr, beta1 * m + grad_weight1 * g)
    # a gradient that is not finite moves the weight as its sign says, and leaves no trace in the momentum
    m = beta2 * m
    m = torch.where(g.abs() < math.inf, m + grad_weight2 * g, m)

    codec.write_weight(param, master_residual, p, codec.noise_of(param, noise))
    exp_avg.copy_(m)


def _times_sign(lr: Tensor, x: Tensor) -> Tensor:
    """``lr * x.sign()``, 0 for 0 and NaN: the sign bit moved over, since a compiler takes ``sign`` through int8."""
    signed = lr.view(torch.int32) ^ (x.view(torch.int32) & codec.SIGN_BIT)
    return torch.where(x.abs() > 0, signed.view(torch.float32), 0.0)


def _new_fused_step() -> Any:
    from lowbit_optim.fused import FusedLion  # needs Triton

    return FusedLion()


class Lion(LowBitOptimizer):
    """Lion with float32 momentum: ``quantize=False`` by default, all else as in :class:`Lion8bit`."""

    update = staticmethod(lion_update)
    _new_fused_step = staticmethod(_new_fused_step)

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        quantize: bool = False,
        block_size: int = 64,
        min_quantized_numel: int = 4096,
        master_weight_bits: int | None = None,
        stochastic_rounding: bool = True,
        seed: int = 0,
        decouple_lr: bool = False,
        maximize: bool = False,
        offload_state: bool = False,
        fused: bool | None = None,
    ) -> None:
        defaults = dict(
            lr=lr,
            betas=betas,
            weight_decay=weight_decay,
            quantize=quantize,
            block_size=block_size,
            min_quantized_numel=min_quantized_numel,
            master_weight_bits=master_weight_bits,
            stochastic_rounding=stochastic_rounding,
            seed=seed,
            decouple_lr=decouple_lr,
            maximize=maximize,
            offload_state=offload_state,
            fused=fused,
        )
        super().__init__(params, defaults)

    def _scalars(self, group: Mapping[str, Any]) -> tuple[float | Tensor, ...]:
        """``lr, decay, beta1, grad_weight1, beta2, grad_weight2``."""
        beta1, beta2 = group["betas"]
        sign = -1.0 if group["maximize"] else 1.0
        return host_value(group["lr"]), decay_of_step(group), beta1, sign * (1 - beta1), beta2, sign * (1 - beta2)

    @torch.no_grad()
    def stalled_fraction(self, group: int | None = None) -> float:
        """The share of bfloat16 and float16 weights that an update cannot move, as they are stored.

        An update is the learning rate, up or down. It is lost if the weight rounds back to what it was; with
        ``stochastic_rounding``, if it does so whatever the noise, since the update is below what fp32 resolves. If most
        weights stall, use stochastic rounding, ``master_weight_bits`` or fp32 weights.

        Args:
            group: the number of a parameter group; None: all of them.

        Returns:
            0 ... 1, over what this rank holds of the weights; 0 if there are none of these dtypes. Gradients, momentum
            and weight decay, which is smaller still, play no part.

        Raises:
            IndexError: there is no such group.
        """
        self._offload.wait()
        if group is not None and group not in range(len(self.param_groups)):
            last = len(self.param_groups) - 1
            raise IndexError(f"group={group}; parameter groups are numbered 0 ... {last}, and None means all of them")
        groups = self.param_groups if group is None else [self.param_groups[group]]
        stalled = total = 0
        for each in groups:
            lr, is_noisy = float(each["lr"]), each["stochastic_rounding"]
            for p in each["params"]:
                if p.requires_grad and p.dtype in codec.CUT_BITS:
                    residual = self._residual(p) if self.state.get(p) else self._new_residual(p, each)
                    stalled += weights.count_stalled(p, residual, lr, is_noisy)
                    total += shards.to_local(p).numel()
        return stalled / total if total else 0.0


class Lion8bit(Lion):
    """Lion with 8-bit momentum: one byte a parameter, and 2 for each block of 64.

    Args:
        params: float32, bfloat16 or float16 parameters, named ones, or group dicts. Every option but ``seed``,
            ``fused`` and ``offload_state`` can be set for a group.
        lr: learning rate, >= 0; a float or a tensor of one element, which is copied for each group. It, ``betas`` and
            ``weight_decay`` may be changed in ``param_groups`` at any time.
        betas: in [0, 1): of the update, and of the momentum.
        weight_decay: >= 0; a weight loses ``lr * weight_decay`` of itself in a step.
        quantize: keep the momentum in 8 bits, for parameters with at least 2 dimensions, ``min_quantized_numel``
            elements and rows of 16. All other momentum is float32.
        block_size: elements that share a scale, >= 16.
        min_quantized_numel: smaller parameters have float32 momentum.
        master_weight_bits: 24 or 32: keep 8 or 16 more bits of each bfloat16 and float16 weight in the state, so that
            nothing that small updates add up to is lost; None keeps the weights alone.
        stochastic_rounding: round bfloat16 and float16 weights, or the 24 bits of them, up or down at random, so that
            small updates count on average; False rounds to nearest.
        seed: of that rounding, which draws from none of torch's generators.
        decouple_lr: weight decay scaled by ``lr / initial_lr`` rather than by ``lr``.
        maximize: ascend.
        offload_state: keep the state of parameters on CUDA in pinned host memory, and copy it to the device and back in
            each step, a part at a time; the results are the same. ``state_dict()`` waits for the copies; before
            ``state`` is read directly, call ``torch.cuda.synchronize()``.
        fused: step a group's parameters of a dtype in one launch of a Triton kernel. None: where it can run, on CUDA;
            elsewhere one by one by a compiled kernel, with the same results. True: an error where it cannot run.

    Raises:
        RuntimeError: ``fused=True``, and there is no Triton; in a step, where the kernel cannot run.
        TypeError, ValueError: an argument cannot be used; the message says which, and what is allowed.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        quantize: bool = True,
        block_size: int = 64,
        min_quantized_numel: int = 4096,
        master_weight_bits: int | None = None,
        stochastic_rounding: bool = True,
        seed: int = 0,
        decouple_lr: bool = False,
        maximize: bool = False,
        offload_state: bool = False,
        fused: bool | None = None,
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            betas=betas,
            weight_decay=weight_decay,
            quantize=quantize,
            block_size=block_size,
            min_quantized_numel=min_quantized_numel,
            master_weight_bits=master_weight_bits,
            stochastic_rounding=stochastic_rounding,
            seed=seed,
            decouple_lr=decouple_lr,
            maximize=maximize,
            offload_state=offload_state,
            fused=fused,
        )
