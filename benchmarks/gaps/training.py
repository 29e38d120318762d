"""One run from its first step to its last."""

import dataclasses
import hashlib
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gaps import texts
from benchmarks.lm.trainer import Settings, Trainer

_POINTS = 100  # of a curve of training losses


@dataclass(frozen=True)
class Run:
    """Everything that decides a run's numbers, but for the machine.

    Args:
        text: a key of `TEXTS`.
        settings: of the training.
        base: the run that its weights are taken from; None draws them.
    """

    text: str
    settings: Settings
    base: "Run | None" = None

    def key(self) -> str:
        """Equal where the runs are, in a results file too."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    def weights(self, folder: Path) -> Path:
        """Where they are, once it is done as a base."""
        return folder / f"weights_{hashlib.sha256(self.key().encode()).hexdigest()[:16]}.pt"


def train(
    run: Run, folder: Path, device: torch.device, deadline: float = float("inf"), keep_weights: bool = False
) -> dict[str, Any] | None:
    """Losses of a run, nats a token; None if the time was over before its end.

    Args:
        folder: with the texts that `texts.prepare` wrote, and the weights of bases.
        deadline: as `time.time()` counts.
        keep_weights: whether others start from its weights.

    Returns:
        ``held_out``: pairs of step and loss. ``train``: losses, each a mean over ``train_every`` steps.
        ``seconds``: that the run took, beside whatever else the machine was doing.
    """
    begun = time.time()
    torch.use_deterministic_algorithms(run.settings.deterministic)
    trainer = Trainer(run.settings, texts.load(run.text, folder), device)
    if run.base:
        _load(trainer.model, torch.load(run.base.weights(folder)))
    losses = _train_to_end(trainer, deadline)
    if losses is None:
        return None
    if keep_weights:
        _save(trainer.model, run.weights(folder))
    return {**losses, "seconds": round(time.time() - begun, 1)}


def _train_to_end(trainer: Trainer, deadline: float) -> dict[str, Any] | None:
    settings = trainer.settings
    losses: list[Tensor] = []
    held_out: list[tuple[int, float]] = []
    while trainer.step < settings.steps:
        if time.time() >= deadline:
            return None
        losses.append(trainer.train_step())
        if trainer.step % settings.eval_every == 0 or trainer.step == settings.steps:
            held_out.append((trainer.step, trainer.held_out_loss()))
    every = -(-settings.steps // _POINTS)
    means = [part.mean().item() for part in torch.stack(losses).cpu().split(every)]
    return {"held_out": held_out, "train_every": every, "train": [round(mean, 4) for mean in means]}


def _load(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """`weights` of a model without adapters, into one that may have them."""
    names = {name.replace(".base_layer.", "."): name for name in model.state_dict()}
    model.load_state_dict({names[name]: value for name, value in weights.items()}, strict=False)


def _save(model: nn.Module, path: Path) -> None:
    """As a whole or not at all: as soon as the file is there, others start from it."""
    partial = path.with_suffix(".partial")
    torch.save({name: value.cpu() for name, value in model.state_dict().items()}, partial)
    os.replace(partial, path)
