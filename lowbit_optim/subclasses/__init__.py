"""State tensors, one file a format."""

from lowbit_optim.subclasses.optim_state_8bit import OptimState8bit

__all__ = ["OptimState8bit"]
