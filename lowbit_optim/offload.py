"""State that lives in host memory and passes through a few device buffers during a step.

A step goes through chunks of parameters. While one is stepped, the state of the next is on its way to the device, and
that of the one before on its way back: three streams, three buffers, and an event wherever one has to wait for another.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack, to_dlpack

from lowbit_optim import sharding, shards
from lowbit_optim.hyperparameters import is_capturing
from lowbit_optim.updates import Updates

_CHUNK_BYTES = 64 << 20  # a copy of so many takes many times as long as it takes to start one
_BUFFERS = 3  # with two, a copy to the device would wait for the one back from it
_ALIGNMENT = 256  # bytes; what torch's own allocators give


def is_offloaded(p: Tensor) -> bool:
    """Whether the state of a parameter can live elsewhere than what this rank holds of it."""
    return shards.to_local(p).device.type == "cuda"


def to_host(state: dict[str, Any]) -> dict[str, Any]:
    """A copy of a parameter's state, its layout kept, whose memory is the host's, pinned."""
    return {key: sharding.map_parts(value, _pinned) for key, value in state.items()}


def _pinned(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=x.is_cuda).copy_(x)


class Chunk:
    """Parameters that are stepped together, and where their state is meanwhile.

    Attributes:
        group: their group's number.
        updates: with state in a buffer, which is there between :meth:`upload` and :meth:`download`.
        slot: the number of that buffer.
        device: where it is.
    """

    def __init__(self, part: "_Part", slot: int, buffer: Tensor) -> None:
        self.group, self.slot, self.device = part.group, slot, buffer.device
        self._copies: list[tuple[Tensor, Tensor]] = []  # in host memory, and in the buffer
        self._used = 0

        def place(host: Tensor) -> Tensor:
            if host.is_cuda:  # somebody has put it there, where it may stay
                return host
            there = _cut(buffer, self._used, host)
            self._copies.append((host, there))
            self._used += _aligned(host.nbytes)
            return there

        placed = {name: [sharding.map_parts(x, place) for x in column] for name, column in part.updates.state.items()}
        self.updates = part.updates._replace(**placed)

    def upload(self) -> None:
        for host, there in self._copies:
            there.copy_(host, non_blocking=True)

    def download(self) -> None:
        for host, there in self._copies:
            host.copy_(there, non_blocking=True)


def _cut(buffer: Tensor, start: int, like: Tensor) -> Tensor:
    """Memory of a buffer as a tensor, by way of DLPack: a graph does not take views of one tensor in several dtypes."""
    return from_dlpack(to_dlpack(buffer[start : start + like.nbytes].view(like.dtype).view(like.shape)))


class Offload:
    """The copies of one optimizer."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}
        self._ends: dict[torch.device, Any] = {}  # events, after each of which all state is back in host memory

    def split(self, collected: list[Updates]) -> tuple[list[Updates], list[Chunk]]:
        """What has its state on its own device, for each group, and chunks of the rest; nothing is copied yet."""
        rest, parts = [], []
        for group, updates in enumerate(collected):
            chosen = [is_offloaded(p) for p in updates.params]
            rest.append(updates.select([not each for each in chosen]))
            parts += [_Part(group, *part) for part in _parts(updates.select(chosen))]
        if parts:
            _check_not_recorded()
        return rest, _place(parts)

    def run(self, chunks: Sequence[Chunk], step: Callable[[Chunk], None]) -> None:
        """Call ``step`` for each chunk with its state on its device, on that device's current stream.

        What comes after on that stream comes after the last copy, too.
        """
        for device, same_device in itertools.groupby(chunks, lambda chunk: chunk.device):
            if device not in self._streams:
                self._streams[device] = _CudaStreams(device)
            self._ends[device] = _run(same_device, step, self._streams[device])

    def wait(self) -> None:
        """Until all state is back in host memory."""
        for end in self._ends.values():
            end.synchronize()
        self._ends.clear()


def _check_not_recorded() -> None:
    what = "a CUDA graph" if is_capturing() else None
    what = "torch.compile" if torch.compiler.is_compiling() else what
    if what:
        raise RuntimeError(
            f"offload_state=True: the step copies on streams of its own, and cannot be part of {what}. Call it "
            "outside, or leave the state on the device"
        )


def _run(chunks: Iterable[Chunk], step: Callable[[Chunk], None], streams: Any) -> Any:
    """On one device. Returns an event after the last copy."""
    upload, compute, download = streams.upload, streams.compute, streams.download
    free: dict[int, Any] = {}  # events, after each of which a buffer may be written again
    upload.wait_event(compute.record_event())  # the buffers are new, and what is copied may have been written just now
    try:
        for chunk in chunks:
            if chunk.slot in free:
                upload.wait_event(free[chunk.slot])
            streams.run(upload, chunk.upload)
            compute.wait_event(upload.record_event())
            streams.run(compute, functools.partial(step, chunk))
            download.wait_event(compute.record_event())
            streams.run(download, chunk.download)
            free[chunk.slot] = download.record_event()
    finally:  # the compute stream owns the buffers, and may use their memory otherwise from here on
        end = download.record_event()
        compute.wait_event(upload.record_event())
        compute.wait_event(end)
    return end


class _Part(NamedTuple):
    group: int
    updates: Updates
    nbytes: int

    @property
    def device(self) -> torch.device:
        return shards.to_local(self.updates.params[0]).device


def _place(parts: list[_Part]) -> list[Chunk]:
    """In buffers that take turns. What exceeds ``_CHUNK_BYTES`` has one of its own, since it would need three."""
    chunks: list[Chunk] = []
    for device in dict.fromkeys(part.device for part in parts):
        own = [part for part in parts if part.device == device]
        small = itertools.cycle(range(_BUFFERS))
        slots = [next(small) if part.nbytes <= _CHUNK_BYTES else _BUFFERS for part in own]
        sizes: dict[int, int] = {}
        for part, slot in zip(own, slots, strict=True):
            sizes[slot] = max(part.nbytes, sizes.get(slot, 0))
        buffers = {slot: torch.empty(size, dtype=torch.uint8, device=device) for slot, size in sizes.items()}
        chunks += [Chunk(part, slot, buffers[slot]) for part, slot in zip(own, slots, strict=True)]
    return chunks


def _parts(updates: Updates) -> Iterator[tuple[Updates, int]]:
    """Parts of updates, and how much memory their state takes: at most ``_CHUNK_BYTES``, or one parameter's.

    Parameters whose step is a collective call are one part, since all ranks must step the same ones together.
    """
    devices = [shards.to_local(p).device for p in updates.params]
    for device in dict.fromkeys(devices):
        yield from _parts_of_device(updates.select([each == device for each in devices]))


def _parts_of_device(updates: Updates) -> Iterator[tuple[Updates, int]]:
    sizes = [sum(map(_nbytes, states)) for states in zip(*updates.state.values(), strict=True)]
    rows = zip(updates.params, updates.grads, updates.exp_avgs, strict=True)
    numbers = [0 if sharding.needs_other_ranks(*row) else -1 for row in rows]  # of the part that each is in
    last, filled = 1, 0
    for i, size in enumerate(sizes):
        if numbers[i] != 0:
            if filled and filled + size > _CHUNK_BYTES:
                last, filled = last + 1, 0
            numbers[i] = last
            filled += size
    for number in range(last + 1):
        chosen = [each == number for each in numbers]
        if any(chosen):
            yield updates.select(chosen), sum(itertools.compress(sizes, chosen))


def _nbytes(state: Any) -> int:
    """Of a buffer, that one tensor of state takes."""
    return sum(_aligned(part.nbytes) for part in sharding.local_parts(state))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


# --- Streams --------------------------------------------------------------------------------------------------------


class _CudaStreams:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.upload = torch.cuda.Stream(device)
        self.download = torch.cuda.Stream(device)

    @property
    def compute(self) -> Any:
        return torch.cuda.current_stream(self._device)

    @staticmethod
    def run(stream: Any, function: Callable[[], None]) -> None:
        with torch.cuda.stream(stream):
            function()
