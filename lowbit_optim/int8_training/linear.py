"""Linear layers whose matmuls run in int8, and putting them into a model."""

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import is_traceable_wrapper_subclass_type
from torchao.quantization.transform_module import register_quantize_module_handler

from .config import Int8MixedPrecisionConfig
from .matmul import scaled_matmul, smallest_product
from .quantize import quantize, quantize_columns, quantize_rows

logger = logging.getLogger(__name__)

# The default filter's limits.
MAX_OUT_FEATURES = 32_000  # exclusive; from here on a vocabulary: the logits' precision matters, and a loss reads them
MIN_FEATURES = 512
# Of the tensor subclasses that a weight can be; a filter of one's own may let others through.
_READABLE_WEIGHTS = ("DTensor", "NF4Tensor", "Int8MixedPrecisionTrainingLinearWeight")

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


# --- The product and its gradients -----------------------------------------------------------------------------------


class _Int8Linear(torch.autograd.Function):
    """``F.linear`` with the products that ``config`` names in int8.

    Every product needs its operands' rows to run along what is summed over. The input's column-wise codes are kept for
    the backward pass instead of the input: half its bytes. The weight is kept as it is and quantised again, since FSDP
    frees it in between, and codes kept for every layer would be an int8 copy of the model.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        config: Int8MixedPrecisionConfig,
        dtype: torch.dtype,
        records: bool,
    ) -> Tensor:
        """``x`` is ``(tokens, in)``; ``dtype`` the output's; ``records`` is false under ``no_grad``."""
        needs_x_grad, needs_weight_grad = ctx.needs_input_grad[:2]
        keeps_x = needs_weight_grad and records
        x_rows, x_columns = quantize(x, by_rows=config.output, by_columns=keeps_x and config.grad_weight)

        kept_x = x_columns or ((x.to(dtype), None) if keeps_x else (None, None))
        ctx.save_for_backward(*kept_x, weight if needs_x_grad else None)
        ctx.config = config
        ctx.x_dtype, ctx.weight_dtype = x.dtype, weight.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype

        weight = _plain(weight, dtype)
        if x_rows is None:
            return F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
        return scaled_matmul(x_rows, quantize_rows(weight), dtype, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needs_x_grad, needs_weight_grad, needs_bias_grad = ctx.needs_input_grad[:3]
        config = ctx.config
        x, x_scale, weight = ctx.saved_tensors
        grad_rows, grad_columns = quantize(
            grad, by_rows=needs_x_grad and config.grad_input, by_columns=needs_weight_grad and config.grad_weight
        )

        x_grad = weight_grad = bias_grad = None
        if needs_x_grad:
            weight = _plain(weight, grad.dtype)
            if grad_rows is None:
                x_grad = (grad @ weight.to(grad.dtype)).to(ctx.x_dtype)
            else:
                x_grad = scaled_matmul(grad_rows, quantize_columns(weight), ctx.x_dtype)
        if needs_weight_grad:
            if grad_columns is None:
                weight_grad = (grad.t() @ x.to(grad.dtype)).to(ctx.weight_dtype)
            else:
                weight_grad = scaled_matmul(grad_columns, (x, x_scale), ctx.weight_dtype)
        if needs_bias_grad:
            bias_grad = grad.sum(0, dtype=ctx.bias_dtype)
        return x_grad, weight_grad, bias_grad, None, None, None


def _plain(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight as an ordinary tensor: storage formats such as NF4 decode on conversion."""
    return weight.to(dtype) if _is_stored_otherwise(weight) else weight


def _is_stored_otherwise(weight: Tensor) -> bool:
    # Asked of the type, since torch.compile makes is_traceable_wrapper_subclass(weight) false.
    return is_traceable_wrapper_subclass_type(type(weight))


def _autocast_dtype(device_type: str) -> torch.dtype | None:
    """What autocast computes in; None where it is off. The meta device has none, and torch raises."""
    if device_type != "meta" and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return None


# --- The module ------------------------------------------------------------------------------------------------------


class Int8MixedPrecisionLinear(nn.Linear):
    """A linear layer that computes in int8 what its ``int8_config`` says.

    Parameters and state dict are those of ``nn.Linear``. :func:`convert_int8_mixed_precision` makes one of an existing
    layer. It takes fp32, bf16 and fp16, with or without autocast, in any leading shape. Products too small to gain run
    as in ``nn.Linear``, and so does all of a call in another dtype.

    Raises:
        TypeError: in forward, if input or weight is a DTensor, or if their dtypes differ without autocast.
        ValueError: if the input's last dimension is not ``in_features``.
    """

    int8_config: Int8MixedPrecisionConfig

    def forward(self, input: Tensor) -> Tensor:
        self._check(input)
        if input.is_nested or input.dtype not in _DTYPES or not self.in_features:
            return super().forward(input)
        if input.numel() * self.out_features < smallest_product(input.device):
            return super().forward(input)
        rows = input.reshape(-1, self.in_features)
        dtype = _autocast_dtype(input.device.type) or input.dtype
        records = torch.is_grad_enabled()
        output = _Int8Linear.apply(rows, self.weight, self.bias, self.int8_config, dtype, records)
        # Not a view for autograd: changing one in place would lose FSDP's hook on it.
        return torch.ops.aten._unsafe_view(output, (*input.shape[:-1], self.out_features))

    def _check(self, input: Tensor) -> None:
        if hasattr(self.weight, "device_mesh") or hasattr(input, "device_mesh"):
            raise TypeError(
                "an int8 linear layer takes plain tensors, not DTensors: FSDP2 gathers its weights before use and "
                "works, tensor parallelism does not; leave these layers out with filter_fn"
            )
        if input.ndim == 0 or input.shape[-1] != self.in_features:
            features = "no dimension" if input.ndim == 0 else f"{input.shape[-1]} features in its last dimension"
            raise ValueError(f"input has {features}, expected {self.in_features}")
        if input.dtype != self.weight.dtype and not (
            _autocast_dtype(input.device.type) or _is_stored_otherwise(self.weight)
        ):
            raise TypeError(
                f"input is {input.dtype}, the weight {self.weight.dtype}: convert one of them, or use torch.autocast"
            )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.int8_config}"


# --- Conversion ------------------------------------------------------------------------------------------------------

Filter = Callable[[nn.Module, str], bool]


def reason_to_leave(module: nn.Module) -> str | None:
    """Why the default filter leaves a module as it is; None if it converts it."""
    reason = _reason_to_keep_class(module)
    if reason or not isinstance(module, nn.Linear):
        return reason
    if module.out_features >= MAX_OUT_FEATURES:
        return f"{module.out_features} outputs, at least {MAX_OUT_FEATURES}: taken for an LM head"
    smaller = min(module.in_features, module.out_features)
    if smaller < MIN_FEATURES:
        return f"{smaller} features on one side, fewer than {MIN_FEATURES}: too small to gain"
    if _is_stored_otherwise(module.weight) and type(module.weight).__name__ not in _READABLE_WEIGHTS:
        return f"its weight is stored as {type(module.weight).__name__}, which may not decode on conversion to a dtype"
    return None


def _reason_to_keep_class(module: nn.Module) -> str | None:
    if type(module) not in (nn.Linear, Int8MixedPrecisionLinear):
        return f"{type(module).__name__} is not nn.Linear itself, and may use its weight in its own way"
    if "forward" in vars(module):
        return "its forward method was replaced, as hooks of Accelerate do; they can be added afterwards"
    return None


def convert_int8_mixed_precision(
    model: nn.Module, config: Int8MixedPrecisionConfig | None = None, filter_fn: Filter | None = None
) -> nn.Module:
    """Let the linear layers of ``model`` compute in int8, in place.

    Modules stay the same objects with the same parameters, hooks and state dict: the optimizer may exist already, and
    weights may be tied. Layers that were converted before get the new ``config``.

    Args:
        model: it or any of its submodules may be a linear layer.
        config: default: all three products.
        filter_fn: takes a linear layer and its name, and says whether to convert it. Default: those for which
            :func:`reason_to_leave` gives none. Unknown subclasses of ``nn.Linear`` are never converted.

    Raises:
        TypeError: if ``config`` is something else.

    Returns:
        ``model``. The logger of this module tells, at level INFO, why a linear layer was left as it is; a warning says
        if all were.
    """
    config = Int8MixedPrecisionConfig() if config is None else config
    if not isinstance(config, Int8MixedPrecisionConfig):
        raise TypeError(
            f"config is {config!r}, an Int8MixedPrecisionConfig or None is expected; a filter is filter_fn=..."
        )
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        reason = reason_to_leave(module) if filter_fn is None else None
        if reason:
            logger.info("%s is left as it is: %s", name, reason)
        elif filter_fn is None or filter_fn(module, name):
            _convert(module, config)
    if not any(isinstance(module, Int8MixedPrecisionLinear) for module in model.modules()):
        logger.warning("no layer computes in int8 now; reason_to_leave(layer) says why one was left as it is")
    return model


def undo_int8_mixed_precision(model: nn.Module) -> nn.Module:
    """Make ``nn.Linear`` of all converted layers of ``model`` again, in place.

    Returns:
        ``model``. A warning names each layer that stays as it is: one whose class or forward method something else has
        changed since, as ``fully_shard`` does if it is called on the layer itself.
    """
    for name, module in model.named_modules():
        if not isinstance(module, Int8MixedPrecisionLinear):
            continue
        reason = _reason_to_keep_class(module)
        if reason:
            logger.warning("%s stays in int8: %s", name, reason)
        else:
            del module.int8_config
            module.__class__ = nn.Linear  # type: ignore[assignment]
    return model


@register_quantize_module_handler(Int8MixedPrecisionConfig)
def _convert(module: nn.Module, config: Int8MixedPrecisionConfig) -> nn.Module:
    """Also what ``torchao.quantize_`` does with each module that its own ``filter_fn`` lets through."""
    reason = _reason_to_keep_class(module)
    if reason:
        logger.warning("left as it is: %s", reason)
    else:
        module.__class__ = Int8MixedPrecisionLinear
        module.int8_config = config  # type: ignore[assignment]
    return module
