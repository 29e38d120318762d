"""PyTorch Lightning: automatic and manual optimisation, precision plugins, checkpoints."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
from comparing import differences, example, quantized, snapshot
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lowbit_optim import Lion8bit, gradient_release

lightning = pytest.importorskip("lightning")

from lightning.pytorch.plugins import MixedPrecision  # noqa: E402
from lightning.pytorch.strategies import ModelParallelStrategy  # noqa: E402

shown = example("lightning_module")
Regressor = shown["Regressor"]
MODES = {"automatic": True, "manual": False}


def fp16() -> dict[str, Any]:
    """What ``precision="16-mixed"`` is on a GPU. On a CPU Lightning takes bf16 instead."""
    return {"plugins": MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))}


PRECISIONS: dict[str, Any] = {
    "32-true": lambda: {"precision": "32-true"},
    "bf16-mixed": lambda: {"precision": "bf16-mixed"},
    "bf16-true": lambda: {"precision": "bf16-true"},
    "16-true": lambda: {"precision": "16-true"},
    "16-mixed": fp16,
}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)


def fit(model: Any, epochs: int, checkpoint: Path | None = None, **options: Any) -> Any:
    shown_nothing = {"enable_progress_bar": False, "enable_model_summary": False}
    path = None if checkpoint is None else str(checkpoint)
    return shown["fit"](model, epochs, path, accelerator="cpu", **shown_nothing, **options)


def result(trainer: Any) -> dict[str, Any]:
    return snapshot(trainer.lightning_module, trainer.optimizers[0])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("mode", MODES)
def test_a_resumed_run_equals_one_that_never_stopped(mode: str, precision: str, tmp_path: Path) -> None:
    """Reports 2 and 4: saving failed in Lightning, and resuming with bf16 parameters."""
    automatic, options = MODES[mode], PRECISIONS[precision]
    expected = fit(Regressor(automatic), 2, **options())
    assert all(quantized(expected.optimizers[0])[::2])  # weights and biases take turns
    fit(Regressor(automatic), 1, **options()).save_checkpoint(tmp_path / "half.ckpt")
    resumed = fit(Regressor(automatic), 2, tmp_path / "half.ckpt", **options())
    assert differences(result(resumed), result(expected)) == []


def test_what_is_compared_depends_on_the_optimizer_that_was_saved(tmp_path: Path) -> None:
    expected = fit(Regressor(), 2)
    fit(Regressor(), 1).save_checkpoint(tmp_path / "half.ckpt")
    saved = torch.load(tmp_path / "half.ckpt")
    for state in saved["optimizer_states"][0]["state"].values():
        momentum = state["exp_avg"]
        (momentum if isinstance(momentum, Tensor) else momentum["codes"]).zero_()
    torch.save(saved, tmp_path / "half.ckpt")
    resumed = fit(Regressor(), 2, tmp_path / "half.ckpt")
    assert differences(result(resumed), result(expected))


def test_manual_optimisation_equals_automatic() -> None:
    automatic, manual = (result(fit(Regressor(mode), 2)) for mode in MODES.values())
    assert differences(automatic, manual) == []


def test_accumulated_batches_are_one_step() -> None:
    trainer = fit(Regressor(), 2, accumulate_grad_batches=2, gradient_clip_val=0.1)
    assert int(trainer.optimizers[0].param_groups[0]["step"]) == 4


class WithBits(Regressor):
    def configure_optimizers(self) -> Lion8bit:
        return Lion8bit(self.parameters(), lr=1e-3, master_weight_bits=24)


@pytest.mark.filterwarnings("ignore")
def test_master_weights_are_in_the_checkpoint(tmp_path: Path) -> None:
    expected = fit(WithBits(), 2, precision="bf16-true")
    fit(WithBits(), 1, precision="bf16-true").save_checkpoint(tmp_path / "half.ckpt")
    resumed = fit(WithBits(), 2, tmp_path / "half.ckpt", precision="bf16-true")
    assert any("master_residual" in name for name in result(expected))
    assert differences(result(resumed), result(expected)) == []


class Released(Regressor):
    def configure_optimizers(self) -> dict[str, Any]:
        configured = super().configure_optimizers()
        gradient_release(self, configured["optimizer"])
        return configured


@pytest.mark.usefixtures("released_at_once")
@pytest.mark.parametrize("mode", MODES)
def test_gradients_can_be_released(mode: str) -> None:
    released, kept = (result(fit(cls(MODES[mode]), 2)) for cls in (Released, Regressor))
    assert differences(released, kept) == []


class TakesTurns(lightning.LightningModule):
    """Two optimizers, one of them toggled off at a time, as for a GAN."""

    def __init__(self) -> None:
        super().__init__()
        lightning.seed_everything(0, verbose=False)
        self.automatic_optimization = False
        self.first, self.second = torch.nn.Linear(64, 128), torch.nn.Linear(128, 64)

    def training_step(self, batch: list[Tensor], index: int) -> None:
        x, y = batch
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward((self.second(self.first(x)) - y).square().mean())
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> list[Lion8bit]:
        return [Lion8bit(layer.parameters(), lr=1e-3) for layer in (self.first, self.second)]


@pytest.mark.filterwarnings("ignore")
def test_two_optimizers_that_are_toggled_resume(tmp_path: Path) -> None:
    expected = fit(TakesTurns(), 2)
    fit(TakesTurns(), 1).save_checkpoint(tmp_path / "half.ckpt")
    resumed = fit(TakesTurns(), 2, tmp_path / "half.ckpt")
    for a, b in zip(expected.optimizers, resumed.optimizers, strict=True):
        assert differences(snapshot(expected.model, a), snapshot(resumed.model, b)) == []
        assert quantized(a) == [True, False]


def test_clipping_beside_the_fused_step_in_fp16_is_refused_by_lightning(monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot clip where the step itself divides by the scale, as that of ``torch.optim.AdamW(fused=True)`` does."""
    monkeypatch.setattr(Lion8bit, "_step_supports_amp_scaling", True)
    with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
        fit(Regressor(), 1, gradient_clip_val=0.1, **fp16())


# --- FSDP2 ----------------------------------------------------------------------------------------------------------


class Sharded(Regressor):
    def configure_model(self) -> None:
        for module in (self.layers[0], self.layers[2], self):
            fully_shard(module, mesh=self.device_mesh["data_parallel"])


def check_sharded_runs(folder: Path) -> None:
    for save_distributed_checkpoint in (True, False):
        check_sharded_run(save_distributed_checkpoint, folder / f"{save_distributed_checkpoint}.ckpt")


def check_sharded_run(save_distributed_checkpoint: bool, path: Path) -> None:
    def run(epochs: int, checkpoint: Path | None = None) -> Any:
        strategy = ModelParallelStrategy(processes.RANKS, 1, save_distributed_checkpoint)
        return fit(Sharded(), epochs, checkpoint, devices=processes.RANKS, strategy=strategy)

    expected = run(2)
    assert all(isinstance(p, DTensor) for p in expected.lightning_module.parameters())
    assert quantized(expected.optimizers[0]) == [True, False, True, False]
    run(1).save_checkpoint(path)
    resumed = run(2, path)
    assert differences(result(resumed), result(expected)) == []


def test_fsdp2_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    """Report 2: saving an 8-bit optimizer crashed under FSDP in Lightning."""
    processes.run(check_sharded_runs, tmp_path)


# --- Fabric ---------------------------------------------------------------------------------------------------------


def test_fabric_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    from lightning.fabric import Fabric

    def train(fabric: Fabric, model: Any, optimizer: Any, steps: range) -> dict[str, Any]:
        for step in steps:
            x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step))
            fabric.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        return snapshot(model.module, optimizer.optimizer)

    def start() -> tuple[Fabric, Any, Any]:
        fabric = Fabric(accelerator="cpu", precision="bf16-true")
        model = Regressor().layers
        return fabric, *fabric.setup(model, Lion8bit(model.parameters(), lr=1e-3))

    fabric, model, optimizer = start()
    train(fabric, model, optimizer, range(3))
    fabric.save(tmp_path / "half.ckpt", {"model": model, "optimizer": optimizer})
    expected = train(fabric, model, optimizer, range(3, 6))
    fabric, model, optimizer = start()
    fabric.load(tmp_path / "half.ckpt", {"model": model, "optimizer": optimizer})
    assert differences(train(fabric, model, optimizer, range(3, 6)), expected) == []
