"""benchmarks/memory.py: what it says of a step, from what an allocator counts, and the formula beside it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from benchmarks import memory
from benchmarks.footprint import measure, report
from benchmarks.footprint.estimate import estimate, matrix_sizes, vector_elements
from benchmarks.footprint.measure import Case, Moment, split_at_peak
from benchmarks.lm.model import CONFIGS, GPT

TINY = ["--models", "tiny", "--seq-len", "32", "--timed-steps", "1", "--device", "cpu"]


@pytest.fixture(autouse=True)
def _eager():
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.mark.parametrize("released", [False, True])
def test_a_tiny_model_on_the_cpu(released: bool) -> None:
    """Weights, gradients and state are known exactly."""
    row = measure.measure_memory(Case("tiny", "lion8bit", "cpu", gradient_release=released, seq_len=32, timed_steps=1))
    model = GPT(CONFIGS["tiny"])
    n = sum(p.numel() for p in model.parameters())
    vectors = sum(p.numel() for p in model.parameters() if p.ndim < 2)
    assert row["parameters"] == n
    assert row["weights"] == 2 * n
    assert row["gradients"] == 2 * n if not released else 0 < row["gradients"] <= 2 * n / 16  # what waits for the step
    assert row["state_in_all"] == pytest.approx((n - vectors) * (1 + 2 / 64) + 4 * vectors)
    assert row["peak"] is None
    assert row["iteration_ms"] > row["step_ms"] > 0


def test_the_command_writes_rows_and_goes_on_after_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(function: object, case: Case) -> dict:
        if case.optimizer == "bnb.Lion8bit":
            return {"error": "no kernel"}
        parts = {"weights": 4, "state": 2, "gradients": 3, "activations": 1, "temporary": 0}
        return {**parts, "peak": 10, "reserved": 12, "phase": "backward", "iteration_ms": 2.0, "step_ms": 1.0}

    monkeypatch.setattr(memory, "run_isolated", run)
    out = tmp_path / "memory.json"
    chosen = "lion8bit(gradient_release=True,offload_state=True),bnb.Lion8bit,torch.AdamW"
    assert memory.main([*TINY, "--optimizers", chosen, "--out", str(out), "--plot"]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [row.get("error") for row in rows] == [None, "no kernel", None]
    assert (rows[0]["gradient_release"], rows[0]["options"]) == (True, {"offload_state": True})
    assert (tmp_path / "memory.png").stat().st_size > 0
    printed = capsys.readouterr().out
    assert "lion8bit(offload_state=True, gradient_release=True)" in printed
    assert memory.main(["--show", str(out)]) == 0
    assert capsys.readouterr().out == printed


def test_the_parts_of_the_highest_moment_add_up() -> None:
    moments = [Moment("backward", 500, 0), Moment("backward", 700, 250), Moment("step", 650, 300)]
    parts = split_at_peak(moments, weights=200, state=100)
    assert parts == {
        "state": 100,
        "gradients": 250,
        "activations": 150,
        "temporary": 0,
        "peak": 700,
        "phase": "backward",
    }
    parts = split_at_peak([*moments, Moment("step", 800, 300)], weights=200, state=100)
    assert (parts["gradients"], parts["activations"], parts["temporary"], parts["phase"]) == (300, 0, 200, "step")


def test_gradients_count_while_somebody_holds_them() -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 4, bias=False))
    held, seen = [], []
    gradients = measure._Gradients()

    def hold(p: Tensor) -> None:
        held.append(p.grad)
        p.grad = None

    def note(p: Tensor) -> None:
        gradients.add(p.grad)
        seen.append(p.shape)

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hold)
    with measure._on_arrival(list(model.parameters()), note):
        model(torch.randn(2, 8)).sum().backward()
    assert seen == [(4, 8), (8, 8)]  # ahead of the hooks that were there
    assert gradients.alive() == 4 * (32 + 64)
    held.pop()
    assert gradients.alive() == 4 * 32
    held.clear()
    assert gradients.alive() == 0
    model(torch.randn(2, 8)).sum().backward()
    assert len(seen) == 2


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_the_formula_counts_the_model(name: str) -> None:
    with torch.device("meta"):
        model = GPT(CONFIGS[name])
    matrices = [p.numel() for p in model.parameters() if p.ndim >= 2]
    assert sorted(matrix_sizes(CONFIGS[name])) == sorted(matrices)
    assert vector_elements(CONFIGS[name]) == sum(p.numel() for p in model.parameters() if p.ndim < 2)


@pytest.mark.parametrize(("name", "layers"), [("1b", 4), ("8b", 8)])
def test_the_formula_is_what_torchs_own_tracker_counts(name: str, layers: int) -> None:
    """Of forward and backward of the real sizes, with tensors that have no memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    config = replace(CONFIGS[name], layers=layers)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with FakeTensorMode():
            model = GPT(config)
            torch.set_default_dtype(torch.float32)
            model.checkpoint_activations = True
            tokens = torch.zeros(1, 2049, dtype=torch.int64)
            tracker = MemTracker()
            tracker.track_external(model)
            with tracker:
                model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
    finally:
        torch.set_default_dtype(torch.float32)
    counted = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    expected = estimate(config, 2048, "lion8bit")
    assert expected.peak - expected.state == pytest.approx(counted, rel=0.01)


def test_what_each_option_saves_in_the_formula() -> None:
    config = CONFIGS["8b"]
    n = sum(matrix_sizes(config)) + vector_elements(config)
    plain, released, offloaded, both = (
        estimate(config, 2048, "lion8bit", gradient_release=release, offload_state=offload)
        for release, offload in [(False, False), (True, False), (False, True), (True, True)]
    )
    assert plain.gradients == 2 * n
    assert released.peak < plain.peak - 12e9
    assert offloaded.peak < plain.peak - 7e9
    assert both.peak < released.peak - 7e9
    assert estimate(config, 2048, "lion8bit", master_weight_bits=32).peak == pytest.approx(plain.peak + 2 * n)


def test_an_unknown_model_and_results_that_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--models", "2b"], ["--show", str(tmp_path / "none.json")]):
        with pytest.raises(SystemExit):
            memory.main(arguments)
    errors = capsys.readouterr().err
    assert "no model is named '2b'; choose from" in errors
    assert "--show takes a results file" in errors


def test_labels_say_all_options() -> None:
    row = {"optimizer": "lion8bit", "options": {"offload_state": True}, "gradient_release": True}
    assert report.label(row) == "lion8bit(offload_state=True, gradient_release=True)"
