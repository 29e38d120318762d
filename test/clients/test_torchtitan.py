"""torchtitan: its container of optimizers, with its schedulers and checkpoints, under FSDP2 and on another mesh."""

from pathlib import Path
from typing import Any

import processes
import pytest
import torch
import torch.distributed as dist
from comparing import differences, example, quantized, snapshot
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lowbit_optim import Lion8bit

pytest.importorskip("torchtitan.components.optimizer", exc_type=ImportError)

from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

shown = example("torchtitan_container")
make_model, run = shown["make_model"], shown["run"]


def result(model: Any, optimizers: Any) -> list[dict[str, Any]]:
    return [snapshot(model, optimizer) for optimizer in optimizers]


def check_resumed_run(make: Any, folder: Path) -> Any:
    model = make()
    optimizers = run(model, str(folder))
    resumed = make()
    resumed_optimizers = run(resumed, str(folder), first=4)
    for a, b in zip(result(model, optimizers), result(resumed, resumed_optimizers), strict=True):
        assert differences(a, b) == []
    return optimizers


def test_a_resumed_run_equals_one_that_never_stopped(tmp_path: Path) -> None:
    """Reports 28 and 85: low-bit state in torchtitan, and on through a checkpoint."""
    lion, lion8bit = check_resumed_run(make_model, tmp_path)
    assert quantized(lion) == [False]
    assert quantized(lion8bit) == [False, False, True, True]
    assert lion8bit.param_groups[1]["param_names"] == ["mlp.weight", "head.weight"]
    assert [int(group["step"]) for group in lion8bit.param_groups] == [8, 8]


def test_master_weights_are_in_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(shown["DECAYING"], "master_weight_bits", 24)
    _, lion8bit = check_resumed_run(lambda: make_model().bfloat16(), tmp_path)
    assert ["master_residual" in state for state in lion8bit.state.values()] == [False, False, True, True]


def train_sharded(folder: Path) -> None:
    dist.init_process_group("gloo")
    optimizers = check_resumed_run(lambda: fully_shard(make_model()), folder)
    assert all(isinstance(p, DTensor) for optimizer in optimizers for p in optimizer.state)


def test_a_checkpoint_of_two_ranks_is_gone_on_with_on_one(tmp_path: Path) -> None:
    """Reports 1, 11 and 30: from one number of ranks to another, through a wrapper that asks for the state first."""
    processes.run(train_sharded, tmp_path / "two")
    model = make_model()
    optimizers = run(model, str(tmp_path / "two"), first=4)
    expected_model = make_model()
    expected = run(expected_model, str(tmp_path / "one"))
    # every rank had the same batch, so two ranks train as one does
    for a, b in zip(result(expected_model, expected), result(model, optimizers), strict=True):
        assert differences(a, b) == []


def test_what_is_compared_depends_on_the_optimizer_that_was_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, resumed = make_model(), make_model()
    expected = result(model, run(model, str(tmp_path)))
    monkeypatch.setattr(OptimizersContainer, "load_state_dict", lambda self, state_dict: None)
    forgotten = result(resumed, run(resumed, str(tmp_path), first=4))
    assert any(differences(a, b) for a, b in zip(expected, forgotten, strict=True))


def test_the_options_that_torchtitan_puts_into_groups_are_refused_by_name() -> None:
    """Report 85: ``foreach`` is no option of this optimizer, and ``fused`` none of a group."""

    class Unchanged(OptimizersContainer):
        _resolve_optimizer_factory = staticmethod(lambda name: Lion8bit)

    groups = [ParamGroupConfig(pattern=".*", optimizer_name="Lion8bit", optimizer_kwargs={"lr": 1e-3})]
    with pytest.raises(ValueError, match="fused holds for the whole optimizer"):
        Unchanged(OptimizersContainer.Config(param_groups=groups), model_parts=[make_model()])
    with pytest.raises(ValueError, match="foreach=False in a parameter group"):
        Lion8bit([{"params": [torch.zeros(4, requires_grad=True)], "foreach": False}])


def test_state_is_made_before_the_first_step_without_one_being_taken() -> None:
    """Report 30: a wrapper whose ``state_dict`` is called before anything has been loaded."""
    model = make_model()
    before = {name: p.clone() for name, p in model.named_parameters()}
    optimizers = shown["LionContainer"].Config(param_groups=shown["GROUPS"]).build(model_parts=[model])
    saved = optimizers.state_dict()
    momenta = {key: value for key, value in saved.items() if ".exp_avg" in key}
    assert {key.rpartition(".")[2] for key in momenta} == {"exp_avg", "codes", "scale"}
    assert not any(value.any() for key, value in momenta.items() if isinstance(value, Tensor) and "scale" not in key)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert {int(group["step"]) for optimizer in optimizers for group in optimizer.param_groups} == {0}


def test_options_of_the_whole_optimizer_are_passed_by_its_name() -> None:
    options = {"Lion8bit": {"fused": False, "seed": 3}}
    config = shown["LionContainer"].Config(param_groups=shown["GROUPS"], optimizer_factory_kwargs_by_name=options)
    lion, lion8bit = config.build(model_parts=[make_model()])
    assert (lion8bit.defaults["fused"], lion8bit.defaults["seed"]) == (False, 3)
    assert (lion.defaults["fused"], lion.defaults["seed"]) == (None, 0)
