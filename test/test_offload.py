"""State in host memory: the bits of a step without, wherever copies are under way, and state dicts that wait for them.

On a GPU with real copies; on a CPU with the same code, told that state can live elsewhere there, and with streams that
put off what they are given for as long as events allow.
"""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from host_streams import streams_of
from torch import Tensor, nn

from lowbit_optim import Lion8bit, gradient_release, offload
from lowbit_optim.subclasses import OptimState8bit

SHAPES = [(6, 128), (5, 75), (100,), (65, 16), (7, 3, 3, 3), (64,), (0, 64), (64, 256), (33, 130), (128, 64), (40, 1)]
STEPS = 20
LIMIT = 4096  # bytes


@pytest.fixture(autouse=True)
def _small_and_eager(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Several chunks, and tensors that are larger than one."""
    monkeypatch.setattr(offload, "_CHUNK_BYTES", LIMIT)
    monkeypatch.setattr(offload, "is_offloaded", lambda p: True)
    monkeypatch.setattr(offload, "_CudaStreams", streams_of)
    with torch.compiler.set_stance("force_eager"):
        yield


def parameters(device: str, dtype: torch.dtype = torch.bfloat16) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype)) for shape in SHAPES]


def make(device: str, offload_state: bool = True, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Lion8bit:
    params = parameters(device, dtype)
    options = {"lr": 1e-2, "weight_decay": 0.1, "min_quantized_numel": 0, **options}
    groups = [{"params": params[::2]}, {"params": params[1::2], "lr": 3e-3, "weight_decay": 0.0}]
    return Lion8bit(groups, offload_state=offload_state, **options)


def all_parameters(optimizer: Lion8bit) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def train(optimizer: Lion8bit, steps: int = STEPS, first: int = 0) -> None:
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        for i, p in enumerate(all_parameters(optimizer)):
            grad = torch.randn(p.shape, generator=generator).to(p.device, p.dtype)
            p.grad = grad if p.requires_grad and (step % 3 or i % 4) else None
        optimizer.step()
        optimizer.zero_grad()


def parts(optimizer: Lion8bit) -> list[Tensor]:
    """The live state, after the copies are done."""
    optimizer._offload.wait()
    states = [value for p in all_parameters(optimizer) for value in optimizer.state[p].values()]
    return [x for s in states for x in ([s.codes, s.scale] if isinstance(s, OptimState8bit) else [s])]


def assert_equal(a: Lion8bit, b: Lion8bit) -> None:
    for x, y in zip([*all_parameters(a), *parts(a)], [*all_parameters(b), *parts(b)], strict=True):
        assert torch.equal(x.cpu(), y.cpu()), tuple(x.shape)
    assert [int(group["step"]) for group in a.param_groups] == [int(group["step"]) for group in b.param_groups]


# --- Streams that put off what they are given -------------------------------------------------------------------------


class Event:
    def __init__(self, stream: "Stream", position: int) -> None:
        self.stream, self.position = stream, position

    def synchronize(self) -> None:
        self.stream.run_until(self.position)


class Stream:
    """Runs what it was given in order, when it must, or when chance has it."""

    def __init__(self) -> None:
        self.done = 0
        self.work: list[Callable[[], None] | Event] = []

    def record_event(self) -> Event:
        return Event(self, len(self.work))

    def wait_event(self, event: Event) -> None:
        self.work.append(event)

    def run_until(self, position: int) -> None:
        while self.done < position:
            item = self.work[self.done]
            item.synchronize() if isinstance(item, Event) else item()
            self.done += 1


class Streams:
    """What :class:`offload._CudaStreams` is, for a CPU.

    Args:
        eager: the streams that run what they can as soon as it is given to them; the others wait until they must.
        waits: whether the compute stream runs ahead of nothing: the host then does the work itself, once it may.
    """

    def __init__(self, eager: str, waits: bool) -> None:
        self.compute, self.upload, self.download = Stream(), Stream(), Stream()
        self._eager = [getattr(self, name) for name in eager.split()]
        self._waits = waits

    def run(self, stream: Stream, function: Callable[[], None]) -> None:
        stream.work.append(function)
        for each in [*self._eager, *([stream] if stream is self.compute and self._waits else [])]:
            each.run_until(len(each.work))


class LazyStreams:
    """Makes the optimizers of a test use such streams."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, eager: str = "", waits: bool = False) -> None:
        self.made: list[Streams] = []
        monkeypatch.setattr(offload, "_CudaStreams", lambda device: self._make(eager, waits))
        if not waits:
            self._run = offload._run
            monkeypatch.setattr(offload, "_run", self._run_to_the_end)

    def _make(self, eager: str, waits: bool) -> Streams:
        self.made.append(Streams(eager, waits))
        return self.made[-1]

    def _run_to_the_end(self, chunks: Any, step: Any, streams: Streams) -> Any:
        """Of the compute stream, since the optimizer's own next steps are not put off with it."""
        end = self._run(chunks, step, streams)
        streams.compute.record_event().synchronize()
        return end


# --- The same bits --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "options",
    [{}, {"quantize": False}, {"fused": False}, {"master_weight_bits": 24}, {"master_weight_bits": 32}],
    ids=str,
)
def test_the_bits_are_those_of_state_on_the_device(device: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    """With a schedule; some parameters have no gradient in some steps."""
    pair = [make(device, offload_state, dtype, **options) for offload_state in (True, False)]
    for optimizer in pair:
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        for step in range(STEPS):
            train(optimizer, 1, step)
            scheduler.step()
    assert_equal(*pair)
    assert int(pair[0].param_groups[0]["step"]) == STEPS


@pytest.mark.parametrize("limit", [LIMIT, 1 << 20])
@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("eager", ["", "upload", "download", "upload download", "upload compute"])
def test_copies_wait_for_one_another(eager: str, waits: bool, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever stream is ahead, with many chunks and with one."""
    monkeypatch.setattr(offload, "_CHUNK_BYTES", limit)
    streams = LazyStreams(monkeypatch, eager, waits)
    pair = [make("cpu", offload_state, master_weight_bits=24) for offload_state in (True, False)]
    for optimizer in pair:
        train(optimizer, 8)
    assert_equal(*pair)
    assert len(streams.made) == 1


def test_state_lives_in_host_memory(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After steps, and after a checkpoint was loaded."""
    on_host: list[Any] = []
    to_host = offload.to_host
    monkeypatch.setattr(offload, "to_host", lambda state: on_host.append(to_host(state)) or on_host[-1])
    optimizer = make(device, master_weight_bits=24)
    for _ in range(2):
        train(optimizer, 2)
        assert all(part.device.type == "cpu" for part in parts(optimizer))
        assert all(part.is_pinned() == (device == "cuda") for part in parts(optimizer) if part.numel())
        assert all(any(optimizer.state[p] is state for state in on_host) for p in all_parameters(optimizer))
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def test_a_cpu_has_it_already(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert not offload.is_offloaded(torch.zeros(1))
    optimizer = make("cpu")
    train(optimizer, 1)
    assert optimizer._offload._ends == {}


def test_no_more_of_it_is_on_the_device_than_the_buffers(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three chunks, and the largest parameter's state."""
    sizes: dict[int, int] = {}
    place = offload._place

    def note(found: Any) -> Any:
        chunks = place(found)
        for chunk in chunks:
            sizes[chunk.slot] = max(sizes.get(chunk.slot, 0), chunk._used)
        return chunks

    monkeypatch.setattr(offload, "_place", note)
    optimizer = make(device)
    train(optimizer, 3)
    largest = max(p.numel() for p in all_parameters(optimizer))
    assert sorted(sizes) == [0, 1, 2, 3]
    assert all(sizes[slot] <= LIMIT for slot in range(3))
    assert sizes[3] < 1.1 * largest


def test_a_learning_rate_of_0_moves_and_counts_nothing(device: str) -> None:
    pair = [make(device, offload_state) for offload_state in (True, False)]
    for optimizer in pair:
        for lr in (1e-2, 0.0, 1e-2):
            for group in optimizer.param_groups:
                group["lr"] = lr
            train(optimizer, 3)
    assert_equal(*pair)


def test_a_learning_rate_on_the_device(device: str) -> None:
    pair = [make(device, offload_state, lr=torch.tensor(1e-2, device=device)) for offload_state in (True, False)]
    for optimizer in pair:
        for lr in (1e-2, 0.0, 1e-3):
            optimizer.param_groups[0]["lr"].fill_(lr)
            train(optimizer, 3)
    assert_equal(*pair)


def test_parameters_frozen_and_added(device: str) -> None:
    pair = [make(device, offload_state) for offload_state in (True, False)]
    for optimizer in pair:
        all_parameters(optimizer)[3].requires_grad_(False)
        train(optimizer, 3)
        all_parameters(optimizer)[3].requires_grad_(True)
        optimizer.add_param_group({"params": parameters(device)[:1], "block_size": 32})
        train(optimizer, 3, 3)
    assert_equal(*pair)


@pytest.mark.compiler
@pytest.mark.filterwarnings("error:cannot compile")
def test_compiled_steps(device: str) -> None:
    pair = [make(device, offload_state, fused=False) for offload_state in (True, False)]
    with torch.compiler.set_stance("default"):
        train(pair[0], 4)
    train(pair[1], 4)
    assert_equal(*pair)


def test_with_gradient_release(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    for saving in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))).to(device, torch.bfloat16)
        optimizer = Lion8bit(model.parameters(), lr=1e-2, min_quantized_numel=0, offload_state=saving)
        if saving:
            release = gradient_release(model, optimizer)
            monkeypatch.setitem(type(release)._take.__globals__, "_MAX_WAITING_SHARE", 0.2)
        for step in range(STEPS):
            x = torch.randn(4, 64, generator=torch.Generator().manual_seed(step)).to(device, torch.bfloat16)
            model(x).square().mean().backward()
            assert all((p.grad is None) == saving for p in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
        runs.append(optimizer)
    assert_equal(*runs)


# --- State dicts ----------------------------------------------------------------------------------------------------


def test_a_checkpoint_goes_both_ways(device: str) -> None:
    """Saved with and without, loaded without and with; the saved tensors are alike but for their device."""
    for before, after in [(True, False), (False, True), (True, True)]:
        first, second = (make(device, offload_state, master_weight_bits=32) for offload_state in (before, after))
        train(first, 5)
        saved = copy.deepcopy(first.state_dict())
        with torch.no_grad():
            for p, q in zip(all_parameters(second), all_parameters(first), strict=True):
                p.copy_(q)
        second.load_state_dict(saved)
        train(first, 5, 5)
        train(second, 5, 5)
        assert_equal(first, second)


@pytest.mark.parametrize("read", [Lion8bit.state_dict, Lion8bit.stalled_fraction, copy.deepcopy])
def test_what_is_read_waits_for_copies(read: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    streams = LazyStreams(monkeypatch, waits=True)
    optimizer, expected = make("cpu"), make("cpu", False)
    train(optimizer, 1)
    train(expected, 1)
    download = streams.made[0].download
    assert download.done < len(download.work)
    read(optimizer)
    assert download.done == len(download.work)
    assert_equal(optimizer, expected)


def test_weights_in_fp32(device: str) -> None:
    """Their residuals are in host memory."""
    model = nn.Linear(64, 64).to(device, torch.bfloat16)
    weights = {name: p.detach().float() + torch.rand_like(p.float()) * 1e-4 for name, p in model.named_parameters()}
    optimizer = Lion8bit(model.parameters(), offload_state=True, master_weight_bits=32)
    optimizer.load_fp32_state_dict(model, weights)
    exported = optimizer.fp32_state_dict(model)
    assert all(torch.equal(exported[name], weight) for name, weight in weights.items())
    model(torch.ones(64, device=device, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    exported = optimizer.fp32_state_dict(model)
    assert all(((exported[name] - w).abs() - 1e-4).abs().max() < 1e-7 for name, w in weights.items())


def test_saving_at_once_after_a_step(device: str) -> None:
    """On a GPU, with so much of it that copies take longer than it takes to ask."""
    numel = 1 << (26 if device == "cuda" else 14)
    p = nn.Parameter(torch.zeros(numel // 64, 64, device=device, dtype=torch.bfloat16))
    optimizer = Lion8bit([p], lr=1e-2, offload_state=True)
    for step in range(3):
        p.grad = torch.full_like(p, float(step + 1))
        optimizer.step()
        saved = optimizer.state_dict()["state"][0]["exp_avg"]
        assert (saved["codes"] == 127).all()
        assert torch.equal(saved["scale"], saved["scale"][:1].expand_as(saved["scale"]))
