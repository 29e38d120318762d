"""torchtune: an optimizer is a ``_component_`` of its configuration."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from comparing import differences, quantized, snapshot
from torch import nn

from lowbit_optim import Lion8bit, gradient_release

if importlib.util.find_spec("torchtune") is None:
    pytest.skip("torchtune is not installed", allow_module_level=True)
if importlib.util.find_spec("torchao.dtypes.nf4tensor") is None:
    # moved since torchtune 0.6.1, the last release, which so cannot be imported: docs/clients.md
    from torchao.quantization.quantize_.workflows.nf4 import nf4_tensor

    sys.modules["torchao.dtypes.nf4tensor"] = nf4_tensor

from omegaconf import OmegaConf
from torchtune import config
from torchtune.models.llama2 import llama2

CONFIG = """
optimizer:
  _component_: lowbit_optim.Lion8bit
  lr: 1e-3
  weight_decay: 0.1
  betas: [0.95, 0.98]
"""


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return llama2(vocab_size=128, num_layers=1, num_heads=2, num_kv_heads=2, embed_dim=64, max_seq_len=16)


def make_optimizer(params: Any) -> Any:
    return config.instantiate(OmegaConf.create(CONFIG).optimizer, params)


def backward(model: nn.Module, step: int) -> None:
    tokens = torch.randint(128, (2, 8), generator=torch.Generator().manual_seed(step))
    model(tokens).square().mean().backward()


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()


def test_a_run_from_a_configuration_resumes(tmp_path: Path) -> None:
    model = make_model()
    optimizer = make_optimizer(model.parameters())
    assert isinstance(optimizer, Lion8bit)
    assert tuple(optimizer.param_groups[0]["betas"]) == (0.95, 0.98)
    train(model, optimizer, range(2))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "half.pt")
    train(model, optimizer, range(2, 4))
    assert any(quantized(optimizer))

    resumed = make_model()
    resumed_optimizer = make_optimizer(resumed.parameters())
    saved = torch.load(tmp_path / "half.pt")
    resumed.load_state_dict(saved["model"])
    resumed_optimizer.load_state_dict(saved["optimizer"])
    train(resumed, resumed_optimizer, range(2, 4))
    differing = differences(snapshot(resumed, resumed_optimizer), snapshot(model, optimizer))
    assert [name for name in differing if "betas" not in name] == []  # a list in YAML, a tuple once loaded


@pytest.mark.usefixtures("released_at_once")
def test_a_step_inside_backward_equals_one_after_it() -> None:
    """Reports 45 and 56: for torchtune's ``optimizer_in_bwd`` there is ``gradient_release``."""
    plain, released = make_model(), make_model()
    train(plain, make_optimizer(plain.parameters()), range(3))
    optimizer = make_optimizer(released.parameters())
    gradient_release(released, optimizer)
    for step in range(3):
        before = [p.clone() for p in released.parameters()]
        backward(released, step)
        assert not any(torch.equal(a, b) for a, b in zip(before, released.parameters(), strict=True))
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), released.parameters(), strict=True))
