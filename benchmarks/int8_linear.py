"""What int8 matmuls give: alone, in a layer, for changing lengths; and what to write into their tables.

python benchmarks/int8_linear.py
python benchmarks/int8_linear.py --parts matmul,layer --out results.json
python benchmarks/int8_linear.py --tune
python benchmarks/int8_linear.py --parts layer --device cpu --scale 32

--tune checks candidate tile configurations for exactness, measures them, and prints the lines for the table in
lowbit_optim/int8_training/matmul.py; with it come the tiles of the quantisation kernels. Operands are random.
"""

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest import mock

if __package__ in (None, ""):  # run as a file: its own folder is on the path, the project's is not
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch
from tabulate import tabulate

from benchmarks.int8 import layers, matmuls
from lowbit_optim.int8_training import matmul

TOKENS, DIM, FF = 8192, 4096, 14336
FEATURES = [(4096, 4096), (1024, 4096), (2048, 2048), (8192, 2048), (1024, 1024), (512, 2048)]


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    device = torch.device(args.device)
    results: dict[str, Any] = {"device": _name(device), "torch": torch.__version__, "parts": {}}
    for part in ["tune", "quantisation"] if args.tune else args.parts:
        begun = time.perf_counter()
        rows = results["parts"][part] = []
        for row in PARTS[part](device, args.scale):
            rows.append(row)
            print(f"{part}: {_line(row)}", file=sys.stderr, flush=True)
            if args.out:  # at once: a later row may take the process with it
                args.out.write_text(json.dumps(results, indent=1, default=str) + "\n")
        print(f"\n## {part}, {time.perf_counter() - begun:.0f} s\n\n{table(rows)}", flush=True)
        if part == "tune":
            print("\n" + "\n".join(matmuls.best_lines(rows)), flush=True)
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("int8_linear", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--parts", type=_parts, help="some of " + ", ".join(PARTS))
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--scale", type=int, help="divide dimensions; default: 32 on CPUs, 1 on GPUs")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write all figures there, as JSON")
    args = parser.parse_args(argv)
    on_gpu = args.device.startswith("cuda")
    args.scale = args.scale or (1 if on_gpu else 32)
    args.parts = args.parts or [part for part in PARTS if part != "tune" and (on_gpu or part != "crowded")]
    if not on_gpu and (args.tune or "crowded" in args.parts):
        parser.error("--tune and the part 'crowded' measure GPU kernels; give a --device that is one")
    return args


def _parts(text: str) -> list[str]:
    chosen = text.split(",")
    for part in chosen:
        if part not in PARTS:
            raise argparse.ArgumentTypeError(f"{part!r} is not one of {', '.join(PARTS)}")
    return chosen


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


# --- Parts -----------------------------------------------------------------------------------------------------------

Rows = Iterable[dict[str, Any]]


def _shapes(scale: int) -> list[matmuls.Shape]:
    return [(m // scale, n // scale, k // scale) for m, n, k in matmuls.SHAPES]


def _modes(device: torch.device) -> list[str]:
    return ["eager", "compiled"] if device.type == "cuda" else ["eager"]


def _tune(device: torch.device, scale: int) -> Rows:
    return matmuls.tune(_shapes(scale) + matmuls.SMALL_SHAPES, device)


def _matmul(device: torch.device, scale: int) -> Rows:
    return matmuls.compare(_shapes(scale), device)


def _crowded(device: torch.device, scale: int) -> Rows:
    from benchmarks.int8 import crowded

    return crowded.compare(_shapes(scale), [8, 16, 32], device)


def _quantisation(device: torch.device, scale: int) -> Rows:
    return matmuls.quantisation([(TOKENS // scale, DIM // scale), (TOKENS // scale, FF // scale)], device)


def _layer(device: torch.device, scale: int) -> Rows:
    names = [name for name in layers.CONTENDERS if device.type == "cuda" or "torchao" not in name]
    return layers.compare(TOKENS // scale, DIM // scale, FF // scale, device, _modes(device), names)


def _kernels(device: torch.device, scale: int) -> Rows:
    for mode in _modes(device):
        for name in ("bf16", "ours"):
            yield from layers.kernels(TOKENS // scale, DIM // scale, FF // scale, device, mode, name)


def _crossover(device: torch.device, scale: int) -> Rows:
    tokens = [count // scale for count in (1024, 2048, 4096, 8192, 16384)]
    features = [(outputs // scale, inputs // scale) for outputs, inputs in FEATURES]
    modes = [*_modes(device), layers.ONE_THREAD]
    return layers.crossover(tokens, features, device, modes, always_int8)


def _lengths(device: torch.device, scale: int) -> Rows:
    for mode in _modes(device):
        for name in ("bf16", "ours"):
            yield layers.lengths(TOKENS // min(scale, 8), DIM // scale, FF // scale, device, mode, name)


PARTS: dict[str, Callable[[torch.device, int], Rows]] = {
    "matmul": _matmul,
    "crowded": _crowded,
    "quantisation": _quantisation,
    "layer": _layer,
    "kernels": _kernels,
    "crossover": _crossover,
    "lengths": _lengths,
    "tune": _tune,
}


def always_int8() -> contextlib.AbstractContextManager[Any]:
    """However small a product is."""
    return mock.patch.dict(matmul.smallest_products, dict.fromkeys(matmul.smallest_products, 0))


def table(rows: list[dict[str, Any]]) -> str:
    return tabulate([{key: _cell(value) for key, value in row.items()} for row in rows], headers="keys")


def _line(row: dict[str, Any]) -> str:
    return ", ".join(f"{key} {_cell(value)}" for key, value in row.items())


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return str(value)


if __name__ == "__main__":
    sys.exit(main())
