"""Hugging Face Trainer: ``optimizer_cls_and_kwargs``, gradient accumulation, checkpoints, torch.compile."""

from pathlib import Path
from typing import Any

import pytest
import torch
from comparing import differences, example, quantized, snapshot
from torch import Tensor

from lowbit_optim import gradient_release

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

make_trainer = example("hf_trainer")["make_trainer"]

MODES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "autocast": {"bf16": True},
    "bf16 weights": {"dtype": torch.bfloat16},
    "bf16 weights, 24 bits": {"dtype": torch.bfloat16, "lion": {"master_weight_bits": 24}},
}


def make(folder: Path, lion: dict[str, Any] | None = None, **arguments: Any) -> Any:
    trainer = make_trainer(str(folder), use_cpu=True, disable_tqdm=True, **arguments)
    trainer.optimizer_cls_and_kwargs[1].update(lion or {})
    return trainer


def trained(trainer: Any, checkpoint: Path | None = None) -> dict[str, Any]:
    trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
    return snapshot(trainer.model, trainer.optimizer)


def loaded(checkpoint: Path) -> dict[str, Any]:
    return torch.load(checkpoint / "optimizer.pt")  # with weights_only, as the Trainer does


@pytest.mark.parametrize("mode", MODES)
def test_a_resumed_run_equals_one_that_never_stopped(mode: str, tmp_path: Path) -> None:
    """Reports 4 and 7: bf16 parameters, and ``weights_only`` loading."""
    expected = trained(make(tmp_path, **MODES[mode]))
    resumed = make(tmp_path, **MODES[mode])
    assert differences(trained(resumed, tmp_path / "checkpoint-4"), expected) == []
    assert any(quantized(resumed.optimizer))


def test_what_is_compared_depends_on_the_optimizer_that_was_saved(tmp_path: Path) -> None:
    expected = trained(make(tmp_path))
    (tmp_path / "checkpoint-4" / "optimizer.pt").unlink()
    assert differences(trained(make(tmp_path), tmp_path / "checkpoint-4"), expected)


@pytest.mark.compiler
def test_it_resumes_a_compiled_model_with_a_compiled_step(tmp_path: Path) -> None:
    """Report 5: a compiled 8-bit optimizer crashed in the Trainer."""
    with torch.compiler.set_stance("default"):
        expected = trained(make(tmp_path, torch_compile=True))
        resumed = trained(make(tmp_path, torch_compile=True), tmp_path / "checkpoint-4")
    assert differences(resumed, expected) == []


def test_accumulated_batches_are_one_step_and_the_schedule_is_followed(tmp_path: Path) -> None:
    """Reports 48 and 84: groups with a scheduler, whose learning rate is logged."""
    trainer = make(tmp_path)
    trainer.train()
    # 16 batches, two a step; the first step of the warm-up has a learning rate of 0 and does not count
    assert [int(group["step"]) for group in trainer.optimizer.param_groups] == [7, 7]
    assert [group["weight_decay"] for group in trainer.optimizer.param_groups] == [0.1, 0.0]
    decaying, other = (group["params"] for group in trainer.optimizer.param_groups)
    assert {p.ndim for p in decaying} == {2}
    assert {p.ndim for p in other} == {1}
    logged = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
    assert len(set(logged)) == len(logged) == 2
    assert all(0 < lr < 1e-3 for lr in logged)
    assert trainer.optimizer.param_groups[0]["initial_lr"] == 1e-3


def test_a_checkpoint_holds_codes(tmp_path: Path) -> None:
    """Report 28: low-bit state became fp32 on the way through a checkpoint."""
    trainer = make(tmp_path)
    trainer.train()
    saved = loaded(tmp_path / "checkpoint-8")
    momenta = [state["exp_avg"] for state in saved["state"].values()]
    as_codes = [not isinstance(momentum, Tensor) for momentum in momenta]
    assert as_codes == quantized(trainer.optimizer)
    assert {momentum["codes"].dtype for momentum in momenta if not isinstance(momentum, Tensor)} == {torch.int8}


def test_groups_of_ones_own_are_passed_as_params(tmp_path: Path) -> None:
    """Reports 62 and 63: an embedding in fp32."""
    trainer = make(tmp_path)
    named = dict(trainer.model.named_parameters())
    embedding = {name: p for name, p in named.items() if "embed_tokens" in name}
    assert len(embedding) == 1
    groups = [
        {"params": list(embedding.items()), "quantize": False},
        {"params": [(name, p) for name, p in named.items() if name not in embedding]},
    ]
    cls, options = trainer.optimizer_cls_and_kwargs
    trainer.optimizer_cls_and_kwargs = (cls, {**options, "params": groups})
    trainer.train()
    optimizer = trainer.optimizer.optimizer
    (p,) = embedding.values()
    assert isinstance(optimizer.state[p]["exp_avg"], Tensor)
    assert optimizer.state[p]["exp_avg"].dtype == torch.float32
    assert sum(quantized(optimizer)) >= 4
    assert optimizer.param_groups[0]["param_names"] == list(embedding)


@pytest.mark.usefixtures("released_at_once")
def test_gradients_can_be_released(tmp_path: Path) -> None:
    """Without clipping, which is the Trainer's default, and accumulation."""

    def run(release: bool) -> Any:
        trainer = make(tmp_path, max_grad_norm=0.0)
        trainer.args.gradient_accumulation_steps = 1
        trainer.create_optimizer()
        if release:
            gradient_release(trainer.model, trainer.optimizer)
        return trained(trainer)

    assert differences(run(release=True), run(release=False)) == []


# --- In the middle of a run -----------------------------------------------------------------------------------------


def switched(folder: Path, optim: str, callbacks: Any = ()) -> Any:
    """Trains to the end with one of the Trainer's own optimizers, then from its half with Lion8bit."""
    before = make(folder, optim=optim)
    before.optimizer_cls_and_kwargs = None
    before.train()
    after = make(folder)
    for callback in callbacks:
        after.add_callback(callback)
    after.train(resume_from_checkpoint=str(folder / "checkpoint-4"))
    return after


def test_it_goes_on_from_a_checkpoint_of_the_trainers_own_lion(tmp_path: Path) -> None:
    """``optim="lion_8bit"`` is bitsandbytes', which the Trainer gives Adam's betas."""
    pytest.importorskip("bitsandbytes")
    seen = []

    class NewBetas(transformers.TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any, **rest: Any) -> None:
            for group in optimizer.param_groups:
                seen.append((group["betas"], int(group["step"])))
                group["betas"] = (0.9, 0.99)

    optimizer = switched(tmp_path, "lion_8bit", [NewBetas]).optimizer
    assert seen == [((0.9, 0.999), 4)] * 2
    assert [group["betas"] for group in optimizer.param_groups] == [(0.9, 0.99)] * 2
    assert [int(group["step"]) for group in optimizer.param_groups] == [8, 8]
    assert any(quantized(optimizer))


def test_the_state_of_adamw_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="momentum of Adam and others is not Lion's"):
        switched(tmp_path, "adamw_torch")
