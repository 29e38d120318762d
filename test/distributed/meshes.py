"""Parameters on every mesh, gradients that do not depend on it, and what one process makes of them.

How a mesh cuts a tensor is said here once more, by ``torch.chunk``, and independently of DTensor's own account of it.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor
from workers import device

from lowbit_optim import Lion8bit
from lowbit_optim.subclasses import OptimState8bit

Shape = tuple[int, ...]
Cuts = list[tuple[int, int]]  # (tensor dimension, mesh dimension) in the order in which a tensor is cut

SHAPES: list[Shape] = [
    (15, 512),
    (1601, 96),
    (3, 5),
    (1, 8192),
    (7, 3, 3, 3),
    (65, 8, 3, 3),
    (4099, 16),
    (4, 64, 96),
    (33, 130),
    (5000,),
]
OPTIONS = {"lr": 1e-2, "weight_decay": 0.1, "min_quantized_numel": 0}


class Bag(nn.Module):
    """A model that is nothing but parameters of some shapes."""

    def __init__(self, shapes: Sequence[Shape], dtype: torch.dtype = torch.bfloat16, device: Any = "cpu") -> None:
        super().__init__()
        for i, shape in enumerate(shapes):
            setattr(self, f"p{i}", nn.Parameter(initial(shape).to(device, dtype)))


def initial(shape: Shape) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@functools.cache
def gradient(shape: Shape, step: int) -> Tensor:
    """Of magnitudes from 1e-6 to 1, fp32."""
    generator = torch.Generator().manual_seed(1000 * step + sum(shape))
    return 10 ** (-6 * torch.rand(shape, generator=generator)) * torch.randn(shape, generator=generator)


@dataclass(frozen=True)
class Mesh:
    """One way to spread a model over ranks.

    Args:
        shape: of the device mesh; () is one process without any.
        build: ``(bag, device mesh)``: shards the bag's parameters.
        cuts: of a tensor with that shape.
    """

    shape: tuple[int, ...]
    build: Callable[[Bag, DeviceMesh], None]
    cuts: Callable[[Shape], Cuts]

    @property
    def world_size(self) -> int:
        return functools.reduce(lambda a, b: a * b, self.shape, 1)

    def make(self, shapes: Sequence[Shape], dtype: torch.dtype = torch.bfloat16) -> Bag:
        bag = Bag(shapes, dtype, device())
        if self.shape:
            self.build(bag, device_mesh(self.shape))
        return bag

    def part(self, whole: Tensor) -> Tensor:
        """What this rank should hold of a tensor."""
        for dim, mesh_dim in self.cuts(tuple(whole.shape)):
            chunks = whole.chunk(self.shape[mesh_dim], dim)
            index = device_mesh(self.shape).get_coordinate()[mesh_dim]
            whole = chunks[index] if index < len(chunks) else whole.narrow(dim, 0, 0)
        return whole


@functools.cache
def device_mesh(shape: tuple[int, ...]) -> DeviceMesh:
    names = ("dp", "tp")[: len(shape)]
    return init_device_mesh(device().type, shape, mesh_dim_names=names)


def placed(*placements: Placement) -> Callable[[Bag, DeviceMesh], None]:
    """By hand. Dimensions that a tensor does not have count as its last."""

    def build(bag: Bag, mesh: DeviceMesh) -> None:
        for name, p in list(bag.named_parameters()):
            own = [
                Shard(_dim(placement, p.ndim)) if isinstance(placement, Shard) else placement
                for placement in placements
            ]
            setattr(bag, name, nn.Parameter(distribute_tensor(p.detach(), mesh, own)))

    return build


def placed_cuts(*placements: Placement) -> Callable[[Shape], Cuts]:
    return lambda shape: [(_dim(p, len(shape)), i) for i, p in enumerate(placements) if isinstance(p, Shard)]


def _dim(placement: Shard, ndim: int) -> int:
    return min(placement.dim % ndim if placement.dim < 0 else placement.dim, ndim - 1)


def by_hand(shape: tuple[int, ...], *placements: Placement) -> Mesh:
    return Mesh(shape, placed(*placements), placed_cuts(*placements))


def fsdp(bag: Bag, mesh: DeviceMesh) -> None:
    fully_shard(bag, mesh=mesh)


def fsdp_over_tp(bag: Bag, mesh: DeviceMesh) -> None:
    """Tensor parallelism as its styles do it, the first dimension for every other parameter, else the last."""
    for i, (name, p) in enumerate(list(bag.named_parameters())):
        placement = Shard(0 if i % 2 == 0 else p.ndim - 1)
        setattr(bag, name, nn.Parameter(distribute_tensor(p.detach(), mesh["tp"], [placement])))
    fully_shard(bag, mesh=mesh["dp"])


def fsdp_over_tp_cuts(shapes: Sequence[Shape]) -> Callable[[Shape], Cuts]:
    tp_dim = {shape: 0 if i % 2 == 0 else len(shape) - 1 for i, shape in enumerate(shapes)}
    return lambda shape: [(tp_dim[shape], 1), (0, 0)]


def make_meshes(shapes: Sequence[Shape]) -> dict[str, Mesh]:
    first = lambda shape: [(0, 0)]  # noqa: E731
    return {
        "1": Mesh((), fsdp, lambda shape: []),
        "2": Mesh((2,), fsdp, first),
        "3": Mesh((3,), fsdp, first),
        "4": Mesh((4,), fsdp, first),
        "hsdp": Mesh((2, 2), fsdp, lambda shape: [(0, 1)]),
        "fsdp x tp": Mesh((2, 2), fsdp_over_tp, fsdp_over_tp_cuts(shapes)),
    }


# --- Training -------------------------------------------------------------------------------------------------------


def set_gradients(mesh: Mesh, params: Iterable[Any], step: int) -> None:
    for p in params:
        whole = gradient(tuple(p.shape), step).to(device(), p.dtype)
        if mesh.shape:
            part = mesh.part(whole).contiguous()
            p.grad = DTensor.from_local(part, p.device_mesh, p.placements, shape=p.shape, stride=p.stride())
        else:
            p.grad = whole


def train(mesh: Mesh, optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        set_gradients(mesh, parameters(optimizer), step)
        optimizer.step()
    optimizer.zero_grad()


def parameters(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [p for group in optimizer.param_groups for p in group["params"]]


ONE = Mesh((), fsdp, lambda shape: [])


@functools.cache
def reference(shapes: tuple[Shape, ...], steps: int, dtype: torch.dtype = torch.bfloat16) -> Lion8bit:
    """One process, uncompiled."""
    bag = ONE.make(shapes, dtype)
    optimizer = Lion8bit(bag.parameters(), **OPTIONS)
    train(ONE, optimizer, steps)
    return optimizer


def assert_same_bits(mesh: Mesh, optimizer: torch.optim.Optimizer, expected: torch.optim.Optimizer) -> None:
    """Weights, codes and scales, on each rank what it should hold."""
    for p, q in zip(parameters(optimizer), parameters(expected), strict=True):
        assert p.shape == q.shape
        what = f"of {tuple(p.shape)}, {getattr(p, 'placements', 'one process')}"
        assert same(p, mesh.part(q)), f"weights {what}"
        state, wanted = optimizer.state[p]["exp_avg"], expected.state[q]["exp_avg"]
        assert type(state) is (OptimState8bit if isinstance(wanted, OptimState8bit) else type(p.data)), what
        if isinstance(wanted, OptimState8bit):
            assert same(state.codes, mesh.part(wanted.codes)), f"codes {what}"
            state, wanted = state.dequantize(), wanted.dequantize()
        assert same(state, mesh.part(wanted)), f"momentum {what}"


def same(x: Any, part: Tensor) -> bool:
    """Whether this rank's part of ``x`` is that; one of them may be in host memory."""
    return torch.equal(local(x).cpu(), part.cpu())


def local(x: Any) -> Tensor:
    return (x.to_local() if isinstance(x, DTensor) else x).detach()
