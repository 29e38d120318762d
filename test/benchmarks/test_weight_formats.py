"""The weight-format benchmark's figures: right where the answer is known."""

import math
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from benchmarks import weight_formats
from benchmarks.lm.data import ByteDataset
from benchmarks.lm.trainer import Trainer
from lowbit_optim import Lion8bit

CPU = torch.device("cpu")
SIZE = weight_formats.Size(
    "tiny", 2, 16, pretrain_steps=3, steps=4, lr=1e-5, weight_decay=0.1, probe_every=2, eval_sequences=4
)


@pytest.fixture(autouse=True)
def _eager() -> Iterator[None]:
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.fixture
def dataset() -> ByteDataset:
    return ByteDataset.from_text(b"some words of a text, over and over; " * 100)


def probed(bits: int | None, dtype: torch.dtype, applied: float, rounding: bool = True) -> float:
    """Of a step whose weight decay was 0.2, all but a share of which was taken from it."""
    torch.manual_seed(0)
    model = nn.Linear(256, 512, bias=False).to(dtype)
    optimizer = Lion8bit(model.parameters(), lr=1e-5, master_weight_bits=bits, stochastic_rounding=rounding)
    model.weight.grad = torch.randn(512, 256).to(dtype)
    group = optimizer.param_groups[0]
    group["weight_decay"] = 0.2
    probe = weight_formats.DecayProbe(model, optimizer)
    group["weight_decay"] = 0.2 * applied
    optimizer.step()
    group["weight_decay"] = 0.2
    return probe.share()


@pytest.mark.parametrize("applied", [0.0, 0.5, 1.0])
def test_a_probe_sees_what_was_applied(applied: float) -> None:
    assert probed(None, torch.float32, applied) == pytest.approx(applied, abs=0.02)
    assert probed(32, torch.bfloat16, applied) == pytest.approx(applied, abs=0.02)
    assert probed(24, torch.bfloat16, applied) == pytest.approx(applied, abs=0.1)


def test_a_probe_sees_what_rounding_takes() -> None:
    assert probed(None, torch.bfloat16, 1.0, rounding=False) < 0.1


def test_a_probe_changes_nothing(dataset: ByteDataset) -> None:
    """A run that is looked at in every step is the run that is not."""
    start = weight_formats.pretrained(SIZE, dataset, CPU)
    settings = weight_formats.settings_of(SIZE, "24, stochastic", steps=4, lr=1e-3)
    runs = []
    for probes in (True, False):
        trainer = Trainer(settings, dataset, CPU)
        trainer.model.load_state_dict(start)
        shares: list[float] = []
        for _ in range(4):
            if probes:
                with weight_formats.probing(trainer, shares):
                    trainer.train_step()
            else:
                trainer.train_step()
        assert len(shares) == 4 * probes
        runs.append(trainer.optimizer.fp32_state_dict(trainer.model))
    for name, value in runs[0].items():
        assert torch.equal(value, runs[1][name]), name


def test_every_format_starts_alike_and_has_its_figures(dataset: ByteDataset) -> None:
    start = weight_formats.pretrained(SIZE, dataset, CPU)
    assert all(torch.equal(value, value.bfloat16().float()) for value in start.values())
    figures = {name: weight_formats.train_on(name, SIZE, start, dataset, CPU) for name in weight_formats.FORMATS}
    losses = [each["held_out_loss"] for each in figures.values()]
    assert max(losses) - min(losses) < 0.1 < min(losses) < math.log(256)
    for name in ("fp32", "24, stochastic", "32"):
        assert figures[name]["decay_applied"] == pytest.approx(1, abs=0.02)
    assert figures["nearest"]["decay_applied"] < 0.1
    assert figures["nearest"]["stalled_fraction"] > 0.5 > 0 == figures["32"]["stalled_fraction"]
    assert [round(each["optimizer_bytes_per_parameter"]) for each in figures.values()] == [1, 1, 1, 2, 2, 3]
    lines = weight_formats.table(figures).splitlines()
    assert len(lines) == 2 + len(figures)
    assert lines[2].split()[:3] == ["fp32", f"{losses[0]:.4f}", "+0.0000"]
