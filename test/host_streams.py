"""Streams for state that is offloaded on a CPU, where there are none."""

from collections.abc import Callable
from typing import Any

import torch

from lowbit_optim.offload import _CudaStreams


def streams_of(device: torch.device) -> Any:
    """For ``offload._CudaStreams``: itself on a GPU."""
    return _CudaStreams(device) if device.type == "cuda" else NoStreams()


class NoStreams:
    """Of a CPU, where all is done when a call returns; stream and event too."""

    @property
    def compute(self) -> "NoStreams":
        return self

    upload = download = compute

    @staticmethod
    def run(stream: Any, function: Callable[[], None]) -> None:
        function()

    def record_event(self) -> "NoStreams":
        return self

    def wait_event(self, event: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass
