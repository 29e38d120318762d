"""Tables and plots of what variants of one training came to."""

import re
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator
from tabulate import tabulate

from benchmarks.gaps.interval import interval
from benchmarks.gaps.results import Record


@dataclass(frozen=True)
class Comparison:
    """What is known of a study.

    Args:
        name: of the study.
        unit: what a loss is counted by: "byte" or "word".
        records: for each variant those of its runs by seed, the reference first.
    """

    name: str
    unit: str
    records: Mapping[str, Mapping[int, Record]]

    def runs(self, variant: str) -> dict[int, Record]:
        """Those that ended, by seed, from the seeds that the reference ended from as well."""
        reference = self.records[self.reference]
        return {
            seed: record
            for seed, record in self.records[variant].items()
            if "held_out" in record and "held_out" in reference.get(seed, {})
        }

    def losses(self, variant: str) -> dict[int, float]:
        """Held-out, at the end of each run, by seed."""
        return {seed: record["held_out"][-1][1] for seed, record in self.runs(variant).items()}

    def gaps(self, variant: str) -> list[float]:
        """To the reference, a seed each."""
        reference = self.losses(self.reference)
        return [loss - reference[seed] for seed, loss in self.losses(variant).items()]

    @property
    def reference(self) -> str:
        return next(iter(self.records))

    @property
    def complete(self) -> list[str]:
        """The variants that have runs."""
        return [variant for variant in self.records if self.losses(variant)]

    @property
    def failures(self) -> list[str]:
        """A line for each variant and reason."""
        seeds: dict[tuple[str, str], list[str]] = {}
        for variant, records in self.records.items():
            for seed, record in records.items():
                if "error" in record:
                    seeds.setdefault((variant, record["error"]), []).append(str(seed))
        return [f"{variant}, seed {', '.join(each)}: {error}" for (variant, error), each in seeds.items()]


def table(comparison: Comparison) -> str:
    """GitHub's markdown; the losses and gaps in nats a byte or word."""
    rows = [_row(comparison, variant) for variant in comparison.records]
    headers = ["", "seeds", f"loss, nats a {comparison.unit}", "gap", "std. error", "95 % interval"]
    lines = tabulate(rows, headers, "github", disable_numparse=True, colalign=("left", *["right"] * 5))
    return "\n\n".join([lines, *comparison.failures])


def _row(comparison: Comparison, variant: str) -> list[str]:
    losses = comparison.losses(variant)
    if not losses:
        return [variant, "0", "", "", "", ""]
    row = [variant, str(len(losses)), f"{statistics.mean(losses.values()):.4f}"]
    gaps = comparison.gaps(variant)
    if variant == comparison.reference or not gaps:
        return [*row, "", "", ""]
    if len(gaps) == 1:
        return [*row, f"{gaps[0]:+.4f}", "", ""]
    gap = interval(gaps)
    return [*row, f"{gap['mean']:+.4f}", f"{gap['standard_error']:.4f}", f"{gap['low']:+.4f} to {gap['high']:+.4f}"]


def plot(comparison: Comparison, path: Path) -> None:
    """Gaps, with a dot a seed and their 95 % interval, and the losses on the way, as means over the seeds; a PNG."""
    figure = Figure(figsize=(10, 1.4 + 0.45 * max(6, len(comparison.complete))), layout="constrained")
    left, right = figure.subplots(1, 2)
    colours = {variant: f"C{i}" for i, variant in enumerate(comparison.records)}
    _draw_gaps(left, comparison, colours)
    _draw_curves(right, comparison, colours)
    figure.savefig(path, dpi=100)


def _draw_gaps(axes: Any, comparison: Comparison, colours: dict[str, str]) -> None:
    variants = [variant for variant in comparison.complete if variant != comparison.reference]
    for position, variant in enumerate(variants):
        gaps, colour = comparison.gaps(variant), colours[variant]
        axes.plot(gaps, [position + 0.2] * len(gaps), "o", color=colour, markersize=4, alpha=0.5, markeredgewidth=0)
        if len(gaps) > 1:
            gap = interval(gaps)
            reach = gap["high"] - gap["mean"]
            axes.errorbar(gap["mean"], position, xerr=reach, fmt="D", color=colour, markersize=6, capsize=4)
    axes.axvline(0, color=colours[comparison.reference], linewidth=1)
    axes.set_yticks(range(len(variants)), variants)
    axes.set_ylim(len(variants) - 0.5, -0.5)
    axes.locator_params(axis="x", nbins=6)
    axes.set_xlabel(f"gap to {comparison.reference}, nats a {comparison.unit}; small dots: seeds")
    axes.grid(axis="x", alpha=0.3)


def _draw_curves(axes: Any, comparison: Comparison, colours: dict[str, str]) -> None:
    for variant in comparison.complete:
        records = comparison.runs(variant).values()
        steps, losses = _mean_curve([_train_curve(record) for record in records])
        axes.plot(steps, losses, color=colours[variant], linewidth=1, label=variant)
        steps, losses = _mean_curve([record["held_out"] for record in records])
        axes.plot(steps, losses, "o", color=colours[variant], markersize=4)
    axes.set_yscale("log")
    axes.yaxis.set(major_locator=MaxNLocator(8), major_formatter="{x:g}", minor_locator=NullLocator())
    axes.set_xlabel("step")
    axes.set_ylabel(f"loss, nats a {comparison.unit}")
    axes.legend(title="line: training; dots: held out", fontsize="small", title_fontsize="small")
    axes.grid(alpha=0.3)


def _train_curve(record: Record) -> list[tuple[float, float]]:
    every = record["train_every"]
    return [((i + 0.5) * every, loss) for i, loss in enumerate(record["train"])]


def _mean_curve(curves: list[list[tuple[float, float]]]) -> tuple[list[float], list[float]]:
    points = [list(zip(*together, strict=True)) for together in zip(*curves, strict=True)]
    return [steps[0] for steps, _ in points], [statistics.mean(losses) for _, losses in points]


def fill_in(page: Path, name: str, content: str) -> None:
    """Put `content` between the lines `<!-- name -->` and `<!-- end of name -->` of a page, where it has these."""
    if page.exists():
        start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        block = re.compile(re.escape(start) + ".*?" + re.escape(end), re.DOTALL)
        page.write_text(block.sub(lambda match: f"{start}\n{content}\n\n{end}", page.read_text()))
