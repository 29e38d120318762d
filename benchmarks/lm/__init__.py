"""Training a byte-level language model: the parts behind ``benchmarks/train_lm.py``."""


class UsageError(ValueError):
    """What the person at the command line can put right; the message is one line that says how."""
