"""The reference that every optimizer test is held to, written from the paper; it imports nothing of the package."""

from torch import Tensor


def lion_reference(
    p: Tensor, g: Tensor, m: Tensor, lr: float, beta1: float, beta2: float, weight_decay: float
) -> tuple[Tensor, Tensor]:
    """One step of Lion, algorithm 2 of Chen et al. 2023 (arXiv:2302.06675), in the dtype of its inputs.

    ``p`` (weights), ``g`` (gradient) and ``m`` (momentum) have one shape and one dtype, float32 or float64, and stay as
    they are. Returns the new weights and the new momentum.
    """
    update = (beta1 * m + (1 - beta1) * g).sign()
    new_p = p - lr * (update + weight_decay * p)
    new_m = beta2 * m + (1 - beta2) * g
    return new_p, new_m
