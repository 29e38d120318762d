"""timm: train a ResNet (channels_last) or a ViT with Lion8bit, save, resume bit for bit.

pip install timm
python examples/timm_images.py test_resnet
"""

import sys
import tempfile

import timm
import torch
import torch.nn.functional as F
from timm.models import resume_checkpoint
from timm.optim import param_groups_layer_decay, param_groups_weight_decay
from timm.scheduler import CosineLRScheduler
from timm.utils import CheckpointSaver
from torch import nn

from lowbit_optim import Lion8bit


def make_model(name: str) -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model(name, num_classes=10).to(memory_format=torch.channels_last)


def make_optimizer(model: nn.Module, layer_decay: float | None = None) -> Lion8bit:
    if layer_decay is None:
        groups = param_groups_weight_decay(model, weight_decay=0.1)
    else:
        groups = param_groups_layer_decay(model, weight_decay=0.1, layer_decay=layer_decay)
    return Lion8bit(groups, lr=1e-3)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, epochs: range) -> None:
    scheduler = CosineLRScheduler(optimizer, t_initial=10, warmup_t=1, warmup_lr_init=1e-4)
    for epoch in epochs:
        scheduler.step(epoch)
        generator = torch.Generator().manual_seed(epoch)
        images = torch.randn(2, 3, 160, 160, generator=generator).to(memory_format=torch.channels_last)
        F.cross_entropy(model(images), torch.randint(10, (2,), generator=generator)).backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    name = sys.argv[1] if len(sys.argv) > 1 else "test_vit"
    model = make_model(name)
    optimizer = make_optimizer(model)
    train(model, optimizer, range(3))
    with tempfile.TemporaryDirectory() as folder:
        CheckpointSaver(model, optimizer, checkpoint_dir=folder, recovery_dir=folder).save_checkpoint(2)
        train(model, optimizer, range(3, 6))
        resumed = make_model(name)
        resumed_optimizer = make_optimizer(resumed)
        resume_checkpoint(resumed, f"{folder}/last.pth.tar", resumed_optimizer)
    train(resumed, resumed_optimizer, range(3, 6))
    pairs = zip(model.parameters(), resumed.parameters(), strict=True)
    print("resumed run has the same weights:", all(torch.equal(a, b) for a, b in pairs))
