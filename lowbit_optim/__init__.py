"""8-bit Lion for PyTorch."""

from lowbit_optim.gradient_release import gradient_release
from lowbit_optim.lion import Lion, Lion8bit

__all__ = ["Lion", "Lion8bit", "gradient_release"]
__version__ = "0.1.0"
