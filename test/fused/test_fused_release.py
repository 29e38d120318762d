"""Gradient release with the fused step: the same bits, and launches that are planned once."""

import sys

import pytest
import torch
from torch import Tensor, nn

from lowbit_optim import Lion8bit, gradient_release
from lowbit_optim.fused import FusedLion

STEPS = 20 if torch.cuda.is_available() else 4


def train(device: str, released: bool) -> tuple[nn.Module, Lion8bit]:
    torch.manual_seed(0)
    layers = [nn.Linear(64, 64) for _ in range(4)]
    model = nn.Sequential(nn.Linear(48, 64), *layers, nn.Linear(64, 7)).to(device, torch.bfloat16)
    groups = [{"params": [p for p in model.parameters() if p.ndim == n], "weight_decay": 0.1 * n} for n in (2, 1)]
    optimizer = Lion8bit(groups, lr=1e-2, min_quantized_numel=0)
    if released:
        gradient_release(model, optimizer)
    for step in range(STEPS):
        x = torch.randn(4, 48, generator=torch.Generator().manual_seed(step)).to(device, torch.bfloat16)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def state(optimizer: Lion8bit) -> list[Tensor]:
    states = optimizer.state_dict()["state"].values()
    return [part for each in states for part in _parts(each["exp_avg"])]


def _parts(saved: dict[str, Tensor] | Tensor) -> list[Tensor]:
    return list(saved.values()) if isinstance(saved, dict) else [saved]


def test_the_bits_are_those_of_plain_fused_steps(fused_device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["lowbit_optim.gradient_release"]
    monkeypatch.setattr(module, "_MAX_WAITING_BYTES", 16_000)
    monkeypatch.setattr(module, "_MAX_WAITING_SHARE", 1)
    plans: list[int] = []
    plan = FusedLion.plan
    monkeypatch.setattr(FusedLion, "plan", lambda self, updates, *args: (plans.append(1), plan(self, updates, *args)))
    released, optimizer = train(fused_device, True)
    # two matrices at a time in backward; what is left in step: two matrices, and all vectors
    assert len(plans) == 4
    plain, plain_optimizer = train(fused_device, False)
    assert all(map(torch.equal, released.parameters(), plain.parameters()))
    assert all(map(torch.equal, state(optimizer), state(plain_optimizer)))
