"""A table and stacked bars of measured rows."""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from tabulate import tabulate

Row = dict[str, Any]

PARTS = {
    "weights": "#3182bd",
    "state": "#e6550d",
    "gradients": "#31a354",
    "activations": "#bdbdbd",
    "temporary": "#756bb1",
}
_GB = 1e9


def label(row: Row) -> str:
    options = dict(row["options"], **({"gradient_release": True} if row["gradient_release"] else {}))
    text = ", ".join(f"{name}={value!r}" for name, value in options.items())
    return f"{row['optimizer']}({text})" if text else row["optimizer"]


def table(rows: list[Row]) -> str:
    return "\n\n".join(f"{_title(some)}\n{_one_table(some)}" for some in by_training(rows))


def by_training(rows: list[Row]) -> list[list[Row]]:
    """Rows of the same model and batch, in the order in which these come first."""
    trainings: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        trainings.setdefault(tuple(row[key] for key in ("model", "layers", "batch_size", "seq_len")), []).append(row)
    return list(trainings.values())


def _title(rows: list[Row]) -> str:
    first = rows[0]
    count = next((f", {row['parameters'] / 1e9:.3f} B parameters" for row in rows if "parameters" in row), "")
    depth = f", {first['layers']} layers" if first["layers"] else ""
    return (
        f"{first['model']}{depth}{count}, bf16, activation checkpointing, "
        f"{first['batch_size']} x {first['seq_len']} tokens; GB = 1e9 bytes"
    )


def _one_table(rows: list[Row]) -> str:
    headers = ["optimizer", "peak", "reserved", *PARTS, "at", "estimate", "off by", "iteration ms", "step ms"]
    lines = [[label(row), *_cells(row)] for row in rows]
    alignment = ["left", *["right"] * (len(headers) - 1)]
    return tabulate(lines, headers, disable_numparse=True, colalign=alignment)


def _cells(row: Row) -> list[str]:
    if "error" in row:
        return [row["error"][:100], *[""] * 11]
    peak, estimate = row.get("peak"), row.get("estimate")
    return [
        *(_gb(row.get(key)) for key in ("peak", "reserved", *PARTS)),
        row.get("phase", ""),
        _gb(estimate),
        f"{100 * (estimate / peak - 1):+.1f} %" if estimate and peak else "",
        f"{row['iteration_ms']:.2f}",
        f"{row['step_ms']:.2f}",
    ]


def _gb(nbytes: float | None) -> str:
    return "" if nbytes is None else f"{nbytes / _GB:.3f}"


def plot(rows: list[Row], path: Path) -> None:
    """A bar an optimizer and a panel a training: what the peak consists of, and a mark for what was reserved."""
    panels = [some for some in ([row for row in m if row.get("peak")] for m in by_training(rows)) if some]
    if not panels:
        raise ValueError("no row has a peak, so there is nothing to draw")
    heights = [len(panel) + 1.5 for panel in panels]
    figure = Figure(figsize=(9, 0.3 * sum(heights) + 0.6), layout="constrained")
    all_axes = figure.subplots(len(panels), squeeze=False, height_ratios=heights)[:, 0]
    for axes, panel in zip(all_axes, panels, strict=True):
        _draw(axes, panel)
    all_axes[0].legend(fontsize=7, ncols=len(PARTS) + 1, loc="lower right", bbox_to_anchor=(1, 1.15), frameon=False)
    all_axes[-1].set_xlabel("GB allocated at the peak of a training step")
    figure.savefig(path, dpi=150)


def _draw(axes: Any, rows: list[Row]) -> None:
    positions = range(len(rows))
    left = [0.0] * len(rows)
    for part, color in PARTS.items():
        widths = [row[part] / _GB for row in rows]
        axes.barh(positions, widths, left=left, color=color, label=part)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for position, total in zip(positions, left, strict=True):
        axes.text(total, position, f"{total:.1f} ", ha="right", va="center", fontsize=8)
    axes.plot([row["reserved"] / _GB for row in rows], positions, "k|", label="reserved")
    axes.set_yticks(positions, [label(row) for row in rows], fontsize=7)
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set_title(_title(rows), fontsize=8, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
