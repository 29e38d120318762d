"""Checkpoints of sharded parameters: through torch's tools, on any mesh, and on with training as if never stopped."""

from pathlib import Path
from typing import Any

import meshes
import pytest
import torch
import torch.distributed.checkpoint as dcp
from meshes import OPTIONS, Bag, Mesh, make_meshes
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import Shard
from workers import Ranks

from lowbit_optim import Lion, Lion8bit

SHAPES = [(15, 512), (33, 130), (65, 8, 3, 3), (3, 5), (40,)]
MESHES = {**make_meshes(SHAPES), "cut blocks": meshes.by_hand((2,), Shard(-1))}
MATRIX = ["1", "2", "3", "4", "hsdp", "fsdp x tp"]
STEPS, MORE = 5, 10


def trained(mesh: Mesh, steps: int = STEPS, cls: Any = Lion8bit, **options: Any) -> tuple[Bag, Any]:
    bag = mesh.make(SHAPES)
    options = {**OPTIONS, **options} if issubclass(cls, Lion) else options
    optimizer = cls(bag.parameters(), **options)
    with torch.compiler.set_stance("force_eager"):
        meshes.train(mesh, optimizer, steps)
    return bag, optimizer


def go_on(mesh: Mesh, optimizer: Any, steps: int = MORE) -> None:
    """And end where a run that never stopped does."""
    with torch.compiler.set_stance("force_eager"):
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
