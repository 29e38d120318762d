"""benchmarks/seeds.py: runs are paired, done once, stopped in time, and told as they were."""

import json
import math
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import seeds
from benchmarks.gaps import report, texts, training
from benchmarks.gaps.interval import interval
from benchmarks.gaps.results import Results
from benchmarks.gaps.training import Run
from benchmarks.gaps.workers import Worker, execute
from benchmarks.lm import UsageError
from benchmarks.lm.data import ByteDataset
from benchmarks.lm.trainer import Settings, Trainer

CPU = torch.device("cpu")
TINY = {"model": "tiny", "layers": 1, "batch_size": 2, "seq_len": 8, "eval_sequences": 4}
STUDIES = {
    "lion": seeds.Study(
        "source",
        {"model": "30m", "layers": 1, "steps": 1000},
        {
            "lion": {"optimizer": "lion"},
            "lion8bit": {"optimizer": "lion8bit"},
            "FlashLion": {"optimizer": "flashoptim.FlashLion"},  # which does not run on a CPU
        },
    )
}
SIZE = seeds.SIZES["quick"]


def run(steps: int = 2, base: Run | None = None, **options) -> Run:
    return Run("source", Settings(**TINY, steps=steps, eval_every=1, **options).resolved(), base)


@pytest.fixture(scope="module", autouse=True)
def _eager() -> Iterator[None]:
    """Here and in the workers, which would compile for longer than they train."""
    with pytest.MonkeyPatch.context() as patch, torch.compiler.set_stance("force_eager"):
        patch.setenv("TORCHDYNAMO_DISABLE", "1")
        yield


@pytest.fixture(scope="module")
def dataset() -> ByteDataset:
    return ByteDataset.from_text(b"some words of a text, over and over; " * 100)


@pytest.fixture(scope="module")
def folder(dataset: ByteDataset, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """With that for a text."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(texts.TEXTS, "source", lambda: dataset)
        folder = tmp_path_factory.mktemp("texts")
        assert texts.prepare(["source"], folder)["source"]["tokens"] == 3700
        yield folder


@pytest.fixture(scope="module")
def workers() -> Iterator[list[Worker]]:
    with seeds.started(["cpu", "cpu"]) as workers:
        yield workers


def call(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(seeds, "STUDIES", STUDIES)
    monkeypatch.setattr(sys, "argv", ["seeds", "--quick", "--studies", "lion", *map(str, arguments)])
    seeds.main()


# --- The whole -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def results(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of one seed, then of two."""
    path = tmp_path_factory.mktemp("results") / "seeds.json"
    with pytest.MonkeyPatch.context() as patch:
        call(patch, "--jobs", 2, "--seeds", 1, "--results", path)
        first = json.loads(path.read_text())
        path.write_text(json.dumps({**first, "runs": [{**record, "commit": "first"} for record in first["runs"]]}))
        call(patch, "--jobs", 2, "--seeds", 2, "--results", path)
    return path


def test_what_is_done_is_not_done_again(results: Path) -> None:
    records = json.loads(results.read_text())["runs"]
    commits = {(each["settings"]["optimizer"], each["settings"]["seed"]): each["commit"] for each in records}
    assert len(records) == len(commits) == 6
    assert {run for run, commit in commits.items() if commit == "first"} == {("lion", 0), ("lion8bit", 0)}


def test_there_are_no_more_processes_than_runs_left(
    results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """FlashLion's two, which failed, are done again."""
    call(monkeypatch, "--jobs", 4, "--seeds", 2, "--results", shutil.copy(results, results.with_name("again.json")))
    assert "2 of 6 runs to do, 2 at a time\n" in capsys.readouterr().out


def test_runs_are_those_of_the_trainer_and_paired(
    results: Path, dataset: ByteDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seeds, "STUDIES", STUDIES)
    known = seeds.comparison("lion", SIZE, Results(results, {}))
    losses = {}
    for variant in ("lion", "lion8bit"):
        for seed in (0, 1):
            trainer = Trainer(seeds.run_of(STUDIES["lion"], variant, seed, SIZE).settings, dataset, CPU)
            train = [trainer.train_step().item() for _ in range(4)]
            losses[variant, seed] = trainer.held_out_loss()
            record = known.records[variant][seed]
            assert record["held_out"][-1] == [4, pytest.approx(losses[variant, seed], abs=1e-5)]
            assert record["train"] == pytest.approx(train, abs=1e-4)
    gaps = [losses["lion8bit", seed] - losses["lion", seed] for seed in (0, 1)]
    assert 0 < max(map(abs, gaps)) < 0.1
    assert known.gaps("lion8bit") == pytest.approx(gaps, abs=2e-5)


def test_what_failed_is_told_and_stops_nothing(
    results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    call(monkeypatch, "--show", "--results", results, "--docs", results.parent)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("|")[1:3] for line in lines if "lion8bit " in line] == [[" lion8bit  ", "       2 "]]
    assert "FlashLion, seed 0, 1: flashoptim.FlashLion runs on cuda only, not on cpu; leave it out" in lines


def test_show_draws_and_fills_in_the_page(results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "results.md"
    page.write_text("before\n\n<!-- lion -->\nold\n<!-- end of lion -->\n\n<!-- int8 -->\n<!-- end of int8 -->\n")
    for _ in range(2):
        call(monkeypatch, "--show", "--results", results, "--docs", tmp_path)
        text = page.read_text()
        assert text.startswith("before\n\n<!-- lion -->\n\n`tiny`, 4 steps of 32 bytes, ")
        assert text.endswith("(results_lion.png)\n\n<!-- end of lion -->\n\n<!-- int8 -->\n<!-- end of int8 -->\n")
        assert "old" not in text
        assert text.count("| lion8bit ") == 1
    picture = (tmp_path / "results_lion.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) < 150_000


def test_a_reference_alone_is_no_comparison(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    found = json.loads(results.read_text())
    alone = [record for record in found["runs"] if record["settings"]["optimizer"] == "lion"]
    path = tmp_path / "seeds.json"
    path.write_text(json.dumps({**found, "runs": alone}))
    call(monkeypatch, "--show", "--results", path, "--docs", tmp_path)
    assert capsys.readouterr().out == "\nlion: nothing to compare yet\n"
    assert list(tmp_path.iterdir()) == [path]


def test_show_needs_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    for given, reason in [
        (["--results", tmp_path / "none.json"], f"there is no {tmp_path / 'none.json'}"),
        ([], "a quick run saves nothing by default"),
    ]:
        with pytest.raises(SystemExit, match="2"):
            call(monkeypatch, "--show", *given)
        assert f"error: --show: {reason}; run without --show first, or give the --results" in capsys.readouterr().err


def test_losses_of_elsewhere_are_not_mixed_in(results: Path) -> None:
    Results(results, {"machine": json.loads(results.read_text())["machine"]})
    with pytest.raises(UsageError, match=r"has runs with torch .*, here it is 1.0: .* give another --results"):
        Results(results, {"torch": "1.0"})


# --- Workers ---------------------------------------------------------------------------------------------------------


def test_time_that_is_over_stops_what_runs(workers: list[Worker], folder: Path) -> None:
    short, long, other, later = run(), run(steps=10**7), run(steps=10**7, seed=1), run(seed=2)
    list(execute([run(seed=3), run(seed=4)], workers, folder))  # they have started
    begun = time.time()
    outcomes = dict(execute([short, long, other, later], workers, folder, deadline=begun + 2))
    assert list(outcomes) == [short]
    assert [step for step, _ in outcomes[short]["held_out"]] == [1, 2]
    assert time.time() - begun < 10
    assert list(dict(execute([later], workers, folder))) == [later]  # they are free again


def test_what_would_not_end_in_time_is_not_started(workers: list[Worker], folder: Path) -> None:
    known, unknown = run(), run(seed=1)
    expected = {known: 1000.0}
    outcomes = execute([known, unknown], workers, folder, time.time() + 100, lambda each: expected.get(each, 0.0))
    assert list(dict(outcomes)) == [unknown]


def test_expected_seconds_are_those_of_other_seeds(tmp_path: Path) -> None:
    results = Results(tmp_path / "seeds.json", {})
    for seed, seconds in enumerate([3.0, 5.0]):
        results.add(run(seed=seed), {"held_out": [[1, 1.0]], "seconds": seconds})
    results.add(run(steps=3), {"held_out": [[1, 1.0]], "seconds": 9.0})
    for each in (results, Results(tmp_path / "seeds.json", {})):
        assert each.expected_seconds(run(seed=2)) == 3
        assert each.expected_seconds(run(optimizer="lion")) == 0


def test_a_process_that_crashes_takes_its_run_alone(workers: list[Worker], folder: Path) -> None:
    future = workers[0].submit(run(steps=10**7), folder, CPU, math.inf, False)
    (process,) = workers[0]._pool._processes.values()
    os.kill(process.pid, signal.SIGKILL)
    assert workers[0].outcome(future) == {"error": "its process crashed"}
    ((_, outcome),) = execute([run()], workers[:1], folder)
    assert "held_out" in outcome


def test_a_process_that_crashed_idle_is_replaced(workers: list[Worker], folder: Path) -> None:
    list(execute([run()], workers[1:], folder))
    (process,) = workers[1]._pool._processes.values()
    os.kill(process.pid, signal.SIGKILL)
    while not workers[1]._pool._broken:
        time.sleep(0.05)
    ((_, outcome),) = execute([run()], workers[1:], folder)
    assert "held_out" in outcome


def test_a_base_is_where_runs_start(workers: list[Worker], folder: Path) -> None:
    base = run(steps=3)
    still = [run(base=base, lr=0.0, seed=seed) for seed in (1, 2)]
    outcomes = dict(execute(still, workers, folder))
    assert set(outcomes) == {base, *still}
    (_, end) = outcomes[base]["held_out"][-1]
    for each in still:
        assert [loss for _, loss in outcomes[each]["held_out"]] == [end, end]


def test_without_its_base_a_run_fails_likewise(workers: list[Worker], folder: Path) -> None:
    base = run(optimizer="flashoptim.FlashLion")
    after = run(base=base)
    outcomes = dict(execute([after, run()], workers, folder))
    assert set(outcomes) == {base, after, run()}
    assert (
        outcomes[after]
        == outcomes[base]
        == {"error": "flashoptim.FlashLion runs on cuda only, not on cpu; leave it out"}
    )


def test_weights_go_into_a_model_with_adapters() -> None:
    model = nn.ModuleDict({"query": nn.ModuleDict({"base_layer": nn.Linear(2, 2), "lora_A": nn.Linear(2, 1)})})
    adapter = model["query"]["lora_A"].weight.clone()
    weights = {"query.weight": torch.ones(2, 2), "query.bias": torch.zeros(2)}
    training._load(model, weights)
    assert torch.equal(model["query"]["base_layer"].weight, weights["query.weight"])
    assert torch.equal(model["query"]["lora_A"].weight, adapter)
    with pytest.raises(KeyError):
        training._load(model, {"key.weight": torch.ones(2, 2)})


# --- Studies and figures ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", seeds.SIZES)
def test_every_study_can_be_run(size: str) -> None:
    names = list(seeds.STUDIES)
    runs = seeds.all_runs(names, seeds.SIZES[size])
    order = [each.settings.seed for each in runs]
    assert order == sorted(order)
    assert len(runs) == len(set(runs)) == len(seeds.titles(names, seeds.SIZES[size]))
    lengths = {name: {run_of.settings.steps for run_of in runs_of(name, size)} for name in names}
    assert {len(steps) for steps in lengths.values()} == {1}  # the same for all variants of a study


def runs_of(name: str, size: str) -> list[Run]:
    study = seeds.STUDIES[name]
    return [seeds.run_of(study, variant, 0, seeds.SIZES[size]) for variant in study.variants]


def test_int8_has_lions_run_for_a_reference() -> None:
    assert runs_of("int8", "cuda")[0] == runs_of("lion", "cuda")[1]
    assert len(seeds.all_runs(["lion", "int8"], replace(seeds.SIZES["cuda"], seeds=3))) == 3 * 5


def test_interval() -> None:
    result = interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert result["mean"] == 3
    assert result["standard_error"] == pytest.approx(math.sqrt(2.5 / 5))
    assert result["high"] == pytest.approx(4.9632, abs=1e-3)
    assert result["low"] == pytest.approx(1.0368, abs=1e-3)


def test_a_table_pairs_seeds() -> None:
    def record(loss: float) -> dict:
        return {"held_out": [[1, 9.0], [2, loss]], "train_every": 1, "train": [9.5, loss]}

    known = report.Comparison(
        "some",
        "word",
        {
            "reference": {0: record(2.0), 1: record(3.0), 2: record(4.0)},
            "worse": {0: record(2.1), 1: record(3.2), 2: record(4.3)},
            "half": {1: record(2.9), 7: record(99.0), 2: {"error": "no memory"}},
            "failed": {0: {"error": "no package"}, 1: {"error": "no package"}},
        },
    )
    assert known.gaps("half") == pytest.approx([-0.1])
    lines = report.table(known).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:6]]
    assert cells == [
        ["reference", "3", "3.0000", "", "", ""],
        ["worse", "3", "3.2000", "+0.2000", "0.0577", "-0.0484 to +0.4484"],  # 4.303 standard errors
        ["half", "1", "2.9000", "-0.1000", "", ""],
        ["failed", "0", "", "", "", ""],
    ]
    assert lines[6:] == ["", "half, seed 2: no memory", "", "failed, seed 0, 1: no package"]


def test_the_page_says_what_the_results_do(tmp_path: Path) -> None:
    """Nothing, for a study that has none."""
    page = (seeds.ROOT / "docs" / "results.md").read_text()
    for name in seeds.STUDIES:
        assert page.count(f"<!-- {name} -->\n") == page.count(f"<!-- end of {name} -->\n") == 1
    empty = re.sub(r"(<!-- (\w+) -->\n).*?(?=<!-- end of \2 -->)", r"\1", page, flags=re.DOTALL)
    (tmp_path / "results.md").write_text(empty)
    seeds.show(list(seeds.STUDIES), seeds.SIZES["cuda"], Results(seeds.results_path("cuda"), {}), tmp_path)
    assert (tmp_path / "results.md").read_text() == page
