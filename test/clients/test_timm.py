"""timm: a ViT and a ResNet in channels_last, its parameter groups, schedulers and checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch
from comparing import differences, example, quantized, snapshot

from lowbit_optim import Lion8bit

timm = pytest.importorskip("timm")

shown = example("timm_images")
make_model, make_optimizer, train = shown["make_model"], shown["make_optimizer"], shown["train"]

MODELS = ["test_vit", "test_resnet"]


@pytest.mark.parametrize("layer_decay", [None, 0.7])
@pytest.mark.parametrize("name", MODELS)
def test_a_resumed_run_equals_one_that_never_stopped(name: str, layer_decay: float | None, tmp_path: Path) -> None:
    """Report 48: parameter groups with learning rates of their own, and a scheduler that writes floats."""
    model = make_model(name)
    optimizer = make_optimizer(model, layer_decay)
    train(model, optimizer, range(2))
    saver = timm.utils.CheckpointSaver(model, optimizer, checkpoint_dir=str(tmp_path), recovery_dir=str(tmp_path))
    saver.save_checkpoint(1)
    train(model, optimizer, range(2, 4))
    assert sum(quantized(optimizer)) > 10

    resumed = make_model(name)
    resumed_optimizer = make_optimizer(resumed, layer_decay)
    timm.models.resume_checkpoint(resumed, str(tmp_path / "last.pth.tar"), resumed_optimizer)
    train(resumed, resumed_optimizer, range(2, 4))
    assert differences(snapshot(resumed, resumed_optimizer), snapshot(model, optimizer)) == []


def test_layers_keep_their_share_of_the_learning_rate() -> None:
    model = make_model("test_vit")
    optimizer = make_optimizer(model, layer_decay=0.7)
    train(model, optimizer, range(3))
    shares = [group["lr"] / group["lr_scale"] for group in optimizer.param_groups]
    assert shares == pytest.approx([shares[0]] * len(shares))
    assert len({group["lr_scale"] for group in optimizer.param_groups}) > 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_channels_last_changes_nothing(dtype: torch.dtype) -> None:
    """Report 57: strides that are not those of a contiguous tensor. Both get the gradients of one."""
    last = make_model("test_resnet").to(dtype)
    plain = make_model("test_resnet").to(dtype, memory_format=torch.contiguous_format)
    optimizers = [make_optimizer(model) for model in (last, plain)]
    for _ in range(3):
        for a, b in zip(last.parameters(), plain.parameters(), strict=True):
            b.grad = torch.randn(b.shape, dtype=dtype)
            a.grad = b.grad.to(memory_format=torch.channels_last) if b.ndim == 4 else b.grad
        for optimizer in optimizers:
            optimizer.step()
    weights = [p for p in last.parameters() if p.ndim == 4 and not p.is_contiguous()]
    assert weights
    assert all(p.is_contiguous(memory_format=torch.channels_last) for p in weights)
    assert differences(snapshot(last, optimizers[0]), snapshot(plain, optimizers[1])) == []


def test_it_can_be_given_a_name_in_timm() -> None:
    """So that ``create_optimizer_v2`` and ``train.py --opt`` find it."""
    from timm.optim import OptimInfo, create_optimizer_v2
    from timm.optim._optim_factory import default_registry

    default_registry.register(OptimInfo("lion8bit", "lowbit_optim.Lion8bit", has_eps=False, has_betas=True))
    model = make_model("test_vit")
    options: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1, "betas": (0.95, 0.98), "eps": 1e-8, "layer_decay": 0.9}
    optimizer = create_optimizer_v2(model, "lion8bit", **options)
    assert isinstance(optimizer, Lion8bit)
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.0, 0.1}
    before = [p.clone() for p in model.parameters()]
    train(model, optimizer, range(2))
    assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
