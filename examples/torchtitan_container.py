"""torchtitan: an OptimizersContainer with Lion8bit, its schedulers and its checkpoints.

In a training config: optimizer=LionContainer.Config(param_groups=[...]), as GROUPS below.

pip install torchtitan
python examples/torchtitan_container.py FOLDER
"""

import sys
from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import nn
from torchtitan.components.checkpointer.dcp import CheckpointManager
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig

from lowbit_optim import Lion, Lion8bit


class LionContainer(OptimizersContainer):
    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        pass

    _resolve_optimizer_factory = staticmethod({"Lion": Lion, "Lion8bit": Lion8bit}.__getitem__)
    _build_impl_kwargs = staticmethod(lambda config: {})  # no fused= and foreach= in each group


DECAYING = {"lr": 1e-3, "weight_decay": 0.1}
GROUPS = [
    ParamGroupConfig(pattern="embed", optimizer_name="Lion", optimizer_kwargs=DECAYING),  # fp32 momentum
    ParamGroupConfig(pattern="bias$", optimizer_name="Lion8bit", optimizer_kwargs={"lr": 1e-3}),
    ParamGroupConfig(pattern=".*", optimizer_name="Lion8bit", optimizer_kwargs=DECAYING),
]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    layers = {"embed": nn.Embedding(256, 64), "mlp": nn.Linear(64, 128), "act": nn.ReLU(), "head": nn.Linear(128, 256)}
    return nn.Sequential(OrderedDict(layers))


def run(model: nn.Module, folder: str, first: int = 0, last: int = 8) -> LionContainer:
    optimizers = LionContainer.Config(param_groups=GROUPS).build(model_parts=[model])
    schedulers = LRSchedulersContainer.Config(warmup_steps=2).build(optimizers=optimizers, training_steps=10)
    config = CheckpointManager.Config(enable=True, folder=folder, interval=4, keep_latest_k=0)
    parts = {"model_parts": [model], "optimizers": optimizers, "lr_schedulers": schedulers, "dataloader": None}
    checkpoints = config.build(**parts, states={}, sd_adapter=None)
    if first:
        checkpoints.load(step=first)
    for step in range(first, last):
        tokens = torch.randint(256, (4, 16), generator=torch.Generator().manual_seed(step))
        model(tokens).square().mean().backward()
        optimizers.step()
        schedulers.step()
        optimizers.zero_grad()
        checkpoints.save(step + 1)  # when it is one of the interval's
    return optimizers


if __name__ == "__main__":
    whole, resumed = make_model(), make_model()
    run(whole, sys.argv[1])
    run(resumed, sys.argv[1], first=4)
    pairs = zip(whole.parameters(), resumed.parameters(), strict=True)
    print("resumed run has the same weights:", all(torch.equal(a, b) for a, b in pairs))
