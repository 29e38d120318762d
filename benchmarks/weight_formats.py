"""What bf16 weights lose to rounding in fine-tuning, by how they are stored.

    python -m benchmarks.weight_formats [--device cuda] [--quick]

A model is trained in fp32, its weights are rounded to bf16, and from there Lion8bit trains it on at a small learning
rate, once with each format of weights: fp32, and bf16 rounded to nearest, stochastically, with 24 bits of both, and
with 32. The same batches in the same order. Three questions:

- How large is the held-out loss at the end?
- How much of the weight decay is applied? Now and then a step is taken twice, by a copy without decay too, with the
  same gradients and the same rounding noise: their difference, projected onto the weights, over lr * weight_decay.
- What share of the weights can an update not move (`stalled_fraction`)?
"""

import argparse
import contextlib
import copy
import json
import math
import platform
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn
from tqdm import tqdm

from benchmarks.lm.data import ByteDataset, load_text
from benchmarks.lm.machine import machine
from benchmarks.lm.optimizers import bytes_per_parameter
from benchmarks.lm.trainer import Settings, Trainer
from lowbit_optim import Lion8bit

FORMATS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "nearest": {"stochastic_rounding": False},
    "stochastic": {},
    "24": {"master_weight_bits": 24, "stochastic_rounding": False},
    "24, stochastic": {"master_weight_bits": 24},
    "32": {"master_weight_bits": 32},
}


@dataclass(frozen=True)
class Size:
    """How much is run.

    Args:
        model, batch_size, seq_len, eval_sequences: see `Settings`.
        pretrain_steps: in fp32, at the model's own learning rate.
        steps, lr, weight_decay: of training on.
        probe_every: steps between those that are taken twice.
    """

    model: str
    batch_size: int
    seq_len: int
    pretrain_steps: int
    steps: int = 2000
    lr: float = 1e-5
    weight_decay: float = 0.1
    probe_every: int = 20
    eval_sequences: int = 1024


SIZES = {
    "quick": Size("tiny", 2, 16, pretrain_steps=4, steps=6, probe_every=3, eval_sequences=4),
    "cpu": Size("tiny", 8, 64, pretrain_steps=500),
    "cuda": Size("30m", 32, 256, pretrain_steps=1000),
}


# --- Measuring ------------------------------------------------------------------------------------------------------


class DecayProbe:
    """How much of the weight decay that a step should apply it does: 1 is all of it.

    Made before the step, with the gradients in place; :meth:`share` is for after it.
    """

    def __init__(self, model: nn.Module, optimizer: Lion8bit) -> None:
        self._model, self._optimizer = model, optimizer
        self._before = weights(model, optimizer)
        twin, twin_optimizer = copy.deepcopy((model, optimizer))
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            q.grad = p.grad  # which deepcopy leaves out
        for group in twin_optimizer.param_groups:
            group["weight_decay"] = 0.0
        twin_optimizer.step()
        self._without_decay = weights(twin, twin_optimizer)

    def share(self) -> float:
        after = weights(self._model, self._optimizer)
        applied = due = 0.0
        for name, decay in decays(self._model, self._optimizer).items():
            before = self._before[name]
            applied += (before * (self._without_decay[name] - after[name])).sum().item()
            due += decay * before.square().sum().item()
        return applied / due


def weights(model: nn.Module, optimizer: Lion8bit) -> dict[str, Tensor]:
    """All that is kept of them, float64, by name."""
    state = optimizer.fp32_state_dict(model)
    return {name: state[name].double() for name, _ in model.named_parameters()}


def decays(model: nn.Module, optimizer: Lion8bit) -> dict[str, float]:
    """The share of itself that each parameter loses in the next step, by name."""
    names = {id(p): name for name, p in model.named_parameters()}
    return {
        names[id(p)]: float(group["lr"]) * group["weight_decay"]
        for group in optimizer.param_groups
        for p in group["params"]
        if group["weight_decay"]
    }


# --- Training -------------------------------------------------------------------------------------------------------


def pretrained(size: Size, dataset: ByteDataset, device: torch.device) -> dict[str, Tensor]:
    """Weights to start from, fp32 with the values of bf16."""
    trainer = Trainer(settings_of(size, "fp32", steps=size.pretrain_steps), dataset, device)
    for _ in tqdm(range(size.pretrain_steps), desc="fp32, from nothing", leave=False):
        trainer.train_step()
    return {name: value.bfloat16().float() for name, value in trainer.model.state_dict().items()}


def settings_of(size: Size, name: str, **options: Any) -> Settings:
    return Settings(
        model=size.model,
        batch_size=size.batch_size,
        seq_len=size.seq_len,
        eval_sequences=size.eval_sequences,
        dtype="amp_bf16" if name == "fp32" else "bf16",
        **FORMATS[name],
        **options,
    )


def train_on(
    name: str, size: Size, start: dict[str, Tensor], dataset: ByteDataset, device: torch.device
) -> dict[str, Any]:
    """Figures of one format."""
    options = {"steps": size.steps, "lr": size.lr, "weight_decay": size.weight_decay}
    trainer = Trainer(settings_of(size, name, schedule="constant", warmup=0, **options), dataset, device)
    trainer.model.load_state_dict(start)
    shares: list[float] = []
    for step in tqdm(range(size.steps), desc=name, leave=False):
        with probing(trainer, shares) if step % size.probe_every == 0 else contextlib.nullcontext():
            trainer.train_step()
    return {
        "held_out_loss": trainer.held_out_loss(),
        "decay_applied": statistics.fmean(shares),
        "decay_standard_error": statistics.stdev(shares) / math.sqrt(len(shares)),
        "stalled_fraction": trainer.optimizer.stalled_fraction(),
        "optimizer_bytes_per_parameter": bytes_per_parameter(trainer.optimizer),
    }


@contextlib.contextmanager
def probing(trainer: Trainer, shares: list[float]) -> Iterator[None]:
    """Around a training step: appends the share of its decay that was applied."""
    probes: list[DecayProbe] = []
    hook = trainer.optimizer.register_step_pre_hook(
        lambda optimizer, args, kwargs: probes.append(DecayProbe(trainer.model, optimizer))
    )
    try:
        yield
    finally:
        hook.remove()
    shares.append(probes[0].share())


# --- Report ---------------------------------------------------------------------------------------------------------


def table(figures: dict[str, dict[str, Any]]) -> str:
    reference = figures["fp32"]["held_out_loss"]
    rows = [
        [
            name,
            f"{each['held_out_loss']:.4f}",
            f"{each['held_out_loss'] - reference:+.4f}",
            f"{100 * each['decay_applied']:.1f} ± {100 * each['decay_standard_error']:.1f}",
            f"{100 * each['stalled_fraction']:.1f}",
            f"{each['optimizer_bytes_per_parameter']:.2f}",
        ]
        for name, each in figures.items()
    ]
    headers = ["weights", "held-out loss", "less fp32", "decay applied %", "stalled %", "optimizer B/param"]
    return tabulate(rows, headers, disable_numparse=True, colalign=("left", *["right"] * (len(headers) - 1)))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--quick", action="store_true", help="seconds, to see that all works; saves nothing")
    parser.add_argument(
        "--formats", default=";".join(FORMATS), help="of these, apart by semicolons; default: %(default)s"
    )
    for name, value in asdict(SIZES["cpu"]).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), help="default: by device")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no GPU here; use --device cpu")
    unknown = set(args.formats.split(";")) - set(FORMATS)
    if unknown or "fp32" not in args.formats.split(";"):
        parser.error(f"--formats {args.formats!r}: choose from {'; '.join(FORMATS)}, fp32 among them")
    return args


def main() -> None:
    args = arguments()
    given = {name: getattr(args, name) for name in asdict(SIZES["cpu"]) if getattr(args, name) is not None}
    size = replace(SIZES["quick" if args.quick else args.device], **given)
    device = torch.device(args.device)
    dataset = ByteDataset.from_text(load_text())
    start = pretrained(size, dataset, device)
    figures = {}
    for name in args.formats.split(";"):
        figures[name] = train_on(name, size, start, dataset, device)
        if not args.quick:
            save(figures, size, args.device)
    print(table(figures))


def save(figures: dict[str, dict[str, Any]], size: Size, device: str) -> None:
    report = {
        "machine": machine(device),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "size": asdict(size),
        "formats": figures,
    }
    results = Path(__file__).parent / "results" / f"weight_formats_{device}.json"
    results.parent.mkdir(exist_ok=True)
    results.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
