"""Training a byte-level language model: the parts behind ``benchmarks/train_lm.py``."""

import logging
import warnings


class UsageError(ValueError):
    """What the person at the command line can put right; the message is one line that says how."""


def hush() -> None:
    """Leave out what libraries say about themselves, so that an error's one line stands alone."""
    warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)  # GradScaler skipped a step
    for name in ("torchao", "torch.utils._pytree", "bitsandbytes"):
        logging.getLogger(name).setLevel(logging.ERROR)
