"""Runs spread over processes that share a machine."""

import gc
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import torch

from benchmarks.gaps.training import Run, train
from benchmarks.lm import UsageError, hush

Outcome = dict[str, Any]  # what `train` returned, or {"error": one line}


class Worker:
    """A process that does one run after another on one device."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")  # a forked process cannot use CUDA
        self._pool = ProcessPoolExecutor(1, mp_context=context, initializer=_set_up, initargs=(self.device,))

    def submit(self, *args: Any) -> Future[Outcome | None]:
        try:
            return self._pool.submit(_train, *args)
        except BrokenProcessPool:  # it crashed while it had nothing to do
            self._start()
            return self._pool.submit(_train, *args)

    def outcome(self, future: Future[Outcome | None]) -> Outcome | None:
        """Of a run that ended. After an error on a GPU, which may stay with the process, the next has a new one."""
        try:
            outcome = future.result()
            is_fit = self.device.type == "cpu" or "error" not in (outcome or {})
        except BrokenProcessPool:
            outcome, is_fit = {"error": "its process crashed"}, False
        if not is_fit:
            self.close()
            self._start()
        return outcome

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


def execute(
    runs: Sequence[Run],
    workers: Sequence[Worker],
    folder: Path,
    deadline: float = float("inf"),
    expected_seconds: Callable[[Run], float] = lambda run: 0.0,
) -> Iterator[tuple[Run, Outcome]]:
    """Do what can be done by `deadline`, in this order, but first the runs that others start from.

    Args:
        folder: as for `train`.
        deadline: as `time.time()` counts. What it finds running is given up.
        expected_seconds: of a run; it is not started where it would not end in time.

    Yields:
        Each run that ended, bases too, and its outcome.
    """
    bases = list(dict.fromkeys(run.base for run in runs if run.base))
    pending, idle, running = [*bases, *runs], list(workers), {}

    def startable() -> Run | None:
        for run in pending:
            has_start = run.base is None or run.base.weights(folder).exists()
            if has_start and time.time() + expected_seconds(run) < deadline:
                return run
        return None

    while True:
        while idle and (run := startable()):
            pending.remove(run)
            worker = idle.pop(0)
            running[worker.submit(run, folder, worker.device, deadline, run in bases)] = worker, run
        if not running:
            return
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            worker, run = running.pop(future)
            idle.append(worker)
            if outcome := worker.outcome(future):
                yield run, outcome
                if "error" in outcome:
                    yield from ((other, outcome) for other in pending if other.base == run)


# --- In the process of a worker --------------------------------------------------------------------------------------


def _set_up(device: torch.device) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    hush()
    torch.set_num_threads(1)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for the runs that are to be deterministic
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _end_with_parent() -> None:
    """However that ends: a worker without one would go on using the device."""
    multiprocessing.parent_process().join()
    os._exit(1)


def _train(run: Run, folder: Path, device: torch.device, *args: Any) -> Outcome | None:
    """Errors become text here, since not every exception survives the way to another process."""
    try:
        return train(run, folder, device, *args)
    except UsageError as error:
        return {"error": str(error)}
    except Exception as error:
        first_line = next(iter(str(error).splitlines()), "no message")
        return {"error": f"{type(error).__name__}: {first_line}"}
    finally:
        if run.settings.compile:
            torch.compiler.reset()  # its graphs hold the model
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
