"""Tables and a bar chart of measured rows."""

from collections.abc import Callable, Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from tabulate import tabulate

Row = dict[str, Any]

_COLUMNS: dict[str, tuple[str, str]] = {
    "step_ms": ("step ms", ".3f"),
    "back_to_back_ms": ("back to back ms", ".3f"),
    "idle_step_ms": ("from idle ms", ".3f"),
    "gpu_busy_ms": ("GPU busy ms", ".3f"),
    "host_ms": ("host ms", ".3f"),
    "host_us_per_tensor": ("host µs/tensor", ".1f"),
    "first_step_s": ("first step s", ".2f"),
    "state_bytes_per_parameter": ("state B/param", ".3f"),
    "temporary_mb": ("temporary MB", ".2f"),
    "kernels": ("kernels", "d"),
    "percent_of_copy": ("% of copy", ".1f"),
    "percent_of_link": ("% of link", ".1f"),
    "step_ratio": ("step ×", ".2f"),
    "gpu_busy_ratio": ("busy ×", ".2f"),
    "error": ("", ".120"),
}


def table(rows: list[Row]) -> str:
    """A table a set and dtype; ``×`` is the time over that of the first row that has one."""
    return "\n\n".join(f"{_title(rows)}\n{_one_table(rows)}" for rows in by_set(rows))


def by_set(rows: Iterable[Row]) -> list[list[Row]]:
    """Rows that may be compared with one another, and the titles of their tables."""

    def key(row: Row) -> tuple[Any, ...]:
        return row["shape_set"], row["dtype"], row["fresh_grads"], row["scale"]

    order = list(dict.fromkeys(key(row) for row in rows))
    return [list(group) for _, group in groupby(sorted(rows, key=lambda row: order.index(key(row))), key)]


def label(row: Row) -> str:
    options = ", ".join(f"{name}={value!r}" for name, value in row["options"].items())
    return f"{row['optimizer']}({options})" if options else row["optimizer"]


def _title(rows: list[Row]) -> str:
    first = next((row for row in rows if "parameters" in row), {})
    size = f": {first['tensors']} tensors, {first['parameters'] / 1e6:,.1f} M parameters" if first else ""
    scale = f", dimensions over {rows[0]['scale']}" if rows[0]["scale"] != 1 else ""
    fresh = ", gradients at new addresses each step" if rows[0]["fresh_grads"] else ""
    return f"{rows[0]['shape_set']}{size}, {rows[0]['dtype']}{scale}{fresh}"


def _one_table(rows: list[Row]) -> str:
    first = next((row for row in rows if "step_ms" in row), rows[0])
    rows = [_with_comparison(row, first) for row in rows]
    keys = [key for key in _COLUMNS if any(row.get(key) is not None for row in rows)]
    lines = [[label(row), *(_format(row.get(key), _COLUMNS[key][1]) for key in keys)] for row in rows]
    alignment = ["left", *("left" if key == "error" else "right" for key in keys)]
    headers = ["optimizer", *(_COLUMNS[key][0] for key in keys)]
    return tabulate(lines, headers, disable_numparse=True, colalign=alignment)


def _with_comparison(row: Row, first: Row) -> Row:
    def ratio(key: str) -> float | None:
        return row[key] / first[key] if row.get(key) and first.get(key) else None

    temporary = row.get("temporary_bytes")
    return {
        **row,
        "temporary_mb": None if temporary is None else temporary / 1e6,
        "step_ratio": ratio("step_ms"),
        "gpu_busy_ratio": ratio("gpu_busy_ms"),
    }


def _format(value: Any, spec: str) -> str:
    return "" if value is None else format(value, spec)


def plot(rows: list[Row], copy_bytes_per_s: float, path: Path) -> None:
    """A bar an optimizer and a panel a set: whole step, and how long its bytes take at copy bandwidth."""
    panels = [timed for rows in by_set(rows) if (timed := [row for row in rows if "step_ms" in row])]
    if not panels:
        raise ValueError("no optimizer ran, so there is nothing to draw")
    heights = [len(panel) + 1.5 for panel in panels]
    figure = Figure(figsize=(9, 0.3 * sum(heights) + 0.4), layout="constrained")
    all_axes = figure.subplots(len(panels), squeeze=False, height_ratios=heights)[:, 0]
    for axes, panel in zip(all_axes, panels, strict=True):
        _draw_panel(axes, panel, lambda row: 1e3 * row.get("moved_bytes", 0) / copy_bytes_per_s)
    figure.supxlabel("ms; whole optimizer.step(), and in dark what its bytes take at copy bandwidth", fontsize=9)
    figure.savefig(path, dpi=150)


def _format_ms(ms: float) -> str:
    return f"{ms:#.3g}" if ms < 100 else f"{ms:,.0f}"


def _draw_panel(axes: Any, rows: list[Row], floor_ms: Callable[[Row], float]) -> None:
    positions = range(len(rows))
    bars = axes.barh(positions, [row["step_ms"] for row in rows], color="#9ecae1")
    axes.barh(positions, [floor_ms(row) for row in rows], color="#3182bd")
    axes.bar_label(bars, [_format_ms(row["step_ms"]) for row in rows], padding=3, fontsize=8)
    axes.set_yticks(positions, [label(row) for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set_title(_title(rows), fontsize=9, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
