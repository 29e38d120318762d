"""What a client's training leaves, taken apart and compared bit for bit."""

import runpy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import keystr, tree_flatten_with_path

from lowbit_optim import shards
from lowbit_optim.subclasses import OptimState8bit

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name: str) -> dict[str, Any]:
    """What ``examples/name.py`` defines."""
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))


def snapshot(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Copies of all weights and buffers, and of all that the optimizer would save, under flat names.

    Of DTensors what this rank holds.
    """
    leaves, _ = tree_flatten_with_path({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    return {keystr(path): _copy(leaf) for path, leaf in leaves}


def _copy(leaf: Any) -> Any:
    return shards.to_local(leaf.detach()).clone() if isinstance(leaf, Tensor) else leaf


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """The names whose values differ in a bit, in dtype or in shape, or that only one side has."""
    return sorted(a.keys() ^ b.keys()) + [name for name in sorted(a.keys() & b.keys()) if not _same(a[name], b[name])]


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and torch.equal(a.cpu(), b.cpu())
    return type(a) is type(b) and a == b


def quantized(optimizer: Optimizer) -> list[bool]:
    """For each parameter that has state, whether its momentum is held in 8 bits."""
    return [isinstance(state["exp_avg"], OptimState8bit) for state in optimizer.state.values()]
