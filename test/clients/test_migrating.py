"""What docs/migrating.md says of other optimizers: their defaults, and where learning rate and decay mean the same."""

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowbit_optim import Lion, Lion8bit

PAGE = Path(__file__).parents[2] / "docs" / "migrating.md"
ROW = re.compile(r"^\| `([\w.]+)` \| (\S+) \| \((\S+), (\S+)\) \| (\S+) \|$", re.MULTILINE)
DEFAULTS = {name: tuple(map(float, values)) for name, *values in ROW.findall(PAGE.read_text())}


def test_the_page_has_a_table_of_defaults() -> None:
    assert len(DEFAULTS) == 6


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults_are_as_the_page_says(name: str) -> None:
    module, _, cls = name.rpartition(".")
    pytest.importorskip(module.partition(".")[0])
    options = inspect.signature(getattr(importlib.import_module(module), cls)).parameters
    lr, betas, weight_decay = (options[key].default for key in ("lr", "betas", "weight_decay"))
    assert (lr, *betas, weight_decay) == DEFAULTS[name]


def moved(make: Any, lrs: list[float], **options: Any) -> Tensor:
    """Weights after a step at each learning rate, from the same weights and with the same gradients."""
    generator = torch.Generator().manual_seed(0)
    p = nn.Parameter(torch.randn(64, 80, generator=generator))
    optimizer = make([p], lr=lrs[0], **options)
    for lr in lrs:
        optimizer.param_groups[0]["lr"] = lr
        p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()
    return p.detach()


def assert_same_step(theirs: Tensor, ours: Tensor) -> None:
    torch.testing.assert_close(theirs, ours, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["Lion", "Lion8bit"])
def test_a_step_of_bitsandbytes_is_a_step_here(name: str) -> None:
    """Of its 8-bit form one step, before its momentum differs by its rounding."""
    bnb = pytest.importorskip("bitsandbytes")
    lrs = [1e-2] if name == "Lion8bit" else [1e-2, 3e-3, 1e-3]
    ours = moved(Lion8bit if name == "Lion8bit" else Lion, lrs, weight_decay=0.5)
    assert_same_step(moved(getattr(bnb.optim, name), lrs, weight_decay=0.5), ours)


@pytest.mark.parametrize("decoupled", [True, False])
def test_steps_of_lion_pytorch_are_steps_here(decoupled: bool) -> None:
    lion_pytorch = pytest.importorskip("lion_pytorch")
    lrs, decay = [1e-2, 3e-3, 1e-3], {"weight_decay": 0.01 if decoupled else 0.5}
    theirs = moved(lion_pytorch.Lion, lrs, decoupled_weight_decay=decoupled, **decay)
    assert_same_step(theirs, moved(Lion, lrs, decouple_lr=decoupled, **decay))


def test_a_decoupled_decay_is_a_coupled_one_divided_by_the_learning_rate() -> None:
    lrs = [1e-3, 5e-4, 1e-4]
    decoupled = moved(Lion8bit, lrs, weight_decay=1e-2, decouple_lr=True)
    assert_same_step(decoupled, moved(Lion8bit, lrs, weight_decay=1e-2 / 1e-3))
