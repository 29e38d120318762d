"""Counts are held to published or hand-worked numbers; clocks only to what must hold on any machine."""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import step_time
from benchmarks.lm import UsageError
from benchmarks.steps import measure, report
from benchmarks.steps.shapes import SHAPE_SETS, scaled
from lowbit_optim import Lion8bit

# torchvision's resnet50 has 25,557,032 parameters and Llama 3 8B has 8,030,261,248.
SIZES = {
    "single": (1, 268_435_456),
    "llama1b": (147, 1_498_482_688),
    "llama8b": (291, 8_030_261_248),
    "vit_l": (291, 24 * (12 * 1024**2 + 13 * 1024) + 1024 * 768 + 2 * 1024),
    "resnet50": (161, 25_557_032),
    "moe": (47, 4 * (64 * 3 * 2048 * 1024 + 4 * 2048**2 + 64 * 2048 + 4 * 2048) + 2 * 50304 * 2048 + 2048),
    "lora": (448, 32 * 16 * (2 * 8192 + 2 * 5120 + 3 * 18432)),
    "small500": (500, 100 * (1000 + 32 * 27 + 64 * 64 + 4096 + 256 * 18)),
}


def test_shape_sets_have_the_sizes_of_their_models() -> None:
    assert {name: (len(make()), sum(map(math.prod, make()))) for name, make in SHAPE_SETS.items()} == SIZES


def test_scaled_keeps_tensors_and_small_dimensions() -> None:
    assert scaled([(4096, 1024), (64, 3, 7, 7), (16, 160), (1000,)], 16) == [(256, 64), (16, 3, 7, 7), (16, 16), (62,)]


# --- Bytes -----------------------------------------------------------------------------------------------------------


def with_gradient(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    p = torch.randn(shape).to(dtype).requires_grad_()
    p.grad = torch.randn_like(p)
    return p


@pytest.mark.parametrize(("dtype", "weight_bytes"), [(torch.bfloat16, 2), (torch.float32, 4)])
def test_moved_bytes_of_8_bit_lion(dtype: torch.dtype, weight_bytes: int) -> None:
    p = torch.randn(128, 640).to(dtype).requires_grad_()
    optimizer = Lion8bit([p])
    optimizer.step()  # without a gradient: only makes the state
    p.grad = torch.randn_like(p)
    # an element: weight read and written, gradient read, code read and written; and so a bf16 scale for 64 of them
    assert measure.moved_bytes(optimizer) == 128 * 640 * (3 * weight_bytes + 2 * 1) + 128 * 10 * (2 * 2)


def test_moved_bytes_of_adamw() -> None:
    optimizer = torch.optim.AdamW([with_gradient((100, 30), torch.bfloat16)])
    optimizer.step()
    assert measure.moved_bytes(optimizer) == 3000 * (2 + 2 + 2 + 2 * (2 + 2)) + 2 * 4  # and a float32 step count


def test_trace_counts_what_ran_on_the_gpu_once() -> None:
    events: list[dict[str, Any]] = [
        {"cat": "kernel", "name": "update", "dur": 40.5},
        {"cat": "kernel", "name": "update", "dur": 9.5},
        {"cat": "gpu_memcpy", "name": "Memcpy HtoD", "dur": 2},
        {"cat": "gpu_user_annotation", "name": "Optimizer.step#Lion8bit.step", "dur": 60},
        {"cat": "cpu_op", "name": "aten::mul", "dur": 300},
        {"name": "process_name", "ph": "M"},
    ]
    assert measure.read_trace(events) == {"gpu_busy_ms": 0.052, "kernels": 2}


# --- Measuring -------------------------------------------------------------------------------------------------------


def test_fresh_gradients_have_other_addresses() -> None:
    parameters = [with_gradient((64, 64), torch.float32) for _ in range(5)]
    before = [p.grad.data_ptr() for p in parameters]
    measure._renew_gradients(parameters)
    assert all(p.grad.data_ptr() != address for p, address in zip(parameters, before, strict=True))


def test_crash_and_error_become_values() -> None:
    assert "crashed" in measure.run_isolated(os._exit, 3)["error"]
    assert measure.run_isolated(math.sqrt, -1.0)["error"].startswith("ValueError: ")


def test_cpu_run_writes_results_and_a_failing_optimizer_is_a_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "results" / "steps.json"
    options = ["--device", "cpu", "--scale", "64", "--sets", "lora", "--out", str(out), "--plot"]
    options += ["--rounding", "on"]
    assert step_time.main([*options, "--optimizers", "lion_pytorch.Lion(lr=-1.0),torch.AdamW,torchao.AdamW8bit"]) == 0

    results = json.loads(out.read_text())
    failed, measured, left_out = results["rows"]
    assert "error" in failed
    assert "minutes" in left_out["error"]
    assert (measured["tensors"], measured["dtype"], measured["optimizer"]) == (448, "bf16", "torch.AdamW")
    floor_ms = 1e3 * measured["moved_bytes"] / results["copy_bytes_per_s"]
    assert measured["percent_of_copy"] == pytest.approx(100 * floor_ms / measured["step_ms"])
    low, high = measured["step_ms_quartiles"]
    assert 0 < low <= measured["step_ms"] <= high
    assert out.with_suffix(".png").stat().st_size > 1000

    printed = capsys.readouterr().out
    assert "lora: 448 tensors" in printed
    assert failed["error"] in printed
    assert step_time.main(["--show", str(out)]) == 0
    assert capsys.readouterr().out == printed


def test_ratios_are_to_the_first_row_of_a_table() -> None:
    common = {"shape_set": "lora", "dtype": "bf16", "fresh_grads": False, "scale": 1, "options": {}, "optimizer": "a"}
    rows = [common | {"step_ms": 2.0}, common | {"step_ms": 7.0}, common | {"dtype": "fp32", "step_ms": 50.0}]
    ratios = [line.split()[-1] for line in report.table(rows).splitlines() if line.startswith("a ")]
    assert ratios == ["1.00", "3.50", "1.00"]


# --- Choosing --------------------------------------------------------------------------------------------------------


def cases(*argv: str) -> list[measure.Case]:
    return step_time.make_cases(step_time.make_parser().parse_args(["--device", "cuda", *argv]))


def test_single_is_one_matrix_in_two_dtypes() -> None:
    rows = [(case.shape_set, case.dtype, case.rounding, case.options, case.scale) for case in cases("--single")]
    assert rows == [
        ("single", "bf16", True, {"stochastic_rounding": True}, 1),
        ("single", "bf16", False, {"stochastic_rounding": False}, 1),
        ("single", "fp32", None, {}, 1),
    ]


def test_optimizers_with_options() -> None:
    (case,) = cases("--sets", "vit_l", "--optimizers", "flashoptim.FlashLion(master_weight_bits=None, fused=True)")
    assert (case.optimizer, case.options) == ("flashoptim.FlashLion", {"master_weight_bits": None, "fused": True})
    assert report.label(vars(case)) == "flashoptim.FlashLion(master_weight_bits=None, fused=True)"


@pytest.mark.parametrize("text", ["adam", "lion8bit(", "lion8bit(1)", "lion8bit(seed=x)", "lion8bit(**{})", ""])
def test_unusable_optimizer_lists(text: str) -> None:
    with pytest.raises(UsageError, match=r"--optimizers|choose from"):
        step_time.parse_optimizers(text)
