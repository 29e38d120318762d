"""How much does it cost in loss to train with fewer bits?

    python -m benchmarks.seeds [--device cuda] [--studies lion,int8] [--seeds 5] [--jobs 6] [--minutes 9] [--quick]
    python -m benchmarks.seeds --device cuda --show

The same model is trained with each variant of a study, from the same weights on the same batches, and from several
seeds. What is told is the gap between a variant's held-out loss and that of the study's first variant, the reference:
its mean over the seeds, standard error and 95 % interval (Student's t).

Runs share the device, `--jobs` at a time, seed after seed over all studies. Each is written to the results file as it
ends, and what is in the file is not done again: the work can be spread over any number of calls. `--show` trains
nothing: it prints the tables, draws the plots to docs/ and puts both into docs/results.md.
"""

import argparse
import contextlib
import importlib.metadata
import importlib.util
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gaps import report, texts
from benchmarks.gaps.results import Results
from benchmarks.gaps.training import Run
from benchmarks.gaps.workers import Worker, execute
from benchmarks.lm import UsageError
from benchmarks.lm.machine import machine
from benchmarks.lm.trainer import Settings

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Study:
    """One training in variants.

    Args:
        text: a key of `TEXTS`.
        common: settings of all variants.
        variants: further settings of each; the first is the reference.
        base: settings of the run, on the text `source`, whose weights they start from; None draws them.
        needs: a package.
    """

    text: str
    common: dict[str, Any]
    variants: dict[str, dict[str, Any]]
    base: dict[str, Any] | None = None
    needs: str | None = None


_AMP_BF16 = {"dtype": "amp_bf16"}  # fp32 weights
_OPTIMIZERS: dict[str, dict[str, Any]] = {
    "lion": {"optimizer": "lion"},
    "lion8bit": {"optimizer": "lion8bit"},
    "bnb.Lion8bit": {"optimizer": "bnb.Lion8bit"},
    "FlashLion": {"optimizer": "flashoptim.FlashLion"},
}
STUDIES = {
    "lion": Study("source", {"model": "30m", "steps": 1500, **_AMP_BF16}, _OPTIMIZERS),
    "bf16": Study(
        "source",
        {"model": "30m", "steps": 1000, "dtype": "bf16", "optimizer": "lion8bit"},
        {
            "lion, fp32 weights": {"optimizer": "lion", **_AMP_BF16},
            "lion8bit, nearest": {"stochastic_rounding": False},
            "lion8bit, stochastic": {},
            "lion8bit, 24 bits, nearest": {"master_weight_bits": 24, "stochastic_rounding": False},
            "lion8bit, 24 bits, stochastic": {"master_weight_bits": 24},
            "lion8bit, 32 bits": {"master_weight_bits": 32},
            "bnb.Lion8bit": {"optimizer": "bnb.Lion8bit"},
            "FlashLion, 24 bits": {"optimizer": "flashoptim.FlashLion"},
        },
    ),
    "int8": Study(
        "source",
        {"model": "30m", "steps": 1500, "optimizer": "lion8bit", **_AMP_BF16},
        {"bf16 matmuls": {}, "int8 matmuls": {"int8": "always"}},
    ),
    "lora": Study(
        "docs",
        {"model": "30m", "steps": 500, "lora": 16, **_AMP_BF16},
        {
            **_OPTIMIZERS,
            # at the same product of rate and weight decay
            "lion8bit, 2.5 × the rate": {"optimizer": "lion8bit", "lr": 5e-4, "weight_decay": 0.2},
            "lion8bit, 5 × the rate": {"optimizer": "lion8bit", "lr": 1e-3, "weight_decay": 0.1},
            "torch.AdamW": {"optimizer": "torch.AdamW"},
            "torch.AdamW, 2.5 × the rate": {"optimizer": "torch.AdamW", "lr": 2.5e-3, "weight_decay": 0.04},
            "torch.AdamW, 5 × the rate": {"optimizer": "torch.AdamW", "lr": 5e-3, "weight_decay": 0.02},
        },
        # all calls are to start from the same weights
        base={"model": "30m", "steps": 1000, "optimizer": "lion", "deterministic": True, **_AMP_BF16},
        needs="peft",
    ),
    "words": Study("words", {"model": "words", "steps": 800, **_AMP_BF16}, _OPTIMIZERS),
    "lion_124m": Study("source", {"model": "124m", "steps": 600, **_AMP_BF16}, _OPTIMIZERS),
}
DEFAULT_STUDIES = "lion,bf16,int8,lora,words"


@dataclass(frozen=True)
class Size:
    """How much is run.

    Args:
        batch_size, seq_len, eval_sequences: see `Settings`.
        seeds: number of them, counted from 0.
        shorten: the studies' steps are divided by it.
        small: whether `tiny` takes the place of the large models.
        compile: see `Settings`.
    """

    batch_size: int
    seq_len: int
    eval_sequences: int
    seeds: int
    shorten: int = 1
    small: bool = False
    compile: bool = False


# Several processes share a GPU: a compiled step takes less of it and of the host.
SIZES = {
    "quick": Size(2, 16, eval_sequences=8, seeds=2, shorten=250, small=True),
    "cpu": Size(8, 64, eval_sequences=256, seeds=3, shorten=5, small=True),
    "cuda": Size(32, 128, eval_sequences=1024, seeds=5, compile=True),
}
_EVALUATIONS = 4


# --- Which runs there are --------------------------------------------------------------------------------------------


def run_of(study: Study, variant: str, seed: int, size: Size) -> Run:
    base = Run("source", settings(study.base, size, seed=0)) if study.base else None
    return Run(study.text, settings({**study.common, **study.variants[variant]}, size, seed), base)


def settings(options: dict[str, Any], size: Size, seed: int) -> Settings:
    steps = max(1, options["steps"] // size.shorten)
    sized = Settings(
        **{
            **options,
            "model": "tiny" if size.small and options["model"] != "words" else options["model"],
            "steps": steps,
            "eval_every": max(1, steps // _EVALUATIONS),
            "batch_size": size.batch_size,
            "seq_len": size.seq_len,
            "eval_sequences": size.eval_sequences,
            "seed": seed,
            "compile": size.compile,
        }
    )
    return sized.resolved()


def all_runs(studies: list[str], size: Size) -> list[Run]:
    """Each once, however many studies it is in; all of a seed before the next."""
    return list(
        dict.fromkeys(
            run_of(STUDIES[name], variant, seed, size)
            for seed in range(size.seeds)
            for name in studies
            for variant in STUDIES[name].variants
        )
    )


def comparison(name: str, size: Size, found: Results) -> report.Comparison:
    study = STUDIES[name]
    return report.Comparison(
        name,
        unit="word" if study.text == "words" else "byte",
        records={
            variant: {
                seed: record for seed in found.seeds() if (record := found.find(run_of(study, variant, seed, size)))
            }
            for variant in study.variants
        },
    )


# --- Training --------------------------------------------------------------------------------------------------------


def train_all(names: list[str], size: Size, path: Path | None, devices: list[str], deadline: float) -> Results:
    """Do every run of the studies that is not in the file yet, as far as the time allows."""
    runs = all_runs(names, size)
    needed = {run.text for run in runs} | {run.base.text for run in runs if run.base}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found = Results(path, about(devices[0]) | texts.prepare(sorted(needed), folder))
        left = [run for run in runs if not found.is_done(run)]
        with started(devices[: len(left)]) as workers:
            print(f"{len(left)} of {len(runs)} runs to do, {len(workers)} at a time", flush=True)
            begun, commit, names_of = time.time(), git_commit(), titles(names, size)
            for run, outcome in execute(left, workers, folder, deadline, found.expected_seconds):
                found.add(run, {**outcome, "commit": commit})
                news = outcome.get("error") or f"{outcome['held_out'][-1][1]:.4f} in {outcome['seconds']:.0f} s"
                title = names_of.get(run, "to start from")
                print(f"{time.time() - begun:4.0f} s: {title}, seed {run.settings.seed}: {news}", flush=True)
    print(f"{sum(not found.is_done(run) for run in runs)} runs left", flush=True)
    return found


@contextlib.contextmanager
def started(devices: list[str]) -> Iterator[list[Worker]]:
    workers = [Worker(device) for device in devices]
    try:
        yield workers
    finally:
        for worker in workers:
            worker.close()


def titles(names: list[str], size: Size) -> dict[Run, str]:
    seeds = range(size.seeds)
    variants = [(name, variant) for name in names for variant in STUDIES[name].variants]
    return {run_of(STUDIES[name], v, seed, size): f"{name}: {v}" for seed in seeds for name, v in reversed(variants)}


def about(device: str) -> dict[str, Any]:
    """What has to be the same for losses to be paired."""
    packages = ("torch", "torchao", "triton", "bitsandbytes", "flashoptim", "peft")
    versions = {}
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {"machine": machine(torch.device(device).type), "python": platform.python_version(), **versions}


def git_commit() -> str | None:
    try:
        command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


# --- Report ----------------------------------------------------------------------------------------------------------


def show(names: list[str], size: Size, found: Results, docs: Path | None) -> None:
    """Print what is known of each study; draw it to `docs` and put it into the page there."""
    for name in names:
        known = comparison(name, size, found)
        is_comparison = len(known.complete) > 1
        if not is_comparison and not known.failures:
            print(f"\n{name}: nothing to compare yet")
            continue
        content = f"{caption(known, found.about)}\n\n{report.table(known)}"
        print(f"\n{name}: {content}")
        if docs and is_comparison:
            docs.mkdir(parents=True, exist_ok=True)
            picture = docs / f"results_{name}.png"
            report.plot(known, picture)
            report.fill_in(docs / "results.md", name, f"{content}\n\n![{name}: gaps and losses]({picture.name})")


def caption(known: report.Comparison, about: dict[str, Any]) -> str:
    records = known.records[known.reference].values()
    if not records:
        return "no run of the reference yet"
    each = next(iter(records))["settings"]
    tokens = each["batch_size"] * each["seq_len"]
    return (
        f"`{each['model']}`, {each['steps']:,} steps of {tokens:,} {known.unit}s, learning rate {each['lr']:g} and "
        f"weight decay {each['weight_decay']:g}; {about['machine']}, torch {about['torch']}."
    )


# --- Command line ----------------------------------------------------------------------------------------------------


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser("seeds", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda: all GPUs there are")
    parser.add_argument("--studies", help=f"of {', '.join(STUDIES)}; default: {DEFAULT_STUDIES}, and --show: all")
    parser.add_argument("--seeds", type=int, help="default: by device")
    parser.add_argument("--jobs", type=int, help="processes; default: a core each on a CPU, 6 a GPU")
    parser.add_argument("--minutes", type=float, default=math.inf, help="give up what is running after so many")
    parser.add_argument("--results", type=Path, help="default: benchmarks/results/seeds_DEVICE.json")
    parser.add_argument("--docs", type=Path, help="where --show draws; default: docs/ for a GPU's results")
    parser.add_argument("--show", action="store_true", help="only tables and plots of what is done")
    parser.add_argument("--quick", action="store_true", help="to see that all works; saves nothing by default")
    args = parser.parse_args()
    if args.device == "cuda" and not args.show and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no GPU here; use --device cpu")
    args.names = (args.studies or (",".join(STUDIES) if args.show else DEFAULT_STUDIES)).split(",")
    if unknown := set(args.names) - set(STUDIES):
        parser.error(f"--studies: there is no {', '.join(sorted(unknown))}; choose from {', '.join(STUDIES)}")
    if args.device == "cuda":
        args.docs = args.docs or ROOT / "docs"
    if not args.quick:
        args.results = args.results or results_path(args.device)
    if args.show and not (args.results and args.results.exists()):
        found = f"there is no {args.results}" if args.results else "a quick run saves nothing by default"
        parser.error(f"--show: {found}; run without --show first, or give the --results of such a run")
    return args


def results_path(device: str) -> Path:
    return ROOT / "benchmarks" / "results" / f"seeds_{device}.json"


def devices(device: str, jobs: int | None) -> list[str]:
    """One for each process."""
    if device == "cpu":
        return ["cpu"] * (jobs or os.cpu_count() or 1)
    gpus = torch.cuda.device_count()
    return [f"cuda:{i % gpus}" for i in range(jobs or 6 * gpus)]


def installed_studies(names: list[str]) -> list[str]:
    missing = {name: needs for name in names if (needs := STUDIES[name].needs) and not importlib.util.find_spec(needs)}
    for name, package in missing.items():
        print(f"{name} is left out: it needs {package}, which is not installed; try: pip install {package}", flush=True)
    return [name for name in names if name not in missing]


def main() -> None:
    args = arguments()
    size = SIZES["quick" if args.quick else args.device]
    size = replace(size, seeds=args.seeds or size.seeds)
    try:
        if args.show:
            show(args.names, size, Results(args.results, {}), args.docs)
        else:
            deadline = time.time() + 60 * args.minutes
            names = installed_studies(args.names)
            found = train_all(names, size, args.results, devices(args.device, args.jobs), deadline)
            show(names, size, found, docs=None)
    except UsageError as error:
        sys.exit(f"seeds: error: {error}")
    except KeyboardInterrupt:
        sys.exit("seeds: stopped; the same command goes on from here")


if __name__ == "__main__":
    main()
