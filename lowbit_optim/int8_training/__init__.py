"""Training with int8 matmuls: weights, gradients and state dict stay as they are."""

from .config import Int8MixedPrecisionConfig
from .linear import convert_int8_mixed_precision, reason_to_leave, undo_int8_mixed_precision

__all__ = [
    "Int8MixedPrecisionConfig",
    "convert_int8_mixed_precision",
    "reason_to_leave",
    "undo_int8_mixed_precision",
]
