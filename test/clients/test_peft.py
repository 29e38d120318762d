"""PEFT: LoRA and DoRA adapters, LoRA+ groups, alone and in the Trainer."""

from pathlib import Path
from typing import Any

import pytest
import torch
from comparing import differences, example, quantized, snapshot
from torch import nn

from lowbit_optim import Lion8bit

peft = pytest.importorskip("peft")
pytest.importorskip("transformers")

shown = example("peft_lora")
make_base, make_optimizer, train = shown["make_base"], shown["make_optimizer"], shown["train"]

CONFIGS: dict[str, Any] = {
    "LoRA": {"r": 16, "target_modules": "all-linear"},
    "LoRA of a small rank": {"r": 4, "target_modules": ["q_proj", "v_proj"]},
    "DoRA": {"r": 16, "target_modules": ["q_proj", "v_proj"], "use_dora": True},
    "a head beside it": {"r": 16, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def make(config: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    return peft.get_peft_model(make_base(dtype), peft.LoraConfig(**CONFIGS[config]), autocast_adapter_dtype=False)


def resume(folder: Path, dtype: torch.dtype) -> nn.Module:
    return peft.PeftModel.from_pretrained(make_base(dtype), folder, is_trainable=True, autocast_adapter_dtype=False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("config", CONFIGS)
def test_a_resumed_run_equals_one_that_never_stopped(config: str, dtype: str, tmp_path: Path) -> None:
    model = make(config, DTYPES[dtype])
    optimizer = make_optimizer(model)
    train(model, optimizer, range(3))
    model.save_pretrained(tmp_path)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    train(model, optimizer, range(3, 6))
    assert any(quantized(optimizer)) == (config != "LoRA of a small rank")

    resumed = resume(tmp_path, DTYPES[dtype])
    resumed_optimizer = make_optimizer(resumed)
    resumed_optimizer.load_state_dict(torch.load(tmp_path / "optimizer.pt"))
    train(resumed, resumed_optimizer, range(3, 6))
    assert differences(snapshot(resumed, resumed_optimizer), snapshot(model, optimizer)) == []


def test_the_frozen_model_stays_and_costs_no_state() -> None:
    """Report 77: parameters without gradients, in the optimizer all the same."""
    model = make("LoRA")
    optimizer = Lion8bit(model.parameters(), lr=1e-3)
    before = {name: p.clone() for name, p in model.named_parameters()}
    train(model, optimizer, range(2))
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name, p in model.named_parameters() if "lora_" in name}
    assert len(optimizer.state) == len(moved)


def test_adapters_that_are_not_trained_any_more_are_named() -> None:
    """Report 31: "parameter group doesn't match the size", after some parameters came back frozen."""
    model = make("LoRA")
    optimizer = make_optimizer(model)
    train(model, optimizer, range(1))
    saved = optimizer.state_dict()
    for name, p in model.named_parameters():
        p.requires_grad_(p.requires_grad and "q_proj" not in name)
    with pytest.raises(ValueError, match=r"Only in the checkpoint: .*q_proj\.lora_A"):
        make_optimizer(model).load_state_dict(saved)


def test_lora_plus_makes_the_groups_of_any_optimizer_class() -> None:
    """Report 48: groups with learning rates of their own, one of them empty."""
    from peft.optimizers import create_loraplus_optimizer

    model = make("LoRA")
    optimizer = create_loraplus_optimizer(model, Lion8bit, lr=1e-4, loraplus_lr_ratio=16, weight_decay=0.1)
    before = {name: p.clone() for name, p in model.named_parameters()}
    train(model, optimizer, range(1))
    for name, p in model.named_parameters():
        steps = (p - before[name]).abs()
        if "lora_B" in name:  # zero before, so a step is the learning rate itself
            assert set(steps.flatten().tolist()) <= {0.0, torch.tensor(1e-4 * 16).item()}
            assert steps.any()
    assert any(quantized(optimizer))


def test_the_trainer_resumes_adapters(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    make_trainer = example("hf_trainer")["make_trainer"]

    def run(checkpoint: str | None = None) -> dict[str, Any]:
        trainer = make_trainer(str(tmp_path), use_cpu=True, disable_tqdm=True)
        torch.manual_seed(0)
        trainer.model = trainer.model_wrapped = peft.get_peft_model(trainer.model, peft.LoraConfig(**CONFIGS["LoRA"]))
        trainer.train(resume_from_checkpoint=checkpoint)
        return snapshot(trainer.model, trainer.optimizer)

    expected = run()
    assert differences(run(str(tmp_path / "checkpoint-4")), expected) == []
