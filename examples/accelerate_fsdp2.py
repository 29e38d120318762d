"""Accelerate: train with Lion8bit, save_state and load_state; on one process, or on GPUs sharded by FSDP2.

pip install accelerate
python examples/accelerate_fsdp2.py FOLDER, or torchrun --nproc-per-node=2 examples/accelerate_fsdp2.py FOLDER
"""

import sys

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed import is_torchelastic_launched

from lowbit_optim import Lion8bit


def make_plugin(state_dict_type: str = "SHARDED_STATE_DICT") -> FullyShardedDataParallelPlugin:
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["TransformerEncoderLayer"],
        state_dict_type=state_dict_type,
        cpu_ram_efficient_loading=False,
    )


def make_model() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True) for _ in range(2)]
    return nn.Sequential(nn.Linear(64, 64), *layers)


def train(accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    dtype = next(model.parameters()).dtype
    for step in steps:
        for half in range(2):  # gradient_accumulation_steps
            generator = torch.Generator().manual_seed(100 * step + 10 * half + accelerator.process_index)
            x = torch.randn(4, 8, 64, generator=generator).to(accelerator.device, dtype)
            with accelerator.accumulate(model):
                accelerator.backward((model(x) - x).square().mean())
                optimizer.step()
                optimizer.zero_grad()


if __name__ == "__main__":
    plugin = make_plugin() if is_torchelastic_launched() else None
    cpu = not torch.accelerator.is_available()  # left out, two processes would each train alone on a CPU
    accelerator = Accelerator(cpu=cpu, gradient_accumulation_steps=2, fsdp_plugin=plugin)
    model = make_model()
    model, optimizer = accelerator.prepare(model, Lion8bit(model.parameters(), lr=1e-3, weight_decay=0.1))
    train(accelerator, model, optimizer, range(4))
    accelerator.save_state(sys.argv[1])
    train(accelerator, model, optimizer, range(4, 8))
    weights = [p.detach().clone() for p in model.parameters()]

    accelerator.load_state(sys.argv[1])
    train(accelerator, model, optimizer, range(4, 8))
    same = all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    accelerator.print("resumed run has the same weights:", same)
    accelerator.end_training()
