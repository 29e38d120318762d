"""Everything together: Lion8bit, int8 linear layers, torch.compile, FSDP2, accumulation and a schedule."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR
from workers import Ranks, device

from lowbit_optim import Lion8bit
from lowbit_optim.int8_training import convert_int8_mixed_precision, matmul

DIM, FF, TOKENS = 48, 160, 40
STEPS, MORE, ACCUMULATE = 3, 3, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(DIM)
        self.up, self.down = nn.Linear(DIM, FF), nn.Linear(FF, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.up(self.norm(x))))


class Run:
    """One training run. Each rank has the whole batch, so that any number of them has the mean gradient exactly."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(Block(), Block()).to(device(), torch.bfloat16)
        convert_int8_mixed_precision(self.model, filter_fn=lambda module, name: True)
        mesh = init_device_mesh(device().type, (dist.get_world_size(),))
        for block in self.model:
            block.compile()
            if mesh.size() > 1:
                fully_shard(block, mesh=mesh)
        if mesh.size() > 1:
            fully_shard(self.model, mesh=mesh)
        self.optimizer = Lion8bit(self.model.parameters(), lr=3e-3, weight_decay=0.1, min_quantized_numel=0)
        self.schedule = LambdaLR(self.optimizer, lambda step: 1 / (1 + step))

    def train(self, first: int, steps: int) -> list[float]:
        losses = []
        for step in range(first, first + steps):
            noise = torch.Generator().manual_seed(step)
            for x in torch.randn(ACCUMULATE, TOKENS, DIM, generator=noise).to(device(), torch.bfloat16):
                loss = (self.model(x) - x.flip(1)).square().float().mean() / ACCUMULATE
                loss.backward()
            losses.append(loss.item())
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()
        return losses

    def save(self, folder: Path) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.save({"model": model, "optimizer": optimizer, "schedule": self.schedule.state_dict()}, checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        state = {"model": model, "optimizer": optimizer, "schedule": self.schedule.state_dict()}
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])

    def bits(self) -> list[Tensor]:
        """Weights, codes and scales, gathered."""
        found: list[Tensor] = []
        for p in self.model.parameters():
            exp_avg = self.optimizer.state[p]["exp_avg"]
            parts = [exp_avg.codes, exp_avg.scale.view(torch.uint8)] if hasattr(exp_avg, "codes") else [exp_avg]
            found += [x.full_tensor() if isinstance(x, DTensor) else x for x in (p.detach(), *parts)]
        return [x.cpu().clone() for x in found]


@contextlib.contextmanager
def _compiled_in_int8() -> Iterator[None]:
    """All products, however small, and by kernels that are not chosen by how long they take."""
    anything = mock.patch.dict(matmul.smallest_products, dict.fromkeys(matmul.smallest_products, 0))
    with torch.compiler.set_stance("default"), torch._inductor.config.patch(deterministic=True), anything:
        yield


def _train_and_save(folder: Path) -> tuple[list[Tensor], list[float]]:
    with _compiled_in_int8():
        run = Run()
        losses = run.train(0, STEPS)
        run.save(folder)
        losses += run.train(STEPS, MORE)
        return run.bits(), losses


def _resume(folder: Path) -> tuple[list[Tensor], list[float]]:
    with _compiled_in_int8():
        run = Run()
        run.load(folder)
        losses = run.train(STEPS, MORE)
        return run.bits(), losses


@pytest.mark.compiler
def test_a_run_goes_on_with_other_ranks_as_if_it_had_not_stopped(ranks: Ranks, tmp_path: Path) -> None:
    """Trained and saved on two ranks, resumed on two and on one: the same losses, weights, codes and scales."""
    expected, losses = ranks.run(2, _train_and_save, tmp_path / "saved")[0]
    assert losses[-1] < losses[0]
    for world_size in (2, 1):
        found, more = ranks.run(world_size, _resume, tmp_path / "saved")[0]
        assert more == losses[STEPS:], f"on {world_size} ranks"
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
