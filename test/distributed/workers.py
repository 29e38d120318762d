"""Processes that run functions as the ranks of a process group: started once, used by many tests.

A group of n ranks has NCCL and a GPU each where there are at least two GPUs, and n of them, else gloo and the CPU. With
one GPU nothing runs on it: a run that goes on with other ranks would change devices, whose matmuls differ.
"""

import contextlib
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

_TIMEOUT_S = 180
# Imported once, in a process that ranks are forked from: it takes seconds, and none of it starts a thread. Some of it
# asks how many GPUs there are, after which a forked process can use none.
_PRELOADED = ["lowbit_optim", "torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp"]


class Ranks:
    """``run(n, function, *args)`` calls ``function(*args)`` on n ranks and returns what each returned.

    The function must be at the top of a module. If a rank raises or hangs, all of its group are stopped, and the next
    call starts new ones.
    """

    def __init__(self) -> None:
        self._groups: dict[int, _Group] = {}

    def run(self, world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        if world_size not in self._groups:
            self._groups[world_size] = _Group(world_size)
        try:
            return self._groups[world_size].run(function, *args)
        except BaseException:
            self._groups.pop(world_size).stop()
            raise

    def stop(self) -> None:
        for group in self._groups.values():
            group.stop()
        self._groups.clear()


class _Group:
    def __init__(self, world_size: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([] if torch.cuda.device_count() else _PRELOADED)
        self._folder = tempfile.TemporaryDirectory()
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            args = (theirs, rank, world_size, os.path.join(self._folder.name, "store"))
            self._pipes.append(ours)
            self._processes.append(context.Process(target=_serve, args=args, daemon=True))
        for process in self._processes:
            process.start()

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((function, args))
        results: dict[Connection, Any] = {}
        while len(results) < len(self._pipes):
            ready = wait([pipe for pipe in self._pipes if pipe not in results], _TIMEOUT_S)
            if not ready:
                raise TimeoutError(f"{function.__name__} has not returned on every rank within {_TIMEOUT_S} s")
            for pipe in ready:
                result, error = self._received(pipe)
                if error:
                    raise AssertionError(f"rank {self._pipes.index(pipe)} of {len(self._pipes)}:\n{error}")
                results[pipe] = result
        return [results[pipe] for pipe in self._pipes]

    @staticmethod
    def _received(pipe: Any) -> tuple[Any, str | None]:
        try:
            return pipe.recv()
        except EOFError:
            return None, "the process ended"

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()


def _serve(pipe: Connection, rank: int, world_size: int, store: str) -> None:
    torch.set_num_threads(1)
    gpus = torch.cuda.device_count()
    backend = "nccl" if gpus > 1 and world_size <= gpus else "gloo"
    if backend == "nccl":
        torch.cuda.set_device(rank)
    else:
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported; conftest.py sets it if there is no GPU
    dist.init_process_group(
        backend,
        store=dist.FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=_TIMEOUT_S),
    )
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        torch.manual_seed(0)
        try:
            with torch.compiler.set_stance("force_eager"):  # as compiled, and sooner done
                pipe.send((function(*args), None))
        except BaseException:
            with contextlib.suppress(OSError):
                pipe.send((None, traceback.format_exc()))


def device() -> torch.device:
    """Of this rank."""
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
