"""Master weights of sharded parameters: the bits of one process, in steps, in checkpoints and in fp32."""

import itertools
from pathlib import Path

import interpreter
import meshes
import pytest
import torch
import torch.distributed.checkpoint as dcp
from meshes import ONE, OPTIONS, Bag, Mesh, by_hand, local, make_meshes
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel
from workers import Ranks, device

from lowbit_optim import Lion8bit
from lowbit_optim.codec import merge_weight

SHAPES = [(15, 512), (65, 96), (3, 5), (7, 3, 3, 3), (33, 130), (500,), (4, 64, 96)]
MESHES = {
    **make_meshes(SHAPES),
    "last dim": by_hand((2,), Shard(-1)),
    "copies": by_hand((2,), Replicate()),
    "rows x last dim": by_hand((2, 2), Shard(0), Shard(-1)),
    "dim 1 x last dim": by_hand((2, 2), Shard(1), Shard(-1)),  # several pieces a shard
}
STEPS = 5
CASES = [(24, torch.bfloat16), (32, torch.bfloat16), (24, torch.float16)]


def trained(
    mesh: Mesh, bits: int | None, dtype: torch.dtype = torch.bfloat16, steps: int = STEPS
) -> tuple[Bag, Lion8bit]:
    bag = mesh.make(SHAPES, dtype)
    optimizer = Lion8bit(bag.parameters(), master_weight_bits=bits, **OPTIONS)
    meshes.train(mesh, optimizer, steps)
    return bag, optimizer


def assert_as_one_process(mesh: Mesh, optimizer: Lion8bit, expected: Lion8bit) -> None:
    meshes.assert_same_bits(mesh, optimizer, expected)
    for p, q in zip(meshes.parameters(optimizer), meshes.parameters(expected), strict=True):
        residual = optimizer.state[p]["master_residual"]
        assert torch.equal(local(residual), mesh.part(expected.state[q]["master_residual"])), tuple(p.shape)
        assert getattr(residual, "placements", None) == getattr(p, "placements", None)


@pytest.mark.parametrize("world_size", [2, 4])
def test_every_mesh_gives_the_bits_of_one_process(world_size: int, ranks: Ranks) -> None:
    ranks.run(world_size, _every_mesh, world_size)


def _every_mesh(world_size: int) -> None:
    for bits, dtype in CASES:
        expected = trained(ONE, bits, dtype)[1]
        for mesh in MESHES.values():
            if mesh.world_size == world_size:
                assert_as_one_process(mesh, trained(mesh, bits, dtype)[1], expected)


def test_the_fused_step_of_shards_does_too(ranks: Ranks) -> None:
    ranks.run(2, _fused)


def _fused() -> None:
    for bits in (24, 32):
        with interpreter.fused_on(device().type):
            _, optimizer = trained(MESHES["2"], bits, steps=2)
            (plan,) = optimizer._plans.values()
            assert len(plan.fused._grads.addresses) == len(SHAPES)
        assert_as_one_process(MESHES["2"], optimizer, trained(ONE, bits, steps=2)[1])


def test_replicas_of_ddp_stay_those_of_one_process(ranks: Ranks) -> None:
    ranks.run(2, _ddp)


def _ddp() -> None:
    def model() -> torch.nn.Module:
        torch.manual_seed(0)
        layers = torch.nn.Linear(64, 96), torch.nn.ReLU(), torch.nn.Linear(96, 8)
        return torch.nn.Sequential(*layers).to(device(), torch.bfloat16)

    for bits in (24, 32):
        replicas, alone = DistributedDataParallel(model()), model()
        optimizers = [
            Lion8bit(each.parameters(), lr=1e-3, weight_decay=0.1, min_quantized_numel=0, master_weight_bits=bits)
            for each in (replicas, alone)
        ]
        for step in range(4):
            x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step)).to(device(), torch.bfloat16)
            for each, optimizer in zip((replicas, alone), optimizers, strict=True):
                optimizer.zero_grad()
                each(x).square().sum().backward()  # the same on each rank, so their mean is it, too
                optimizer.step()
        assert_as_one_process(ONE, *optimizers)


# --- Checkpoints ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("saver", "loader"), [("2", "1"), ("1", "2"), ("2", "rows x last dim"), ("last dim", "3")])
@pytest.mark.parametrize("bits", [24, 32])
def test_what_one_mesh_saves_another_goes_on_with(
    saver: str, loader: str, bits: int, ranks: Ranks, tmp_path: Path
) -> None:
    ranks.run(MESHES[saver].world_size, _save, saver, bits, tmp_path)
    ranks.run(MESHES[loader].world_size, _load_and_go_on, loader, bits, tmp_path)


def _save(name: str, bits: int, folder: Path) -> None:
    model_state, optimizer_state = get_state_dict(*trained(MESHES[name], bits))
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)


def _load_and_go_on(name: str, bits: int, folder: Path) -> None:
    mesh = MESHES[name]
    model, optimizer = trained(mesh, bits, steps=0)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    go_on(mesh, optimizer, bits)


def go_on(mesh: Mesh, optimizer: Lion8bit, bits: int) -> None:
    """Two steps, which make it what one process had made without stopping."""
    meshes.train(mesh, optimizer, 2, first=STEPS)
    assert_as_one_process(mesh, optimizer, trained(ONE, bits, steps=STEPS + 2)[1])


# full, cpu_offload, broadcast_from_rank0, flatten, as in test_checkpoints.py
OPTIONS_THAT_WORK = [
    *itertools.product([False], [False, True], [False], [False, True]),
    (True, False, False, False),
    (True, False, True, False),
    (True, True, True, False),
]


def test_every_option_of_torchs_state_dicts(ranks: Ranks) -> None:
    ranks.run(2, _every_option)


def _every_option() -> None:
    mesh = MESHES["2"]
    for bits in (24, 32):
        saved_model, saved = trained(mesh, bits)
        for full, cpu_offload, broadcast, flatten in OPTIONS_THAT_WORK:
            options = StateDictOptions(
                full_state_dict=full,
                cpu_offload=cpu_offload,
                broadcast_from_rank0=broadcast,
                flatten_optimizer_state_dict=flatten,
            )
            model, optimizer = trained(mesh, bits, steps=0)
            model_state, optimizer_state = get_state_dict(saved_model, saved, options=options)
            set_model_state_dict(model, model_state, options=options)
            set_optimizer_state_dict(model, optimizer, optimizer_state, options=options)
            go_on(mesh, optimizer, bits)


def test_other_bits_are_converted_as_in_one_process(ranks: Ranks) -> None:
    """Sharded as here or whole."""
    ranks.run(2, _convert)


def _convert() -> None:
    for name, (before, after) in itertools.product(("2", "last dim"), [(24, 32), (32, 24)]):
        mesh = MESHES[name]
        whole = trained(ONE, before)[1].state_dict()
        model, source = trained(mesh, before)
        expected_model, expected = trained(ONE, after, steps=0)
        expected_model.load_state_dict(trained(ONE, before)[0].state_dict())
        expected.load_state_dict(whole)
        for state in (source.state_dict(), whole):
            new_model, optimizer = trained(mesh, after, steps=0)
            new_model.load_state_dict(model.state_dict())
            optimizer.load_state_dict(state)
            assert_as_one_process(mesh, optimizer, expected)


@pytest.mark.parametrize("broadcast", [False, True])
def test_another_number_of_bits_is_never_read_as_these(broadcast: bool, ranks: Ranks) -> None:
    """It is converted, or refused on every rank: in broadcasting, torch makes one of what is saved and what is live."""
    ranks.run(2, _other_bits, broadcast)


def _other_bits(broadcast: bool) -> None:
    mesh = MESHES["2"]
    options = StateDictOptions(full_state_dict=broadcast, broadcast_from_rank0=broadcast)
    for before, after in [(24, 32), (32, 24)]:
        saved_model, saved = trained(mesh, before)
        model, optimizer = trained(mesh, after, steps=0)
        model_state, optimizer_state = get_state_dict(saved_model, saved, options=options)
        set_model_state_dict(model, model_state, options=options)
        expected_model, expected = trained(ONE, after, steps=0)
        expected_model.load_state_dict(trained(ONE, before)[0].state_dict())
        expected.load_state_dict(trained(ONE, before)[1].state_dict())
        if broadcast:
            with pytest.raises(ValueError, match=r"parameter 0 .*a dict of int16, int8.*load without it"):
                set_optimizer_state_dict(model, optimizer, optimizer_state, options=options)
        else:
            set_optimizer_state_dict(model, optimizer, optimizer_state, options=options)
            assert_as_one_process(mesh, optimizer, expected)


# --- fp32 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["2", "hsdp", "fsdp x tp", "last dim"])
def test_fp32_weights_out_and_in(name: str, ranks: Ranks) -> None:
    ranks.run(MESHES[name].world_size, _fp32, name)


def _fp32(name: str) -> None:
    mesh = MESHES[name]
    for bits in (24, 32):
        model, optimizer = trained(mesh, bits)
        one, optimizer_of_one = trained(ONE, bits)
        state, expected = optimizer.fp32_state_dict(model), optimizer_of_one.fp32_state_dict(one)
        for key, p in model.named_parameters():
            assert (state[key].dtype, state[key].placements) == (torch.float32, p.placements)
            assert torch.equal(local(state[key]), mesh.part(expected[key])), key
        for given in (state, expected):
            new, new_optimizer = trained(mesh, bits, steps=0)
            new_optimizer.load_fp32_state_dict(new, given)
            for key, value in new_optimizer.fp32_state_dict(new).items():
                assert isinstance(value, DTensor)
                assert torch.equal(local(value), mesh.part(expected[key])), key
        optimizer.param_groups[0]["lr"] = 1e-8
        assert 0.1 < optimizer.stalled_fraction() == expected_share(mesh, optimizer_of_one, 1e-8) < 0.9


def expected_share(mesh: Mesh, optimizer: Lion8bit, lr: float) -> float:
    """Of the weights that this rank should hold, those whose stochastic rounding cannot see ``lr``."""
    states = [(p.detach(), optimizer.state[p]["master_residual"]) for p in meshes.parameters(optimizer)]
    masters = torch.cat([mesh.part(merge_weight(*state)).flatten() for state in states])
    return ((masters + lr == masters) & (masters - lr == masters)).double().mean().item()
