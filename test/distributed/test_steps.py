"""Steps of sharded parameters: every mesh gives the bits of one process, given the same gradients."""

import itertools
from typing import Any

import interpreter
import meshes
import pytest
import torch
import torch.distributed as dist
from meshes import OPTIONS, SHAPES, by_hand, make_meshes
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from workers import Ranks, device

from lowbit_optim import Lion8bit, codec, sharding, shards
from lowbit_optim.subclasses import OptimState8bit
from lowbit_optim.subclasses.blockwise import BlockwiseTensor, dequantize, parts

BY_HAND = {
    "rows on 2": by_hand((2,), Shard(0)),
    "dim 1 on 2": by_hand((2,), Shard(1)),
    "last dim on 2": by_hand((2,), Shard(-1)),
    "copies on 2": by_hand((2,), Replicate()),
    "dim 1 on 3": by_hand((3,), Shard(1)),
    "last dim on 3": by_hand((3,), Shard(-1)),
    "last dim on 4": by_hand((4,), Shard(-1)),
    "copies x last dim": by_hand((2, 2), Replicate(), Shard(-1)),
    "rows x last dim": by_hand((2, 2), Shard(0), Shard(-1)),
    "rows x rows": by_hand((2, 2), Shard(0), Shard(0)),
    "dim 1 x dim 1": by_hand((2, 2), Shard(1), Shard(1)),
    "dim 1 x last dim": by_hand((2, 2), Shard(1), Shard(-1)),
}
MESHES = {**make_meshes(SHAPES), **BY_HAND}


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_mesh_gives_the_bits_of_one_process(world_size: int, ranks: Ranks) -> None:
    """Reports 32 and 38: of any size. 20 steps with stochastic rounding; weights, codes and scales."""
    ranks.run(world_size, _every_mesh, world_size)


def _every_mesh(world_size: int) -> None:
    for mesh in MESHES.values():
        if mesh.world_size == world_size:
            bag = mesh.make(SHAPES)
            optimizer = Lion8bit(bag.parameters(), **OPTIONS)
            meshes.train(mesh, optimizer, 20)
            meshes.assert_same_bits(mesh, optimizer, meshes.reference(tuple(SHAPES), 20))


def test_sharded_momentum_is_written_as_in_one_process(ranks: Ranks) -> None:
    """Of any sharding, from values that are sharded in any way, or whole; blocks that are cut as well."""
    ranks.run(2, _written)


def _written() -> None:
    x = torch.randn(6, 40).to(device())
    expected = OptimState8bit.from_float(x, 16)
    mesh = init_device_mesh(device().type, (2,))
    placements = Replicate(), Shard(0), Shard(1)
    for placement, other in itertools.product(placements, placements):
        p = nn.Parameter(distribute_tensor(x, mesh, [placement]))
        state = torch.zeros_like(sharding.zeros(p, OptimState8bit, 16))
        cut_otherwise = sharding.zeros(nn.Parameter(distribute_tensor(x, mesh, [other])), OptimState8bit, 16).copy_(x)
        for source in (distribute_tensor(x, mesh, [other]), x, cut_otherwise, expected):
            state.zero_()
            state.copy_(source)
            assert torch.equal(shards.full(state.codes), expected.codes)
            assert torch.equal(shards.full(state.scale), expected.scale)
        state.copy_(state.dequantize() * 0.5)
        assert torch.equal(shards.full(state.dequantize()), expected.dequantize() * 0.5)
        with pytest.raises(TypeError, match=r"write into sharded state with state.copy_"):
            OptimState8bit.from_float(p, 16)


@pytest.mark.compiler
def test_compiled_steps_of_shards_equal_eager_ones(ranks: Ranks) -> None:
    """Aligned, ragged and flat; with the fewest graphs that give every kind of position."""
    ranks.run(2, _compiled)


def _compiled() -> None:
    shapes = [(6, 128), (33, 130), (101,)]
    for mesh in (make_meshes(shapes)["2"], by_hand((2,), Shard(-1))):
        bag = mesh.make(shapes)
        optimizer = Lion8bit(bag.parameters(), **OPTIONS)
        with torch.compiler.set_stance("default"):
            meshes.train(mesh, optimizer, 3)
        meshes.assert_same_bits(mesh, optimizer, meshes.reference(tuple(shapes), 3))


def test_replicas_of_a_ddp_model_stay_equal(ranks: Ranks) -> None:
    """100 steps on different data with stochastic rounding, which would drift apart if ranks drew their own noise."""
    weights = ranks.run(2, _ddp)
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def _ddp() -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32)).to(device(), torch.bfloat16)
    replica = DistributedDataParallel(model)
    optimizer = Lion8bit(replica.parameters(), lr=1e-3, weight_decay=0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(100):
        replica(torch.randn(4, 64, generator=generator).to(device(), torch.bfloat16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().cpu() for p in model.parameters()]


class Linear16(BlockwiseTensor):
    """Codes and scales of other dtypes than OptimState8bit's."""

    @staticmethod
    def _encode(x: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
        rows, row_length = codec.row_layout(x.shape, block_size)
        values = nn.functional.pad(x.float().reshape(rows, row_length), (0, -row_length % block_size))
        blocks = values.view(rows, codec.blocks_per_row(row_length, block_size), block_size)
        scale = blocks.abs().amax(-1, keepdim=True)
        codes = torch.where(scale > 0, blocks / scale * 32767, 0.0).round().to(torch.int16).view(values.shape)
        return codes[:, :row_length].reshape(x.shape), scale.view(codec.scale_shape(x.shape, block_size))

    @staticmethod
    def _decode(codes: Tensor, scale: Tensor, block_size: int, dtype: torch.dtype) -> Tensor:
        rows, row_length = codec.row_layout(codes.shape, block_size)
        scale = scale.reshape(rows, -1).repeat_interleave(block_size, 1)[:, :row_length]
        return (codes.reshape(rows, row_length) * (scale / 32767)).view(codes.shape).to(dtype)


class Linear16Lion(Lion8bit):
    state_class = Linear16
    _new_fused_step = None


def test_another_format_of_state_is_sharded_like_its_parameter(ranks: Ranks) -> None:
    """And loads from a checkpoint by value, whose codes of as many elements a block mean something else."""
    ranks.run(2, _another_format)


def _another_format() -> None:
    shapes = [(15, 512), (7, 3, 3, 3), (33, 130), (5000,)]
    mesh = make_meshes(shapes)["2"]
    expected = Linear16Lion(meshes.ONE.make(shapes).parameters(), **OPTIONS)
    optimizer, resumed = (Linear16Lion(mesh.make(shapes).parameters(), **OPTIONS) for _ in range(2))
    meshes.train(meshes.ONE, expected, 3)
    meshes.train(mesh, optimizer, 3)
    resumed.load_state_dict(optimizer.state_dict())
    for p, r, q in zip(*map(meshes.parameters, (optimizer, resumed, expected)), strict=True):
        state, again, wanted = optimizer.state[p]["exp_avg"], resumed.state[r]["exp_avg"], expected.state[q]["exp_avg"]
        assert meshes.same(p, mesh.part(q))
        assert isinstance(state, Linear16) == isinstance(again, Linear16) == (p.ndim > 1)
        for part, loaded, whole in zip(parts(state), parts(again), parts(wanted), strict=True):
            assert part.dtype == loaded.dtype == whole.dtype
            assert part.shape == loaded.shape == whole.shape
            assert meshes.same(part, mesh.part(whole))
            if part.dtype == torch.int16:  # the scale is off by what dequantisation rounds
                assert meshes.same(loaded, mesh.part(whole))

    other = Lion8bit(mesh.make(shapes).parameters(), **OPTIONS)
    meshes.train(mesh, other, 1)
    resumed.load_state_dict(other.state_dict())
    for p, q in zip(meshes.parameters(resumed), meshes.parameters(other), strict=True):
        momentum, values = (meshes.local(dequantize(o.state[x]["exp_avg"])) for o, x in ((resumed, p), (other, q)))
        torch.testing.assert_close(momentum, values, rtol=0, atol=values.abs().max().item() / 32767)


# --- Communication --------------------------------------------------------------------------------------------------


def test_only_shared_blocks_need_other_ranks(ranks: Ranks) -> None:
    """One all-reduce for all of them, and none where shards hold whole blocks."""
    ranks.run(2, _collectives)


def _collectives() -> None:
    for mesh, expected in [(make_meshes(SHAPES)["2"], 0), (by_hand((2,), Shard(-1)), 1)]:
        optimizer = Lion8bit(mesh.make(SHAPES).parameters(), **OPTIONS)
        meshes.train(mesh, optimizer, 1)
        meshes.set_gradients(mesh, meshes.parameters(optimizer), 1)
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            optimizer.step()
        calls = [event.name for event in profiler.events() if event.name.startswith(("gloo:", "nccl:"))]
        assert len(calls) == expected, calls


def test_a_gradient_with_other_placements_is_redistributed(ranks: Ranks) -> None:
    ranks.run(2, _partial_gradient)


def _partial_gradient() -> None:
    mesh = make_meshes(SHAPES)["2"]
    optimizer = Lion8bit(mesh.make(SHAPES, torch.float32).parameters(), **OPTIONS)
    for p in meshes.parameters(optimizer):
        whole = meshes.gradient(tuple(p.shape), 0).to(device())
        halves = whole / 2  # exactly
        p.grad = DTensor.from_local(halves, p.device_mesh, [Partial()], shape=p.shape, stride=p.stride())
    optimizer.step()
    meshes.assert_same_bits(mesh, optimizer, meshes.reference(tuple(SHAPES), 1, torch.float32))


# --- How models come to be sharded ----------------------------------------------------------------------------------


def test_what_is_quantised_depends_on_the_whole_parameter(ranks: Ranks) -> None:
    """Reports 36 and 37: (15, 512) on 2 ranks has 4096 elements on one and 3584 on the other."""
    for mesh_shape in [(2, 1), (1, 2)]:
        kinds = ranks.run(2, _kinds, mesh_shape)
        assert kinds == [["OptimState8bit", "OptimState8bit", "DTensor"]] * 2


def _kinds(mesh_shape: tuple[int, int]) -> list[str]:
    mesh = by_hand(mesh_shape, Shard(0), Shard(1))
    optimizer = Lion8bit(mesh.make([(6, 1024), (15, 512), (15, 256)]).parameters())
    meshes.train(mesh, optimizer, 1)
    return [type(optimizer.state[p]["exp_avg"]).__name__ for p in meshes.parameters(optimizer)]


def test_fsdp_models_train(ranks: Ranks) -> None:
    """With real gradients: CPU offload, meta initialisation, an optimizer built before, steps inside backward."""
    ranks.run(2, _fsdp_models)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(96, 130), nn.Linear(130, 15))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def _net(dtype: torch.dtype = torch.bfloat16) -> Net:
    torch.manual_seed(0)
    return Net().to(device(), dtype)


def _backward(model: nn.Module, step: int, scale: float = 1.0) -> None:
    """Every rank has the same data, so that the mean over ranks is what one process has."""
    x = torch.randn(8, 96, generator=torch.Generator().manual_seed(step))
    (scale * model(x.to(device(), torch.bfloat16)).float().square().mean()).backward()


def _fsdp_models() -> None:
    expected = _trained(_net())
    for build in (_sharded, _offloaded, _from_meta):
        _assert_equal(_trained(build()), expected)
    _assert_equal(_built_before(), expected)
    _assert_equal(_stepped_in_backward(), expected)
    _assert_equal(_gradients_left_set(), expected)


def _options() -> dict[str, Any]:
    return {"lr": 1e-3, "weight_decay": 0.1, "min_quantized_numel": 0}


def _trained(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> nn.Module:
    optimizer = optimizer or Lion8bit(model.parameters(), **_options())
    for step in range(3):
        _backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    return model


def _sharded(model: nn.Module | None = None, **options: Any) -> nn.Module:
    model = model or _net()
    for layer in (*model.layers, model):
        fully_shard(layer, mesh=meshes.device_mesh((2,)), **options)
    return model


def _offloaded() -> nn.Module:
    return _sharded(_net().cpu(), offload_policy=CPUOffloadPolicy(pin_memory=torch.cuda.is_available()))


def _from_meta() -> nn.Module:
    with torch.device("meta"):
        model = Net().to(torch.bfloat16)
    _sharded(model).to_empty(device=device())
    whole = _net().state_dict()
    set_model_state_dict(model, whole, options=StateDictOptions(full_state_dict=True))
    return model


def _built_before() -> nn.Module:
    """Report 43: the optimizer is given the new parameters in place of the old."""
    model = _net()
    optimizer = Lion8bit(model.parameters(), **_options())
    _sharded(model)
    with pytest.warns(UserWarning, match="no parameter has a gradient.*fully_shard"):
        optimizer.step()
    optimizer = Lion8bit(_net().parameters(), **_options())
    optimizer.param_groups[0]["params"] = list(model.parameters())
    return _trained(model, optimizer)


def _stepped_in_backward() -> nn.Module:
    """Report 45: an optimizer a parameter, stepped by hooks. Noise counts parameters, so each is told its number.

    Before torch 2.13, FSDP calls the hooks while a gradient is still on its way to pinned memory.
    """
    model = _sharded(offload_policy=CPUOffloadPolicy(pin_memory=False))
    dummies = [nn.Parameter(torch.zeros(1), requires_grad=False) for _ in model.parameters()]
    for index, p in enumerate(model.parameters()):
        optimizer = Lion8bit([*dummies[:index], p], **_options())

        def step(p: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        p.register_post_accumulate_grad_hook(step)
    for i in range(3):
        _backward(model, i)
    return model


def _gradients_left_set() -> nn.Module:
    """Report 33."""
    model = _sharded()
    optimizer = Lion8bit(model.parameters(), **_options())
    for step in range(3):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        _backward(model, step)
        optimizer.step()
    return model


def _assert_equal(actual: nn.Module, expected: nn.Module) -> None:
    for (name, p), q in zip(actual.named_parameters(), expected.parameters(), strict=True):
        whole = torch.cat(_gathered(p.to_local().cpu()))
        assert whole.isfinite().all()
        assert torch.equal(whole, q.detach().cpu()), name


def _gathered(x: Tensor) -> list[Tensor]:
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, x.detach())
    return parts


def test_stochastic_rounding_is_unbiased_and_differs_between_ranks(ranks: Ranks) -> None:
    """Report 40. A weight of 1 loses 1e-4 a step, an eightieth of the distance to its neighbour in bf16."""
    halves = ranks.run(2, _many_small_updates)
    for half in halves:
        assert half.float().mean() == pytest.approx(1 - 100 * 1e-4, abs=3e-4)
    assert not torch.equal(*halves)


def _many_small_updates() -> Tensor:
    whole = torch.ones(128, 64, dtype=torch.bfloat16, device=device())
    p = nn.Parameter(distribute_tensor(whole, meshes.device_mesh((2,)), [Shard(0)]))
    optimizer = Lion8bit([p], lr=1e-4)
    for _ in range(100):
        p.grad = torch.ones_like(p)
        optimizer.step()
    return p.to_local().detach().cpu()


# --- Beside the fused step ------------------------------------------------------------------------------------------


def test_the_fused_step_takes_whole_rows_and_leaves_the_rest(ranks: Ranks) -> None:
    """Beside one another, and beside a parameter that is not sharded: the bits of one process."""
    pytest.importorskip("triton")
    for fused, of in ranks.run(2, _partly_fused):
        assert fused == of


def _partly_fused() -> tuple[list[bool], list[bool]]:
    fused, expected = [], []
    for mesh, takes_shards in ((make_meshes(SHAPES)["2"], True), (by_hand((2,), Shard(-1)), False)):
        plain = nn.Parameter(_ones())
        optimizer = Lion8bit([*mesh.make(SHAPES).parameters(), plain], **OPTIONS)
        *sharded, _ = meshes.parameters(optimizer)
        with interpreter.fused_on(device().type):
            for step in range(3):
                meshes.set_gradients(mesh, sharded, step)
                plain.grad = _ones()
                optimizer.step()
            assert not optimizer._step_supports_amp_scaling
        (plan,) = optimizer._plans.values()
        stepped = len(plan.fused._grads.addresses)
        fused.append(stepped == len(SHAPES) + 1 if takes_shards else stepped < len(SHAPES) + 1)
        expected.append(True)
        del optimizer.param_groups[0]["params"][-1]
        meshes.assert_same_bits(mesh, optimizer, meshes.reference(tuple(SHAPES), 3))
    return fused, expected


def test_fused_true_is_refused_where_rows_are_cut(ranks: Ranks) -> None:
    ranks.run(2, _fused)


def _fused() -> None:
    p = nn.Parameter(distribute_tensor(_ones(), meshes.device_mesh((2,)), [Shard(1)]))
    p.grad = torch.ones_like(p)
    optimizer = Lion8bit([p], fused=True)
    with pytest.raises(RuntimeError, match=r"shape \(5, 64\) cannot be stepped so: this rank holds .* rows"):
        optimizer.step()
    assert p.to_local().eq(1).all()


def _ones() -> Tensor:
    return torch.ones(5, 64, device=device())


def _rows() -> Any:
    return nn.Parameter(distribute_tensor(_ones(), meshes.device_mesh((2,)), [Shard(0)]))


# --- What cannot be stepped -----------------------------------------------------------------------------------------


def test_flattened_parameters_are_refused(ranks: Ranks) -> None:
    """Reports 2, 9 and 37: FSDP1, before or after the optimizer is built, hides the shapes that blocks follow."""
    ranks.run(2, _fsdp1)


def _fsdp1() -> None:
    for use_orig_params in (True, False):
        model = FullyShardedDataParallel(_net(), use_orig_params=use_orig_params, device_id=device())
        with pytest.raises(NotImplementedError, match=r"flattened buffer.*Use FSDP2.*fully_shard"):
            Lion8bit(model.parameters())
    model = _net()
    optimizer = Lion8bit(model.parameters())
    model = FullyShardedDataParallel(model, use_orig_params=True, device_id=device())
    _backward(model, 0)
    with pytest.raises(NotImplementedError, match=r"flattened buffer.*Use FSDP2.*fully_shard"):
        optimizer.step()


def test_shards_that_are_not_what_they_say_are_refused(ranks: Ranks) -> None:
    ranks.run(2, _wrong_shards)


def _wrong_shards() -> None:
    mesh = meshes.device_mesh((2,))
    rows = torch.zeros(3, 64, device=device())
    wrong = nn.Parameter(DTensor.from_local(rows, mesh, [Shard(0)], shape=(8, 64), stride=(64, 1)))
    right = nn.Parameter(distribute_tensor(torch.zeros(5, 64, device=device()), mesh, [Shard(0)]))
    wrong.grad, right.grad = torch.zeros_like(wrong), torch.ones_like(right)
    with pytest.raises(ValueError, match=r"holds a shard of shape \(3, 64\) .* imply \(4, 64\)\. Pass shape"):
        Lion8bit([right, wrong]).step()
    assert not right.to_local().any()

    plain = nn.Parameter(torch.zeros(5, 64, device=device()))
    right.grad = None
    right.grad, plain.grad = torch.zeros_like(plain), torch.zeros_like(right)
    for p in (right, plain):
        with pytest.raises(TypeError, match=r"parameter 0 .* a DTensor.* a plain tensor|a plain tensor.* a DTensor"):
            Lion8bit([p]).step()


def test_nothing_moves_if_a_parameter_of_a_later_group_is_wrong(ranks: Ranks) -> None:
    ranks.run(2, _wrong_group)


def _wrong_group() -> None:
    mesh = by_hand((2,), Shard(-1))  # whose momentum is decoded and encoded again
    right, wrong = mesh.make([(5, 64)]).p0, _rows()
    optimizer = Lion8bit([{"params": [right]}, {"params": [wrong]}], **OPTIONS)
    for step in range(2):
        meshes.set_gradients(mesh, [right], step)
        if step == 0:
            wrong.grad = torch.ones_like(wrong)
            optimizer.step()
    exp_avg = optimizer.state[right]["exp_avg"]
    held = [right, exp_avg.codes, exp_avg.scale]
    before = [meshes.local(x).clone() for x in held]
    wrong.grad = None
    wrong.grad = _ones()  # a plain tensor
    with pytest.raises(TypeError, match=r"parameter 1 .* is a DTensor, its gradient a plain tensor"):
        optimizer.step()
    assert all(torch.equal(meshes.local(x), y) for x, y in zip(held, before, strict=True))
    assert [int(group["step"]) for group in optimizer.param_groups] == [1, 1]
