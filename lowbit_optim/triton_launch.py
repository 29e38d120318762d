"""Launching a Triton kernel at a third of what it costs the host through ``kernel[grid](...)``."""

from typing import Any

import triton
from torch import Tensor
from triton.runtime import driver

_compiled: dict[tuple[Any, ...], Any] = {}


def launch(kernel: Any, grid: tuple[int, ...], key: tuple[Any, ...], *args: Any, **options: Any) -> None:
    """As ``kernel[grid](*args, **options)`` on the current device, for what Triton compiles once for each ``key``.

    Triton would find out what to specialise on anew each time. The key has to tell apart all of that: constants,
    dtypes, which arguments are None, which tensors begin on 16 bytes, and integers unless they are excepted.

    Args:
        args: all of the kernel's, in its order.
        options: ``num_warps`` and the like; the same for the same key.
    """
    if triton.knobs.runtime.interpret:
        kernel[grid](*args, **options)
        return
    key = kernel, driver.active.get_current_device(), *key
    compiled = _compiled.get(key)
    if compiled is None:
        compiled = _compiled[key] = kernel.warmup(*args, grid=grid, **options)
    compiled[(*grid, 1, 1)[:3]](*args)


def alignments(*values: Any) -> tuple[bool, ...]:
    """What Triton specialises on in a tensor, its dtype apart; False for all else."""
    return tuple(isinstance(x, Tensor) and x.data_ptr() % 16 == 0 for x in values)
