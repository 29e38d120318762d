"""What one step of each optimizer costs, beside what the memory of the device allows.

python benchmarks/step_time.py --single
python benchmarks/step_time.py --sets llama1b,vit_l --optimizers 'lion8bit,bnb.Lion8bit' --plot
python benchmarks/step_time.py --optimizers 'flashoptim.FlashLion(master_weight_bits=None)' --dtype fp32
python benchmarks/step_time.py --sets llama1b --optimizers 'lion8bit,lion8bit(offload_state=True)' --rounding on
python benchmarks/step_time.py --show benchmarks/results/step_time_nvidia_h200.json --plot

Every row is measured in a process of its own, with nothing compiled yet. Rows are in the results file as soon as they
are measured. "step" is the time on the GPU with the host running ahead, as it does behind a backward pass; "from idle"
begins with the GPU waiting for the host. "% of copy" is the bytes that the optimizer has to read and write (weights and
state both ways, gradients one way), over the step's time, in per cent of a device-to-device copy measured at the start
of the run. With state in host memory, "% of link" is its bytes over the step's time, in per cent of what the link to
the host takes each way when both ways are in use.
"""

import argparse
import ast
import importlib.metadata
import json
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a file: its own folder is on the path, the project's is not
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch

from benchmarks.lm import UsageError
from benchmarks.lm.optimizers import REGISTRY
from benchmarks.steps import report
from benchmarks.steps.measure import DTYPES, Case, measure_device, measure_step, run_isolated
from benchmarks.steps.shapes import SHAPE_SETS

RESULTS = Path(__file__).resolve().parent / "results"
OPTIMIZERS = (
    "lion8bit,lion,torch.AdamW,lion_pytorch.Lion,bnb.Lion8bit,flashoptim.FlashLion(master_weight_bits=None),"
    "flashoptim.FlashLion(master_weight_bits=24),torchao.AdamW8bit"
)
# The option that switches stochastic rounding; the other optimizers have none.
_ROUNDING_OPTIONS = {
    "lion": "stochastic_rounding",
    "lion8bit": "stochastic_rounding",
    "torchao.AdamW8bit": "bf16_stochastic_round",
}
# These compile for each shape, for minutes in all.
_ONLY_IN_SETS = {"torchao.AdamW8bit": ("llama1b", "vit_l")}
_CPU_SCALE = 16


def main(argv: list[str] | None = None) -> int:
    parser = make_parser()
    args = parser.parse_args(argv)
    try:
        results = merge(args.show) if args.show else measure(args)
    except UsageError as error:
        parser.error(str(error))
    print(f"\n{results['device']}: copies at {results['copy_bytes_per_s'] / 1e12:.3f} TB/s\n")
    print(report.table(results["rows"]), flush=True)
    if args.plot is not None:
        report.plot(
            results["rows"], results["copy_bytes_per_s"], Path(args.plot or results["path"].with_suffix(".png"))
        )
    return 0


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("step_time", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    all_sets = [name for name in SHAPE_SETS if name != "single"]
    parser.add_argument(
        "--sets", type=_one_of(SHAPE_SETS), default=all_sets, metavar="A,B,…", help=", ".join(SHAPE_SETS)
    )
    parser.add_argument("--single", action="store_true", help="one large matrix, in bf16 and fp32, by lion8bit")
    parser.add_argument(
        "--optimizers",
        metavar="A,B(option=value),…",
        help=f"any of {', '.join(REGISTRY)}, with or without options; default: these, where they run, and all sets",
    )
    parser.add_argument("--dtype", type=_one_of(DTYPES), metavar="A,B,…", help="bf16 (default), fp16, fp32")
    parser.add_argument("--rounding", type=_one_of(("on", "off")), default=["on", "off"], help="stochastic: on,off")
    parser.add_argument("--fresh-grads", action="store_true", help="gradients at new addresses in every step")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--scale", type=int, help=f"divide dimensions; default: {_CPU_SCALE} on CPUs, 1 on GPUs")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: benchmarks/results/step_time_<device>.json")
    parser.add_argument("--show", type=Path, nargs="+", metavar="FILE", help="measure nothing, show these results")
    parser.add_argument("--plot", nargs="?", const="", metavar="PNG", help="default: beside the results")
    return parser


def _one_of(names: Any) -> Any:
    def parse(text: str) -> list[str]:
        chosen = text.split(",")
        for name in chosen:
            if name not in names:
                raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(names)}")
        return chosen

    return parse


# --- What to measure -------------------------------------------------------------------------------------------------


def parse_optimizers(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Names and options of a list such as ``lion8bit,flashoptim.FlashLion(master_weight_bits=None)``."""
    try:
        items = ast.parse(f"[{text}]", mode="eval").body.elts  # type: ignore[attr-defined]
        chosen = [_parse_optimizer(item) for item in items]
    except (SyntaxError, ValueError) as error:
        raise UsageError(f"--optimizers {text!r} is not a list of names or name(option=value): {error}") from error
    for name, _ in chosen or [("", {})]:
        if name not in REGISTRY:
            raise UsageError(f"no optimizer is named {name!r}; choose from {', '.join(REGISTRY)}")
    return chosen


def _parse_optimizer(item: ast.expr) -> tuple[str, dict[str, Any]]:
    if not isinstance(item, ast.Call):
        return ast.unparse(item), {}
    options = {option.arg: ast.literal_eval(option.value) for option in item.keywords}
    if item.args or None in options:
        raise ValueError("options are given by name")
    return ast.unparse(item.func), {str(name): value for name, value in options.items()}


def make_cases(args: argparse.Namespace) -> list[Case]:
    """Set by set, so that what is to be compared is measured close together."""
    chosen = parse_optimizers(args.optimizers or ("lion8bit" if args.single else OPTIMIZERS))
    scale = args.scale or (1 if args.device.startswith("cuda") else _CPU_SCALE)
    return [
        Case(shape_set, name, dtype, args.device, scale, options | switch, rounding, args.fresh_grads)
        for shape_set in (["single"] if args.single else args.sets)
        for dtype in args.dtype or (["bf16", "fp32"] if args.single else ["bf16"])
        for name, options in chosen
        for rounding, switch in rounding_switches(name, dtype, args.rounding)
    ]


def rounding_switches(name: str, dtype: str, modes: list[str]) -> list[tuple[bool | None, dict[str, Any]]]:
    """Whether to round stochastically and the option that says so; one without where it makes no difference."""
    if name not in _ROUNDING_OPTIONS or dtype == "fp32":
        return [(None, {})]
    return [(mode == "on", {_ROUNDING_OPTIONS[name]: mode == "on"}) for mode in modes]


# --- Measuring and keeping -------------------------------------------------------------------------------------------


def measure(args: argparse.Namespace) -> dict[str, Any]:
    cases = make_cases(args)
    header = run_isolated(measure_device, args.device)
    if "error" in header:
        raise UsageError(f"--device {args.device} cannot be used ({header['error']}); try --device cpu")
    path = args.out or RESULTS / f"step_time_{'single_' if args.single else ''}{_slug(header['device'])}.json"
    results = {**header, "versions": _versions(), "rows": []}
    for case in cases:
        row = measure_row(case, header)
        results["rows"].append(row)
        _write(path, results)
        outcome = row.get("error") or f"{row['step_ms']:.3f} ms"
        print(f"step_time: {case.shape_set} {case.dtype} {report.label(row)}: {outcome}", file=sys.stderr, flush=True)
    return {**results, "path": path}


def measure_row(case: Case, device: dict[str, Any]) -> dict[str, Any]:
    """One row of the results; if it fails, one with ``error`` instead of figures."""
    only_in = _ONLY_IN_SETS.get(case.optimizer, (case.shape_set,))
    if case.shape_set not in only_in:
        return {**asdict(case), "error": f"takes minutes to compile: measured in {' and '.join(only_in)} only"}
    row = {**asdict(case), **run_isolated(measure_step, case)}
    if "error" not in row:
        row["percent_of_copy"] = 100 * row["moved_bytes"] / (row["step_ms"] / 1e3) / device["copy_bytes_per_s"]
        if case.options.get("offload_state") and device.get("link_bytes_per_s"):
            state = row["state_bytes_per_parameter"] * row["parameters"]
            row["percent_of_link"] = 100 * state / (row["step_ms"] / 1e3) / device["link_bytes_per_s"]
    return row


def merge(paths: list[Path]) -> dict[str, Any]:
    """Results of several runs on one device as one; the copy bandwidth is the first run's."""
    try:
        runs = [json.loads(path.read_text()) for path in paths]
    except (OSError, ValueError) as error:
        raise UsageError(f"--show takes results files that this script wrote: {error}") from error
    return {**runs[0], "rows": [row for run in runs for row in run["rows"]], "path": paths[0]}


def _slug(device: str) -> str:
    return re.sub(r"\W+", "_", device.split(",")[0]).lower()


def _versions() -> dict[str, str]:
    """Of every package that an optimizer comes from."""
    versions = {"triton": _version("triton")} | {entry.package: _version(entry.package) for entry in REGISTRY.values()}
    return {name: version for name, version in versions.items() if version} | {"torch": torch.__version__}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _write(path: Path, results: dict[str, Any]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(results, indent=1) + "\n")
    except OSError as error:
        raise UsageError(f"cannot write {path} ({error.strerror}); choose another --out") from error


if __name__ == "__main__":
    sys.exit(main())
