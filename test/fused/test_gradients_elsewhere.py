"""Gradients that autograd or DDP put where, or as, the first ones were not."""

from typing import Any

import pytest
import torch
from torch import nn

from lowbit_optim import Lion8bit
from lowbit_optim.fused import FusedLion, launch


def test_a_gradient_that_moves_by_less_than_a_load_is_planned_anew(
    fused_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DDP rebuilds its buckets after the first step. Wide loads from there are a fault on a GPU alone."""
    plans: list[int] = []
    plan = FusedLion.plan

    def counted(self: FusedLion, *args: Any) -> None:
        plans.append(1)
        plan(self, *args)

    monkeypatch.setattr(FusedLion, "plan", counted)
    p = nn.Parameter(torch.randn(64, 64, device=fused_device))
    optimizer = Lion8bit([p])
    flat = torch.randn(64 * 64 + 4, device=fused_device)
    for start, expected in [(0, 1), (4, 1), (1, 2), (1, 2), (0, 3)]:
        p.grad = flat[start : start + 64 * 64].view(64, 64)
        optimizer.step()
        assert len(plans) == expected, start


def test_a_gradient_with_torchs_negative_bit(fused_device: str) -> None:
    """Autograd leaves one in a parameter of one element that is multiplied by a conjugate."""
    p = nn.Parameter(torch.full((1,), 0.5, device=fused_device))
    optimizer = Lion8bit([p], lr=0.25)
    for expected in [0.25, 0.0]:
        optimizer.zero_grad()
        z = torch.complex(torch.ones_like(p), p)
        (z.conj() * (1 + 2j)).real.sum().backward()
        assert p.grad is not None
        assert p.grad.is_neg()
        optimizer.step()
        assert p.item() == expected


def test_a_table_is_kept_while_gradients_stay_and_never_a_graphs(
    fused_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A captured graph fills its table when it is replayed, and goes on reading it."""
    tables: list[torch.Tensor] = []

    def noted(kernel: Any, grid: Any, key: Any, table: torch.Tensor, *args: Any, **options: Any) -> None:
        tables.append(table)

    monkeypatch.setattr(launch, "launch", noted)
    p = nn.Parameter(torch.randn(64, 64, device=fused_device))
    optimizer = Lion8bit([p])
    first, second = torch.randn(2, 64, 64, device=fused_device)
    for grad, capturing in [
        (first, False),
        (first, False),
        (first, True),
        (first, True),
        (first, False),
        (second, False),
    ]:
        monkeypatch.setattr(launch, "is_capturing", lambda capturing=capturing: capturing)
        p.grad = grad
        optimizer.step()
    kept, again, captured, captured_again, after, moved = tables
    assert kept is again is after
    assert len({id(table) for table in (kept, captured, captured_again, moved)}) == 4
    assert [table[0].item() for table in (kept, captured, moved)] == [
        first.data_ptr(),
        first.data_ptr(),
        second.data_ptr(),
    ]
