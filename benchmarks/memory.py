"""What memory a training step takes with each optimizer, what it consists of, and what a formula says.

python benchmarks/memory.py --plot
python benchmarks/memory.py --models 1b --optimizers 'lion8bit,lion8bit(gradient_release=True)'
python benchmarks/memory.py --show benchmarks/results/memory_nvidia_h200.json --plot

Each row is a process of its own that trains a Llama in bf16, with activation checkpointing, for a few steps. "peak" is
what torch's allocator had given out when that was most, and the columns after "reserved" are what it consists of then:
gradients that have arrived and not been freed, whatever else the forward and backward pass hold ("activations"), and
whatever else the optimizer's step holds ("temporary"). "estimate" is from benchmarks/footprint/estimate.py.
"""

import argparse
import json
import re
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a file: its own folder is on the path, the project's is not
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch

from benchmarks.footprint import report
from benchmarks.footprint.estimate import STATE_BYTES, estimate
from benchmarks.footprint.measure import Case, measure_memory
from benchmarks.lm import UsageError
from benchmarks.lm.model import CONFIGS
from benchmarks.step_time import parse_optimizers
from benchmarks.steps.measure import run_isolated

RESULTS = Path(__file__).resolve().parent / "results"
OPTIMIZERS = (
    "lion8bit,lion8bit(gradient_release=True),lion8bit(offload_state=True),"
    "lion8bit(gradient_release=True,offload_state=True),"
    "torch.AdamW,lion_pytorch.Lion,bnb.Lion8bit,"
    "flashoptim.FlashLion(master_weight_bits=None),"
    "flashoptim.FlashLion(master_weight_bits=None,gradient_release=True),"
    "flashoptim.FlashLion(master_weight_bits=24,gradient_release=True)"
)


def main(argv: list[str] | None = None) -> int:
    parser = make_parser()
    args = parser.parse_args(argv)
    try:
        results = read(args.show) if args.show else measure(args)
    except UsageError as error:
        parser.error(str(error))
    print(f"\n{results['device']}, torch {results['torch']}\n\n{report.table(results['rows'])}", flush=True)
    if args.plot is not None:
        report.plot(results["rows"], Path(args.plot or results["path"].with_suffix(".png")))
    return 0


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("memory", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", default="1b,8b", metavar="A,B,…", help=f"any of {', '.join(CONFIGS)}")
    parser.add_argument(
        "--optimizers",
        default=OPTIMIZERS,
        metavar="A,B(option=value),…",
        help="as in step_time.py; gradient_release=True is an option here, of those that have it",
    )
    parser.add_argument("--layers", type=int, help="cut the model's depth")
    parser.add_argument("--batch-size", type=int, default=1, help="sequences; default: 1")
    parser.add_argument("--seq-len", type=int, default=2048, help="tokens a sequence; default: 2048")
    parser.add_argument("--timed-steps", type=int, default=12, help="default: 12")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: benchmarks/results/memory_<device>.json")
    parser.add_argument("--show", type=Path, metavar="FILE", help="measure nothing, show these results")
    parser.add_argument("--plot", nargs="?", const="", metavar="PNG", help="default: beside the results")
    return parser


def measure(args: argparse.Namespace) -> dict[str, Any]:
    device = torch.cuda.get_device_name(args.device) if args.device.startswith("cuda") else args.device
    path = args.out or RESULTS / f"memory_{re.sub(r'[^a-z0-9]+', '_', device.lower())}.json"
    results: dict[str, Any] = {"device": device, "torch": torch.__version__, "rows": []}
    for case in make_cases(args):
        row = {**asdict(case), **run_isolated(measure_memory, case), "estimate": estimate_of(case)}
        results["rows"].append(row)
        _write(path, results)
        outcome = row.get("error") or f"{(row['peak'] or 0) / 1e9:.2f} GB, {row['iteration_ms']:.1f} ms an iteration"
        print(f"memory: {case.model} {report.label(row)}: {outcome}", file=sys.stderr, flush=True)
    return {**results, "path": path}


def make_cases(args: argparse.Namespace) -> list[Case]:
    unknown = [model for model in args.models.split(",") if model not in CONFIGS]
    if unknown:
        raise UsageError(f"no model is named {unknown[0]!r}; choose from {', '.join(CONFIGS)}")
    return [
        Case(
            model,
            name,
            args.device,
            {key: value for key, value in options.items() if key != "gradient_release"},
            options.get("gradient_release", False),
            args.batch_size,
            args.seq_len,
            args.layers,
            args.timed_steps,
        )
        for model in args.models.split(",")
        for name, options in parse_optimizers(args.optimizers)
    ]


def estimate_of(case: Case) -> float | None:
    """Bytes at the peak; None for an optimizer or an option that the formula does not know."""
    known = {"master_weight_bits", "offload_state"}
    if case.optimizer not in STATE_BYTES or set(case.options) - known:
        return None
    config = CONFIGS[case.model]
    config = replace(config, layers=case.layers or config.layers)
    tokens = case.batch_size * case.seq_len
    return estimate(config, tokens, case.optimizer, gradient_release=case.gradient_release, **case.options).peak


def read(path: Path) -> dict[str, Any]:
    try:
        return {**json.loads(path.read_text()), "path": path}
    except (OSError, ValueError) as error:
        raise UsageError(f"--show takes a results file that this script wrote: {error}") from error


def _write(path: Path, results: dict[str, Any]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(results, indent=1) + "\n")
    except OSError as error:
        raise UsageError(f"cannot write {path} ({error.strerror}); choose another --out") from error


if __name__ == "__main__":
    sys.exit(main())
