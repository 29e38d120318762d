"""What a run leaves in its folder: metrics as JSON lines, and a table and a plot made from them."""

import io
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from tabulate import tabulate

from benchmarks.lm import UsageError
from benchmarks.lm.trainer import Settings

_COLUMNS = {
    "train_loss": ("train loss", ".3f"),
    "held_out_loss": ("held-out loss", ".3f"),
    "optimizer_bytes_per_parameter": ("optimizer B/param", ".3f"),
    "optimizer_step_ms": ("optimizer step ms", ".2f"),
    "train_step_ms": ("train step ms", ".1f"),
    "tokens_per_s": ("tokens/s", ",.0f"),
    "peak_gpu_gib": ("peak GPU GiB", ".2f"),
}


def metrics_path(out: Path, optimizer: str) -> Path:
    return out / f"{optimizer}.jsonl"


def checkpoint_path(out: Path, optimizer: str) -> Path:
    return out / f"{optimizer}.pt"


# --- Metrics ---------------------------------------------------------------------------------------------------------


def start(path: Path, settings: Settings, header: dict[str, Any], rows: Iterable[dict[str, Any]]) -> None:
    """Write a metrics file: one line of settings, then the rows so far, which a run that is resumed brings along."""
    _write(path, _json_lines([{"settings": asdict(settings), **header}, *rows]))


def append(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    try:
        with path.open("ab") as file:
            file.write(_json_lines(rows))
    except OSError as error:
        raise _cannot_write(path, error) from error


def _json_lines(rows: Iterable[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def _write(path: Path, content: bytes) -> None:
    """Replace a file as a whole or not at all."""
    partial_path = path.with_name(path.name + ".partial")
    try:
        partial_path.write_bytes(content)
        os.replace(partial_path, path)
    except OSError as error:
        partial_path.unlink(missing_ok=True)
        raise _cannot_write(path, error) from error


def _cannot_write(path: Path, error: OSError) -> UsageError:
    return UsageError(f"cannot write {path} ({error.strerror}); make room or choose another --out")


# --- Reading them ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """A metrics file: its first line, a row a step, and the summary that a complete run ends with."""

    header: dict[str, Any]
    rows: list[dict[str, Any]]
    summary: dict[str, Any] | None

    @property
    def name(self) -> str:
        settings = self.header["settings"]
        names = ("int8", "lora", "qlora", "master_weight_bits")
        options = [f"{name} {settings[name]}" for name in names if settings.get(name)]
        options += ["rounded to nearest"] if settings.get("stochastic_rounding") is False else []
        return ", ".join([settings["optimizer"], *options])


def read(path: Path) -> Run:
    # A full disk may have cut the last line short.
    header, *rows = [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    summary = rows.pop()["summary"] if rows and "summary" in rows[-1] else None
    return Run(header, rows, summary)


def read_all(out: Path) -> list[Run]:
    """The runs of a folder, the oldest first."""
    return [read(path) for path in sorted(out.glob("*.jsonl"), key=lambda path: path.stat().st_mtime)]


def table(runs: Iterable[Run]) -> str:
    """Complete runs, one a line, and what a table of byte pairs reaches without any training."""
    complete = [run for run in runs if run.summary]
    keys = [key for key in _COLUMNS if any(key in run.summary for run in complete)]
    lines = [_table_line(run, keys) for run in complete]
    for loss in sorted({run.header["bigram_loss"] for run in complete}):
        lines.append(["(byte pairs)", "", "", *(f"{loss:.3f}" if key == "held_out_loss" else "" for key in keys)])
    headers = ["optimizer", "lr", "weight decay", *(_COLUMNS[key][0] for key in keys)]
    return tabulate(lines, headers, disable_numparse=True, colalign=("left", *["right"] * (len(headers) - 1)))


def _table_line(run: Run, keys: list[str]) -> list[str]:
    settings = run.header["settings"]
    figures = (format(run.summary[key], _COLUMNS[key][1]) if key in run.summary else "" for key in keys)
    return [run.name, f"{settings['lr']:g}", f"{settings['weight_decay']:g}", *figures]


def plot(runs: Iterable[Run], path: Path) -> None:
    """Draw each run's loss, smoothed, and its held-out losses as dots, to a PNG.

    Raises:
        UsageError: the file cannot be written.
    """
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss, nats a byte")
    for run in runs:
        steps = [row["step"] for row in run.rows]
        (line,) = axes.plot(steps, _smooth([row["loss"] for row in run.rows]), label=run.name, linewidth=1)
        held_out = [(row["step"], row["held_out_loss"]) for row in run.rows if "held_out_loss" in row]
        axes.plot(*zip(*held_out, strict=True), "o", color=line.get_color(), markersize=4)
        axes.axhline(run.header["bigram_loss"], color="grey", linewidth=0.5, linestyle="--")
    axes.legend(title="line: training, smoothed; dots: held out\ndashed: byte pairs, no training")
    axes.grid(alpha=0.3)
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=120)
    _write(path, image.getvalue())


def _smooth(values: list[float], keep: float = 0.9) -> list[float]:
    smoothed: list[float] = []
    for value in values:
        smoothed.append(keep * smoothed[-1] + (1 - keep) * value if smoothed else value)
    return smoothed
