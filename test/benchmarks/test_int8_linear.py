import json
from pathlib import Path

import pytest
import torch

from benchmarks import int8_linear
from benchmarks.int8 import matmuls
from benchmarks.int8.timing import attempt
from lowbit_optim.int8_training import matmul

ON_CPU = ["--device", "cpu", "--scale", "128"]


def test_writes_and_prints_each_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "results.json"
    assert int8_linear.main(["--parts", "matmul,quantisation,layer,lengths", "--out", str(out), *ON_CPU]) == 0
    parts = json.loads(out.read_text())["parts"]
    assert list(parts) == ["matmul", "quantisation", "layer", "lengths"]
    ours = [row for row in parts["matmul"] if row["matmul"].startswith("ours")]
    assert len(ours) == 2 * len(matmuls.SHAPES)
    assert all(row["exact"] for row in ours)
    assert all(row["ms"] > 0 for row in parts["layer"])
    printed = capsys.readouterr().out
    assert "## layer" in printed
    assert "× bf16" in printed


def test_crossover_measures_int8_however_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(matmul.smallest_products, "cpu", 1 << 60)
    with int8_linear.always_int8():
        assert matmul.smallest_product(torch.device("cpu")) == 0
    assert matmul.smallest_product(torch.device("cpu")) == 1 << 60


def test_an_inexact_result_is_seen() -> None:
    operands = matmuls.Operands((8, 16, 32), torch.device("cpu"))
    out = matmul.scaled_matmul(operands.a_int8, operands.b_int8, torch.float32)
    assert matmuls._is_exact(out, operands)
    out[3, 4] = torch.nextafter(out[3, 4], torch.tensor(torch.inf))
    assert not matmuls._is_exact(out, operands)


def test_the_best_candidate_is_good_for_all_shapes_of_its_class() -> None:
    key = ("sm90", "large", 2)
    rows = [
        {"m, n, k": shape, "class": key, "config": config, "ms": ms}
        for shape, config, ms in [(1, "a", 1.0), (2, "a", 2.0), (1, "b", 1.05), (2, "b", 1.0), (1, "c", 0.5)]
    ]
    rows.append({"m, n, k": 2, "class": key, "config": "c", "error": "out of resource"})
    (line,) = matmuls.best_lines(rows)
    assert line.startswith("('sm90', 'large', 2): b,")


def test_a_failure_is_one_line() -> None:
    assert attempt(lambda: 1 / 0) == {"error": "ZeroDivisionError: division by zero"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tune", "--device", "cpu"], "measure GPU kernels"),
        (["--parts", "crowded", "--device", "cpu"], "measure GPU kernels"),
        (["--parts", "all"], "'all' is not"),
    ],
)
def test_says_what_is_wrong(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        int8_linear.main(options)
    assert message in capsys.readouterr().err
