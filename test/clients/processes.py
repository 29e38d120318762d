"""Runs a function on two processes, with what ``torchrun`` tells them about each other."""

import multiprocessing
import os
import socket
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torchvision_names  # noqa: F401  # in each process too

RANKS = 2
# Imported once, in a process that ranks are forked from: it takes seconds, and none of it starts a thread.
_PRELOADED = ["torchvision_names", "lowbit_optim", "torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp"]


def run(function: Callable[[Path], None], folder: Path) -> None:
    """Call ``function(folder)`` on each; it must be at the top of a module. Raises what one of them raises."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    multiprocessing.get_context("forkserver").set_forkserver_preload(_PRELOADED)
    method = "spawn" if torch.cuda.is_available() else "forkserver"
    with mock.patch.dict(os.environ, CUDA_VISIBLE_DEVICES=""):  # these are tests of CPUs, on any machine
        mp.start_processes(_run_rank, args=(function, port, folder), nprocs=RANKS, start_method=method)


def _run_rank(rank: int, function: Callable[[Path], None], port: int, folder: Path) -> None:
    torch.set_num_threads(1)
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS, "GROUP_RANK": 0}
    address = {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "none"}
    os.environ.update({key: str(value) for key, value in {**ranks, **address}.items()})
    with torch.compiler.set_stance("force_eager"):
        function(folder)
    if dist.is_initialized():
        dist.destroy_process_group()
