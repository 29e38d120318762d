"""A run from its current step to its last: progress bar, metrics, evaluations, checkpoints, orderly stops."""

import contextlib
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.lm import optimizers, report
from benchmarks.lm.parallel import Alone
from benchmarks.lm.trainer import Trainer

_LOG_EVERY = 10  # steps between reading losses off the device, which makes a GPU wait


def train(
    trainer: Trainer, out: Path, *, header: dict[str, Any], checkpoint_every: int = 0, stop_at: int | None = None
) -> bool:
    """Train to the end, or to `stop_at`, or until interrupted (SIGINT, SIGTERM); both of these write a checkpoint.

    Args:
        out: folder for `<optimizer>.jsonl` and `<optimizer>.pt`.
        header: what the metrics file says about the run besides its settings.
        checkpoint_every: steps between checkpoints, the last step included; 0 writes none.

    Returns:
        Whether the run is complete.

    Raises:
        UsageError: a file cannot be written.
    """
    settings = trainer.settings
    metrics = report.metrics_path(out, settings.optimizer) if trainer.parallel.rank == 0 else None
    if metrics:
        report.start(metrics, settings, header, trainer.history)
    last = min(settings.steps, stop_at or settings.steps)

    with _stop_signals() as stopping, _progress_bar(trainer) as bar:
        stops = False
        while trainer.step < last and not stops:
            mark = _next_mark(trainer.step, last, _LOG_EVERY, settings.eval_every, checkpoint_every)
            rows = _advance(trainer, mark, bar, stopping)
            if trainer.step % settings.eval_every == 0 or trainer.step == settings.steps:
                rows[-1]["held_out_loss"] = trainer.held_out_loss()
            trainer.history += rows
            if metrics:
                report.append(metrics, rows)
            stops = trainer.parallel.any(stopping())  # all ranks after the same step
            unfinished = trainer.step < settings.steps and (stops or trainer.step == last)
            if unfinished or (checkpoint_every and (trainer.step == last or trainer.step % checkpoint_every == 0)):
                trainer.save(report.checkpoint_path(out, settings.optimizer))

    complete = trainer.step == settings.steps
    if complete and metrics:
        report.append(metrics, [{"summary": _summary(trainer)}])
    return complete


def _progress_bar(trainer: Trainer) -> tqdm:
    settings = trainer.settings
    return tqdm(
        total=settings.steps,
        initial=trainer.step,
        desc=settings.optimizer,
        unit="step",
        dynamic_ncols=True,
        disable=trainer.parallel.rank > 0,
        mininterval=0.5 if sys.stderr.isatty() else 15,  # a log file keeps every update
    )


def _next_mark(step: int, last: int, *intervals: int) -> int:
    return min(last, *((step // interval + 1) * interval for interval in intervals if interval))


def _advance(trainer: Trainer, mark: int, bar: tqdm, stopping: Callable[[], bool]) -> list[dict[str, Any]]:
    """Steps up to `mark`, as one row of metrics each."""
    begun = time.perf_counter()
    first = trainer.step + 1
    lrs, losses = [], []
    alone = type(trainer.parallel) is Alone
    while trainer.step < mark and not (alone and losses and stopping()):
        lrs.append(trainer.lr)
        losses.append(trainer.train_step())
        bar.update()
    values = torch.stack(losses).tolist()
    seconds = (time.perf_counter() - begun) / len(values)
    tokens_per_s = trainer.settings.batch_size * trainer.settings.seq_len / seconds
    bar.set_postfix_str(f"loss {values[-1]:.3f}, {tokens_per_s:,.0f} tokens/s", refresh=False)
    return [
        {"step": first + i, "loss": loss, "lr": lr, "step_ms": seconds * 1e3, "tokens_per_s": tokens_per_s}
        for i, (loss, lr) in enumerate(zip(values, lrs, strict=True))
    ]


@contextlib.contextmanager
def _stop_signals() -> Iterator[Callable[[], bool]]:
    """A function that tells whether a signal asked to stop; a second signal does what it did before."""
    received: list[int] = []
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)
        signal.signal(number, previous[number])

    for number in previous:
        signal.signal(number, note)
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _summary(trainer: Trainer) -> dict[str, Any]:
    """The figures of the final table. Times are medians, without the first span, in which everything is compiled."""
    rows = trainer.history
    later = [row for row in rows if row["step_ms"] != rows[0]["step_ms"]] or rows
    summary = {
        "train_loss": statistics.fmean(row["loss"] for row in rows[-20:]),
        "held_out_loss": rows[-1]["held_out_loss"],
        "optimizer_bytes_per_parameter": optimizers.bytes_per_parameter(trainer.optimizer),
        "optimizer_step_ms": statistics.median(trainer.clock.milliseconds()),
        "train_step_ms": statistics.median(row["step_ms"] for row in later),
        "tokens_per_s": statistics.median(row["tokens_per_s"] for row in later),
    }
    if trainer.device.type == "cuda":
        summary["peak_gpu_gib"] = torch.cuda.max_memory_allocated(trainer.device) / 2**30
    return summary
