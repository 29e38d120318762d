"""Accelerate: ``prepare``, accumulation, mixed precision, ``save_state`` and ``load_state``; FSDP2 on two processes."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
from comparing import differences, example, quantized, snapshot
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR

from lowbit_optim import Lion8bit

accelerate = pytest.importorskip("accelerate")

shown = example("accelerate_fsdp2")
make_model, train = shown["make_model"], shown["train"]


def make_accelerator(**options: Any) -> Any:
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()
    return accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2, **options)


def shard_on_a_cpu_too(accelerator: Any, plugin: Any) -> None:
    """As Accelerate does on GPUs; on a CPU it leaves the plugin aside."""
    for state in (accelerator.state, accelerate.PartialState()):
        state.distributed_type = accelerate.DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin


@pytest.fixture(autouse=True)
def no_state_is_left() -> Iterator[None]:
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def prepared(
    dtype: torch.dtype = torch.float32, bits: int | None = None, plugin: Any = None, **options: Any
) -> tuple[Any, Any, Any]:
    accelerator = make_accelerator(fsdp_plugin=plugin, **options)
    if plugin is not None:
        shard_on_a_cpu_too(accelerator, plugin)
    model = make_model().to(dtype)
    optimizer = Lion8bit(model.named_parameters(), lr=1e-3, weight_decay=0.1, master_weight_bits=bits)
    return accelerator, *accelerator.prepare(model, optimizer)


# --- One process ----------------------------------------------------------------------------------------------------


def test_it_trains_as_a_plain_loop_does() -> None:
    accelerator, model, optimizer = prepared()
    train(accelerator, model, optimizer, range(3))

    plain = make_model()
    plain_optimizer = Lion8bit(plain.named_parameters(), lr=1e-3, weight_decay=0.1)
    for step in range(3):
        for half in range(2):
            x = torch.randn(4, 8, 64, generator=torch.Generator().manual_seed(100 * step + 10 * half))
            ((plain(x) - x).square().mean() / 2).backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
    assert differences(snapshot(model, optimizer), snapshot(plain, plain_optimizer)) == []
    assert any(quantized(optimizer))


@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
def test_a_fresh_run_goes_on_from_a_saved_state(mixed_precision: str, tmp_path: Path) -> None:
    """Reports 6 and 8: loading on another device failed, and under torch's ``weights_only`` default."""
    accelerator, model, optimizer = prepared(mixed_precision=mixed_precision)
    scheduler = accelerator.prepare(LambdaLR(optimizer.optimizer, lambda step: 1 / (1 + step)))
    train(accelerator, model, optimizer, range(2))
    scheduler.step()
    accelerator.save_state(tmp_path)
    train(accelerator, model, optimizer, range(2, 4))
    expected = snapshot(model, optimizer)

    accelerator, model, optimizer = prepared(mixed_precision=mixed_precision)
    scheduler = accelerator.prepare(LambdaLR(optimizer.optimizer, lambda step: 1 / (1 + step)))
    accelerator.load_state(tmp_path)
    assert optimizer.param_groups[0]["lr"] == 1e-3 / 2
    train(accelerator, model, optimizer, range(2, 4))
    assert differences(snapshot(model, optimizer), expected) == []


def test_the_scaler_of_fp16_skips_a_step_whose_gradients_are_not_finite() -> None:
    """Accelerate makes a scaler on GPUs alone, and gives it to its wrapper of the optimizer."""
    make_accelerator()
    model, plain = make_model(), make_model()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = accelerate.optimizer.AcceleratedOptimizer(Lion8bit(model.parameters(), lr=1e-3), scaler=scaler)
    plain_optimizer = Lion8bit(plain.parameters(), lr=1e-3)

    for step in range(4):
        x = torch.randn(4, 8, 64)
        scaler.scale(model(x).square().mean()).backward()
        if step == 2:
            next(model.parameters()).grad[0, 0] = torch.inf
        else:
            plain(x).square().mean().backward()
            plain_optimizer.step()
        optimizer.step()
        assert optimizer.step_was_skipped == (step == 2)
        optimizer.zero_grad()
        plain_optimizer.zero_grad()
    assert differences(snapshot(model, optimizer), snapshot(plain, plain_optimizer)) == []


# --- Two processes --------------------------------------------------------------------------------------------------


def check_goes_on(start: Callable[[], tuple[Any, Any, Any]], folder: Path) -> tuple[Any, Any]:
    """What was saved goes on as what was not stopped. Returns the accelerator and the optimizer that went on."""
    accelerator, model, optimizer = start()
    train(accelerator, model, optimizer, range(2))
    accelerator.save_state(folder)
    train(accelerator, model, optimizer, range(2, 4))
    expected = snapshot(model, optimizer)

    accelerator, model, optimizer = start()
    accelerator.load_state(folder)
    train(accelerator, model, optimizer, range(2, 4))
    assert differences(snapshot(model, optimizer), expected) == []
    return accelerator, optimizer


def check_replicas(folder: Path) -> None:
    accelerator, _ = check_goes_on(prepared, folder)
    assert (accelerator.distributed_type, accelerator.num_processes) == ("MULTI_CPU", processes.RANKS)


def test_replicas_go_on_from_a_saved_state(tmp_path: Path) -> None:
    """Report 8, with a copy of the model in each of two processes (DDP)."""
    processes.run(check_replicas, tmp_path)


# --- FSDP2 ----------------------------------------------------------------------------------------------------------


def check_sharded_runs(folder: Path) -> None:
    for dtype, bits in ((torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, 24)):
        for state_dict_type in ("SHARDED_STATE_DICT", "FULL_STATE_DICT"):
            check_sharded_run(dtype, bits, state_dict_type, folder / f"{dtype}-{bits}-{state_dict_type}")


def check_sharded_run(dtype: torch.dtype, bits: int | None, state_dict_type: str, folder: Path) -> None:
    def start() -> tuple[Any, Any, Any]:
        return prepared(dtype, bits, shown["make_plugin"](state_dict_type))

    accelerator, optimizer = check_goes_on(start, folder)
    assert accelerator.is_fsdp2
    assert accelerator.num_processes == processes.RANKS
    assert all(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"])
    assert any(quantized(optimizer))


def test_fsdp2_goes_on_from_a_saved_state(tmp_path: Path) -> None:
    """Reports 15 and 43: bf16 parameters, which ``prepare`` swaps for shards after the optimizer was built."""
    processes.run(check_sharded_runs, tmp_path)
