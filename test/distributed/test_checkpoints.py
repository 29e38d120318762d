"""Checkpoints of sharded parameters: through torch's tools, on any mesh, and on with training as if never stopped."""

import copy
import io
import itertools
import os
import signal
from pathlib import Path
from typing import Any

import meshes
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from meshes import OPTIONS, Bag, Mesh, local, make_meshes
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor, Shard
from torch.optim.lr_scheduler import LambdaLR
from torch.utils._pytree import tree_map_only
from workers import Ranks, device

from lowbit_optim import Lion, Lion8bit
from lowbit_optim.checkpoint import float_state_dict
from lowbit_optim.subclasses import OptimState8bit

SHAPES = [(15, 512), (33, 130), (65, 8, 3, 3), (3, 5), (40,)]
MESHES = {**make_meshes(SHAPES), "cut blocks": meshes.by_hand((2,), Shard(-1))}
MATRIX = ["1", "2", "3", "4", "hsdp", "fsdp x tp"]
STEPS, MORE = 5, 10


def trained(mesh: Mesh, steps: int = STEPS, cls: Any = Lion8bit, **options: Any) -> tuple[Bag, Any]:
    bag = mesh.make(SHAPES)
    options = {**OPTIONS, **options} if issubclass(cls, Lion) else options
    optimizer = cls(bag.parameters(), **options)
    meshes.train(mesh, optimizer, steps)
    return bag, optimizer


def go_on(mesh: Mesh, optimizer: Any, steps: int = MORE) -> None:
    """And end where a run that never stopped does."""
    meshes.train(mesh, optimizer, steps, first=STEPS)
    meshes.assert_same_bits(mesh, optimizer, meshes.reference(tuple(SHAPES), STEPS + steps))


# --- From every mesh to every mesh ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of each mesh."""
    folder = tmp_path_factory.mktemp("saved")
    for name in MATRIX:
        ranks.run(MESHES[name].world_size, _save, name, folder / name)
    return folder


def _save(name: str, folder: Path) -> None:
    model, optimizer = trained(MESHES[name])
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)


@pytest.mark.parametrize("name", MATRIX)
def test_what_any_mesh_saved_goes_on_as_if_never_stopped(name: str, saved: Path, ranks: Ranks) -> None:
    """Reports 1, 11 and 12: to other numbers of ranks, bit for bit, of uneven and of empty shards."""
    ranks.run(MESHES[name].world_size, _load_each, name, [saved / other for other in MATRIX])


def _load_each(name: str, folders: list[Path]) -> None:
    mesh = MESHES[name]
    for folder in folders:
        model, optimizer = trained(mesh, steps=0, lr=0.5, seed=7)  # both come from the checkpoint
        _load(model, optimizer, folder)
        go_on(mesh, optimizer)


def _load(model: Bag, optimizer: Any, folder: Path) -> None:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


# --- torch's tools --------------------------------------------------------------------------------------------------

# full, cpu_offload, broadcast_from_rank0, flatten: what torch.optim.AdamW survives. Of the others torch refuses some
# (broadcast without full), fails in some (flatten with full) and hangs in one (full and cpu_offload, no broadcast).
OPTIONS_THAT_WORK = [
    *itertools.product([False], [False, True], [False], [False, True]),
    (True, False, False, False),
    (True, False, True, False),
    (True, True, True, False),
]


@pytest.mark.parametrize("name", ["2", "hsdp", "fsdp x tp", "cut blocks"])
def test_every_option_of_torchs_state_dicts_that_works_for_adamw(name: str, ranks: Ranks) -> None:
    ranks.run(MESHES[name].world_size, _every_option, name)


def _every_option(name: str) -> None:
    mesh = MESHES[name]
    saved_model, saved = trained(mesh)
    for (full, cpu_offload, broadcast, flatten), strict in itertools.product(OPTIONS_THAT_WORK, [True, False]):
        if name == "fsdp x tp" and full and not broadcast:
            continue  # torch cannot gather such a tensor if it is cut unevenly, AdamW's or a model's own neither
        if name == "cut blocks" and broadcast and device().type == "cuda":
            continue  # torch broadcasts parts along a last dimension as they lie, which NCCL refuses, a model's too
        options = StateDictOptions(
            full_state_dict=full,
            cpu_offload=cpu_offload,
            broadcast_from_rank0=broadcast,
            flatten_optimizer_state_dict=flatten,
            strict=strict,
        )
        model, optimizer = trained(mesh, steps=0, lr=0.5)
        model_state, optimizer_state = get_state_dict(saved_model, saved, options=options)
        # one by one: set_state_dict takes an empty dict, which other ranks than the first have, to mean "not this"
        set_model_state_dict(model, model_state, options=options)
        set_optimizer_state_dict(model, optimizer, optimizer_state, options=options)
        if weights_survived(
            model, saved_model
        ):  # torch 2.11 broadcasts wrongly what it gathered along a last dimension
            go_on(mesh, optimizer, 1)
        else:
            assert (name, broadcast) == ("cut blocks", True)


def weights_survived(model: Bag, saved: Bag) -> bool:
    own = all(torch.equal(local(p), local(q)) for p, q in zip(model.parameters(), saved.parameters(), strict=True))
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, own)
    return all(everywhere)


def test_a_state_dict_that_is_asked_for_changes_nothing(ranks: Ranks) -> None:
    """Report 21. On a fresh optimizer torch takes a hidden step, with a learning rate of 0."""
    ranks.run(2, _asked_for)


def _asked_for() -> None:
    mesh = MESHES["2"]
    model, optimizer = trained(mesh, steps=0)
    assert optimizer.state_dict()["state"] == {}  # report 13
    everything = StateDictOptions(full_state_dict=True, cpu_offload=True)
    for step in range(4):
        get_state_dict(model, optimizer, options=everything)
        get_state_dict(model, optimizer)
        optimizer.state_dict()
        assert optimizer.param_groups[0]["lr"] == OPTIONS["lr"]
        meshes.train(mesh, optimizer, 1, first=step)
    meshes.assert_same_bits(mesh, optimizer, meshes.reference(tuple(SHAPES), 4))


def test_saving_and_loading_in_place(ranks: Ranks, tmp_path: Path) -> None:
    """The optimizer's own state dict, without torch's tools; a frozen parameter keeps its state or its lack of it."""
    ranks.run(2, _in_place, tmp_path)


def _in_place(folder: Path) -> None:
    mesh = MESHES["2"]
    _, optimizer = trained(mesh, steps=0)
    never, later, *_ = meshes.parameters(optimizer)
    never.requires_grad_(False)
    for step in range(2):
        meshes.set_gradients(mesh, [p for p in meshes.parameters(optimizer) if p.requires_grad], step)
        optimizer.step()
        optimizer.zero_grad()
        later.requires_grad_(False)
    state = optimizer.state_dict()
    assert list(state["state"]) == [1, 2, 3, 4]
    dcp.save({"optimizer": state}, checkpoint_id=folder)

    loaded = trained(mesh, steps=1)[1]
    for p in (loaded.param_groups[0]["params"][0],):
        p.requires_grad_(False)
        del loaded.state[p]
    found = {"optimizer": loaded.state_dict()}
    dcp.load(found, checkpoint_id=folder)
    loaded.load_state_dict(found["optimizer"])
    assert_same_leaves(loaded.state_dict(), state)

    fresh = trained(mesh, steps=0)[1]
    found = {"optimizer": fresh.state_dict()}
    dcp.load(found, checkpoint_id=folder)  # torch fills what is there, which is nothing
    assert found["optimizer"]["state"] == {}
    with pytest.raises(ValueError, match="steps were taken, but holds no state"):
        fresh.load_state_dict(found["optimizer"])


def assert_same_leaves(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    actual, expected = leaves(actual), leaves(expected)
    assert list(actual) == list(expected)
    for path, value in expected.items():
        if isinstance(value, Tensor):
            assert torch.equal(local(actual[path]), local(value)), path
        else:
            assert actual[path] == value, path


def leaves(tree: Any) -> dict[str, Any]:
    return {str(path): leaf for path, leaf in torch.utils._pytree.tree_flatten_with_path(tree)[0]}


class App(Stateful):
    """As torchtitan wraps a model and its optimizer; its state dict is asked for before it is loaded (report 30)."""

    def __init__(self, model: Bag, optimizer: Any) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def test_a_stateful_wrapper_and_a_snapshot_in_the_background(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(2, _stateful, tmp_path)


def _stateful(folder: Path) -> None:
    mesh = MESHES["2"]
    app = App(*trained(mesh))
    written = dcp.async_save({"app": app}, checkpoint_id=folder, process_group=dist.new_group(backend="gloo"))
    meshes.train(mesh, app.optimizer, 3, first=STEPS)  # the snapshot is of before
    written.result()
    fresh = App(*trained(mesh, steps=0))
    dcp.load({"app": fresh}, checkpoint_id=folder)
    go_on(mesh, fresh.optimizer)


def test_a_process_killed_while_it_saves_leaves_the_checkpoint_before(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(2, _save, "2", tmp_path / "before")
    with pytest.raises(AssertionError, match="the process ended"):
        ranks.run(2, _killed, tmp_path / "after")
    ranks.run(2, _after_the_kill, tmp_path)


class KilledWriter(FileSystemWriter):
    def write_data(self, plan: Any, planner: Any) -> Any:
        super().write_data(plan, planner).wait()
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def _killed(folder: Path) -> None:
    model, optimizer = trained(MESHES["2"], steps=STEPS + 1)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, storage_writer=KilledWriter(folder))


def _after_the_kill(folder: Path) -> None:
    mesh = MESHES["2"]
    with pytest.raises(dcp.api.CheckpointException):
        _load(*trained(mesh, steps=0), folder / "after")
    model, optimizer = trained(mesh, steps=0)
    _load(model, optimizer, folder / "before")
    go_on(mesh, optimizer)


def test_gradients_that_are_set_do_not_lose_state(ranks: Ranks) -> None:
    """Report 23: torch then creates no state to load into. All of it is loaded, or an error says so."""
    ranks.run(2, _gradients_set)


def _gradients_set() -> None:
    mesh = MESHES["2"]
    saved_model, saved = trained(mesh)
    for flatten in (False, True):
        options = StateDictOptions(flatten_optimizer_state_dict=flatten)
        _, state = get_state_dict(saved_model, saved, options=options)
        model, optimizer = trained(mesh, steps=0)
        model.load_state_dict(saved_model.state_dict())
        meshes.set_gradients(mesh, model.parameters(), 0)
        if flatten:
            with pytest.raises(ValueError, match=r"holds no state.*zero_grad"):
                set_optimizer_state_dict(model, optimizer, state, options=options)
        else:
            set_optimizer_state_dict(model, optimizer, state, options=options)
            assert len(optimizer.state) == len(SHAPES)
            go_on(mesh, optimizer, 1)


def test_schedules_come_along(ranks: Ranks) -> None:
    """Report 25."""
    ranks.run(2, _schedule)


def _schedule() -> None:
    mesh = MESHES["2"]
    saved_model, saved = trained(mesh)
    scheduler = LambdaLR(saved, lambda step: 0.5**step)
    scheduler.step()
    for full in (False, True):
        options = StateDictOptions(full_state_dict=full)
        state = get_optimizer_state_dict(saved_model, saved, options=options)
        model, optimizer = trained(mesh, steps=0, lr=1.0)
        LambdaLR(optimizer, lambda step: 0.5**step)
        set_optimizer_state_dict(model, optimizer, state, options=options)
        group = optimizer.param_groups[0]
        assert (float(group["lr"]), group["initial_lr"], group["betas"]) == (0.005, 0.01, (0.9, 0.99))
        for exp_avg in (optimizer.state[p]["exp_avg"] for p in meshes.parameters(optimizer)):
            assert isinstance(exp_avg.codes if isinstance(exp_avg, OptimState8bit) else exp_avg, DTensor)


# --- Whole tensors --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["2", "3", "cut blocks"])
def test_a_gathered_dict_in_a_file_goes_anywhere(name: str, ranks: Ranks, tmp_path: Path) -> None:
    """torch.save and safetensors, written by one rank; read by one process and by every rank of a mesh."""
    ranks.run(MESHES[name].world_size, _write_gathered, name, tmp_path)
    for reader in ("1", name):
        ranks.run(MESHES[reader].world_size, _read_gathered, reader, tmp_path)


def _write_gathered(name: str, folder: Path) -> None:
    model, optimizer = trained(MESHES[name])
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    whole = tree_map_only(DTensor, lambda x: x.full_tensor().cpu(), state)
    if dist.get_rank() == 0:
        torch.save(whole, folder / "state.pt")
        tensors = {path: leaf.contiguous() for path, leaf in leaves(whole).items() if isinstance(leaf, Tensor)}
        save_file(tensors, folder / "state.safetensors")
    dist.barrier()


def _read_gathered(name: str, folder: Path) -> None:
    mesh = MESHES[name]
    whole = torch.load(folder / "state.pt")
    tensors = load_file(folder / "state.safetensors")
    for path, leaf in leaves(whole).items():
        assert not isinstance(leaf, Tensor) or torch.equal(leaf, tensors[path])
    model, optimizer = trained(mesh, steps=0)
    set_model_state_dict(model, whole["model"], options=StateDictOptions(full_state_dict=True))
    optimizer.load_state_dict(whole["optimizer"])
    go_on(mesh, optimizer, 3)


@pytest.mark.parametrize("name", ["2", "hsdp", "cut blocks"])
def test_momentum_stored_otherwise_is_converted_as_in_one_process(name: str, ranks: Ranks) -> None:
    """Reports 4 and 20: unquantised, in another dtype or in other blocks; sharded or whole; and back."""
    ranks.run(MESHES[name].world_size, _convert, name)


def _convert(name: str) -> None:
    mesh = MESHES[name]
    for cls, options in [(Lion, {}), (Lion8bit, {"block_size": 32}), (Lion8bit, {})]:
        _, source = trained(mesh, cls=cls, **options)
        _, whole_source = trained(meshes.ONE, cls=cls, **options)
        for convert in (lambda o: o.state_dict(), float_state_dict, lambda o: float_state_dict(o, torch.bfloat16)):
            saved, whole = convert(source), convert(whole_source)
            for target_cls in (Lion8bit, Lion):
                expected = target_cls(meshes.ONE.make(SHAPES).parameters(), **OPTIONS)
                expected.load_state_dict(whole)
                for state in (saved, whole):
                    optimizer = target_cls(mesh.make(SHAPES).parameters(), **OPTIONS)
                    optimizer.load_state_dict(state)
                    meshes.assert_same_bits(mesh, optimizer, expected)


# --- What is in a checkpoint ----------------------------------------------------------------------------------------


def test_keys_shapes_and_dtypes_are_those_of_one_process(ranks: Ranks) -> None:
    """Reports 14, 15, 28 and 46."""
    [expected] = ranks.run(1, _contents, "1")
    for name in ("2", "fsdp x tp", "cut blocks"):
        assert ranks.run(MESHES[name].world_size, _contents, name)[0] == expected
    assert set(expected.values()) - {None} == {torch.int8, torch.uint8, torch.float32}


def _contents(name: str) -> dict[Any, Any]:
    _, optimizer = trained(MESHES[name], steps=1)
    for p in meshes.parameters(optimizer):
        assert optimizer.state[p]["exp_avg"].shape == p.shape
    return {
        (path, tuple(leaf.shape) if isinstance(leaf, Tensor) else str(leaf)): getattr(leaf, "dtype", None)
        for path, leaf in leaves(optimizer.state_dict()).items()
    }


def test_code_that_walks_a_state_dict_works(ranks: Ranks) -> None:
    """Report 10."""
    ranks.run(2, _walk)


def _walk() -> None:
    _, optimizer = trained(MESHES["cut blocks"], steps=1)
    for leaf in leaves(optimizer.state_dict()).values():
        if isinstance(leaf, Tensor):
            assert torch.equal(leaf.detach().cpu().clone(), leaf.cpu())
            assert leaf.float().abs().sum().full_tensor() >= 0
            assert "DTensor" in repr(leaf)
    copied = copy.deepcopy(optimizer)
    assert_same_leaves(copied.state_dict(), optimizer.state_dict())
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    assert_same_leaves(torch.load(buffer), optimizer.state_dict())


def test_broken_checkpoints_are_refused_and_change_nothing(ranks: Ranks) -> None:
    ranks.run(2, _broken)


def _broken() -> None:
    mesh = MESHES["2"]
    _, optimizer = trained(mesh)
    state = copy.deepcopy(optimizer.state_dict())
    state["state"][1]["exp_avg"]["codes"].to_local().fill_(-128)
    with pytest.raises(ValueError, match=r"parameter 1 .*a saved code is -128"):
        optimizer.load_state_dict(state)
    state = copy.deepcopy(optimizer.state_dict())
    state["state"][4]["exp_avg"].to_local().fill_(float("nan"))
    with pytest.raises(ValueError, match=r"parameter 4 .*not finite"):
        optimizer.load_state_dict(state)
    go_on(mesh, optimizer, 1)
