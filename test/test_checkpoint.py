"""Saving and loading. Tests named after a situation in the public reports say what happened there."""

import copy
import io
import json
import os
import pickle
import pickletools
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim.lr_scheduler import LambdaLR

from lowbit_optim import Lion, Lion8bit
from lowbit_optim.checkpoint import FORMAT_VERSION
from lowbit_optim.subclasses import OptimState8bit


@pytest.fixture(autouse=True)
def _eager() -> Iterator[None]:
    with torch.compiler.set_stance("force_eager"):
        yield


class Model(nn.Module):
    """Rows of whole blocks, ragged rows, blocks along flattened dimensions, and two that stay unquantised."""

    QUANTIZED = ("embedding.weight", "linear.weight", "conv.weight")

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 128)
        self.linear = nn.Linear(75, 64)
        self.conv = nn.Conv2d(16, 32, 3)


def make_model(dtype: torch.dtype = torch.float32) -> Model:
    torch.manual_seed(1)
    return Model().to(dtype)


def make(
    dtype: torch.dtype = torch.float32, cls: Callable[..., torch.optim.Optimizer] = Lion8bit, **options: Any
) -> torch.optim.Optimizer:
    options = {"lr": 1e-2, "weight_decay": 0.1, **options}
    return cls(make_model(dtype).named_parameters(), **options)


def parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def set_gradients(optimizer: torch.optim.Optimizer, step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for p in parameters(optimizer):
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def train(
    optimizer: torch.optim.Optimizer, first: int, last: int, scheduler: LambdaLR | None = None
) -> torch.optim.Optimizer:
    for step in range(first, last):
        set_gradients(optimizer, step)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return optimizer


def tensors(tree: Any, path: tuple = ()) -> Iterator[tuple[tuple, Tensor]]:
    if isinstance(tree, Tensor):
        yield path, tree
    elif isinstance(tree, dict):
        for key, value in tree.items():
            yield from tensors(value, (*path, key))


def bits(x: Tensor) -> Tensor:
    return x.detach().contiguous().flatten().view(torch.uint8)


def everything(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """A copy of all that training depends on: weights, state and options."""
    saved = copy.deepcopy(optimizer.state_dict())
    weights = [p.detach().clone() for p in parameters(optimizer)]
    return {"weights": dict(enumerate(weights)), "state": saved["state"], "groups": saved["param_groups"]}


def assert_same(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a["groups"] == b["groups"]
    left, right = dict(tensors(a)), dict(tensors(b))
    assert left.keys() == right.keys()
    for path, x in left.items():
        assert x.dtype == right[path].dtype
        assert torch.equal(bits(x), bits(right[path])), path


def save_and_load(state_dict: dict[str, Any], **options: Any) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, **options)


# --- What is saved --------------------------------------------------------------------------------------------------


def test_a_saved_state_is_plain_tensors_without_a_codebook() -> None:
    """Reports 7 and 46: the class in the pickle stopped a load, and ZeRO cut up the table of codes."""
    optimizer = train(make(), 0, 2)
    state = optimizer.state_dict()["state"]
    for path, x in tensors(state):
        assert type(x) is Tensor, path
    assert {path[1:] for path, _ in tensors(state)} == {("exp_avg",), ("exp_avg", "codes"), ("exp_avg", "scale")}
    weight, saved = parameters(optimizer)[0], state[0]["exp_avg"]
    assert (saved["codes"].dtype, saved["codes"].shape) == (torch.int8, weight.shape)
    assert (saved["scale"].dtype, saved["scale"].shape) == (torch.uint8, (40, 2, 2))
    assert optimizer.state_dict()["param_groups"][0]["format_version"] == FORMAT_VERSION
    json.dumps(optimizer.state_dict()["param_groups"])


def test_a_trainer_can_walk_and_hash_the_state() -> None:
    """Report 10: generic utilities called ops that the state did not have, saved or live."""
    optimizer = train(make(), 0, 2)
    live = [optimizer.state[p]["exp_avg"] for p in parameters(optimizer)]
    saved = [x for _, x in tensors(optimizer.state_dict()["state"])]
    for x in live + saved:
        assert float(x.detach().cpu().float().abs().sum()) > 0
        assert repr(x)
        assert torch.equal(x, x)


def test_the_live_state_looks_like_its_parameter() -> None:
    """Report 14: absmax of another shape stopped every gather."""
    optimizer = train(make(), 0, 1)
    for p in parameters(optimizer):
        assert list(optimizer.state[p]) == ["exp_avg"]
        assert optimizer.state[p]["exp_avg"].shape == p.shape


def test_before_the_first_step_the_state_is_empty_and_loads() -> None:
    """Report 13, where that export failed."""
    assert make().state_dict()["state"] == {}
    optimizer = train(make(), 0, 2)
    optimizer.load_state_dict(make().state_dict())
    assert not optimizer.state
    assert optimizer.param_groups[0]["step"] == 0


def test_weights_only_load_in_a_process_that_has_not_imported_the_package(tmp_path: Path) -> None:
    """Reports 7 and 8."""
    saved = train(make(), 0, 2).state_dict()
    torch.save(saved, tmp_path / "optimizer.pt")
    script = (
        "import sys, torch; saved = torch.load(sys.argv[1], weights_only=True);"
        "assert not any(m.startswith(('lowbit_optim', 'torchao')) for m in sys.modules);"
        "print(int(saved['state'][0]['exp_avg']['codes'].int().abs().sum()))"
    )
    out = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "optimizer.pt")], capture_output=True, text=True, check=True
    )
    assert int(out.stdout) == int(saved["state"][0]["exp_avg"]["codes"].int().abs().sum())


def test_threads_may_ask_for_a_state_dict_at_once() -> None:
    optimizer = Lion8bit([nn.Parameter(torch.randn(64, 64)) for _ in range(4)])
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.randn_like(p)
    optimizer.step()
    with ThreadPoolExecutor(4) as pool:
        for saved in pool.map(lambda _: optimizer.state_dict(), range(2000)):
            assert all(set(state["exp_avg"]) == {"codes", "scale"} for state in saved["state"].values())


def test_safetensors_carries_the_tensors(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    optimizer = train(make(), 0, 2)
    saved = optimizer.state_dict()
    safetensors.save_file({".".join(map(str, k)): v for k, v in tensors(saved["state"])}, tmp_path / "o.safetensors")

    state: dict[str, Any] = {}
    for name, x in safetensors.load_file(tmp_path / "o.safetensors").items():
        *path, last = name.split(".")
        inner = state
        for key in path:
            inner = inner.setdefault(key, {})
        inner[last] = x
    assert set(state) == {"0", "1", "2", "3", "4"}  # such keys come back as strings
    fresh = make()
    fresh.load_state_dict({"state": state, "param_groups": json.loads(json.dumps(saved["param_groups"]))})
    assert_same(everything(train(fresh, 2, 2)) | {"weights": {}}, everything(optimizer) | {"weights": {}})


def test_accelerate_saves_and_loads_without_a_patch(tmp_path: Path) -> None:
    """Report 8: load_state failed under torch's weights_only default."""
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    model = make_model()
    _, prepared = accelerator.prepare(model, Lion8bit(model.parameters(), lr=1e-2))
    train(prepared.optimizer, 0, 3)
    expected = everything(prepared.optimizer)
    accelerator.save_state(tmp_path)
    train(prepared.optimizer, 3, 5)
    accelerator.load_state(tmp_path)
    assert_same(everything(prepared.optimizer), expected)


# --- Resuming -------------------------------------------------------------------------------------------------------

RESUMED = [(d, q, s) for d in (torch.float32, torch.bfloat16) for q in (True, False) for s in (True, False)]


def _make_resumed(dtype: torch.dtype, quantize: bool, scheduled: bool) -> tuple[torch.optim.Optimizer, LambdaLR | None]:
    optimizer = make(dtype, quantize=quantize, decouple_lr=scheduled)
    return optimizer, LambdaLR(optimizer, lambda step: 1 / (1 + step / 7)) if scheduled else None


def resume_in_this_process(directory: str) -> None:
    """What the new process of the next test runs: load, 20 steps, save."""
    for i, case in enumerate(RESUMED):
        optimizer, scheduler = _make_resumed(*case)
        saved = torch.load(f"{directory}/{i}.pt")
        with torch.no_grad():
            for p, w in zip(parameters(optimizer), saved["weights"].values(), strict=True):
                p.copy_(w)
        if scheduler is not None:
            scheduler.load_state_dict(saved["scheduler"])
        optimizer.load_state_dict(saved["optimizer"])
        train(optimizer, 20, 40, scheduler)
        torch.save(everything(optimizer), f"{directory}/{i}.resumed.pt")


def test_resuming_in_a_new_process_equals_not_stopping_bit_for_bit(tmp_path: Path) -> None:
    """Also report 16, where the first step after a load gave NaN."""
    uninterrupted = []
    for i, case in enumerate(RESUMED):
        optimizer, scheduler = _make_resumed(*case)
        train(optimizer, 0, 20, scheduler)
        saved = {
            "weights": everything(optimizer)["weights"],
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict() if scheduler else None,
        }
        torch.save(saved, tmp_path / f"{i}.pt")
        train(optimizer, 20, 40, scheduler)
        uninterrupted.append(everything(optimizer))

    paths = [str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    subprocess.run([sys.executable, __file__, str(tmp_path)], env=environment, check=True)
    for i, expected in enumerate(uninterrupted):
        resumed = torch.load(tmp_path / f"{i}.resumed.pt")
        assert_same(resumed, expected)
        assert all(w.isfinite().all() for w in resumed["weights"].values())


@pytest.mark.compiler
def test_the_first_compiled_step_after_a_load_equals_an_eager_one() -> None:
    """Report 19: loss exploded right after a resume, since autotuning ran an in-place kernel many times."""

    def resumed() -> torch.optim.Optimizer:
        fresh = make(torch.bfloat16)
        fresh.load_state_dict(saved)
        return fresh

    saved = train(make(torch.bfloat16), 0, 3).state_dict()
    eager, compiled = train(resumed(), 3, 4), resumed()
    with torch.compiler.set_stance("default"):
        train(compiled, 3, 4)
    assert_same(everything(compiled), everything(eager))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_state_stays_8_bit_whatever_the_weights(dtype: torch.dtype) -> None:
    """Reports 28 and 69: torch casts state to the parameter's dtype, which doubles it or coarsens it."""
    optimizer = train(make(dtype), 0, 3)
    before = {k: (x.dtype, x.untyped_storage().nbytes()) for k, x in tensors(optimizer.state_dict()["state"])}
    fresh = make(dtype)
    fresh.load_state_dict(save_and_load(optimizer.state_dict()))
    after = {k: (x.dtype, x.untyped_storage().nbytes()) for k, x in tensors(fresh.state_dict()["state"])}
    assert after == before
    names = fresh.param_groups[0]["param_names"]
    for name, p in zip(names, parameters(fresh), strict=True):
        exp_avg = fresh.state[p]["exp_avg"]
        assert exp_avg.dtype == torch.float32
        assert type(exp_avg) is (OptimState8bit if name in Model.QUANTIZED else Tensor)


def test_a_checkpoint_mapped_to_the_cpu_moves_to_each_parameter(device: str) -> None:
    """Report 6."""
    optimizer = make()
    model = make_model().to(device)
    on_device = Lion8bit(model.named_parameters(), lr=1e-2, weight_decay=0.1)
    on_device.load_state_dict(save_and_load(train(optimizer, 0, 3).state_dict(), map_location="cpu"))
    for p in parameters(on_device):
        exp_avg = on_device.state[p]["exp_avg"]
        parts = (exp_avg.codes, exp_avg.scale) if isinstance(exp_avg, OptimState8bit) else (exp_avg,)
        assert all(x.device == p.device for x in parts)
        p.grad = torch.randn_like(p)
    on_device.step()


def test_state_that_was_moved_away_resumes(device: str) -> None:
    """Report 18: a checkpoint of paged state could not go on."""
    optimizer = train(make(), 0, 3)
    for p in parameters(optimizer):
        moved = optimizer.state[p]["exp_avg"].cpu()
        optimizer.state[p]["exp_avg"] = moved.pin_memory() if torch.cuda.is_available() else moved.clone()
    fresh = Lion8bit(make_model().to(device).named_parameters(), lr=1e-2, weight_decay=0.1)
    fresh.load_state_dict(optimizer.state_dict())
    for p in parameters(fresh):
        assert fresh.state[p]["exp_avg"].device == p.device
        p.grad = torch.randn_like(p)
    fresh.step()
    assert all(p.isfinite().all() for p in parameters(fresh))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["deepcopy", "pickle"])
def test_a_copied_optimizer_loads(copied: Callable) -> None:
    """Copies lose hooks that were registered when the optimizer was built."""
    optimizer = train(make(torch.bfloat16), 0, 3)
    twin = copied(make(torch.bfloat16))
    twin.load_state_dict(save_and_load(optimizer.state_dict()))
    assert everything(twin)["groups"] == everything(optimizer)["groups"]
    assert_same(everything(twin) | {"weights": {}}, everything(optimizer) | {"weights": {}})
    copy_of_trained = copied(optimizer)
    assert_same(everything(copy_of_trained), everything(optimizer))
    assert_same(everything(train(copy_of_trained, 3, 6)), everything(train(optimizer, 3, 6)))


def test_loading_copies() -> None:
    """Neither training on nor editing the loaded checkpoint reaches the other."""
    optimizer = train(make(), 0, 3)
    source = save_and_load(optimizer.state_dict())
    fresh = make()
    fresh.load_state_dict(source)
    pristine = copy.deepcopy(source)
    train(fresh, 3, 5)
    assert_same(
        {"groups": source["param_groups"], **source["state"]}, {"groups": pristine["param_groups"], **pristine["state"]}
    )

    expected = everything(fresh)
    fresh.load_state_dict(fresh.state_dict())
    assert_same(everything(fresh), expected)
    for _, x in tensors(source):
        x.zero_()
    assert_same(everything(fresh), expected)


def test_user_hooks_see_the_checkpoint_before_and_the_state_after() -> None:
    optimizer, seen = make(), []

    def before(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        groups = [{**group, "lr": 0.5} for group in state_dict["param_groups"]]
        return {**state_dict, "param_groups": groups}

    optimizer.register_load_state_dict_pre_hook(before)
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append(len(o.state)))
    source = train(make(), 0, 2).state_dict()
    for _ in range(2):
        optimizer.load_state_dict(source)
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert seen == [5, 5]


# --- Between precisions, block sizes and options --------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lion_and_lion8bit_load_each_other(dtype: torch.dtype) -> None:
    """Report 20, which asks for it."""
    full, low = train(make(dtype, Lion), 0, 5), make(dtype)
    low.load_state_dict(full.state_dict())
    for name, p, q in zip(full.param_groups[0]["param_names"], parameters(full), parameters(low), strict=True):
        exact, loaded = full.state[p]["exp_avg"], low.state[q]["exp_avg"]
        if name not in Model.QUANTIZED:
            assert torch.equal(loaded, exact)
            continue
        assert type(loaded) is OptimState8bit
        error = (loaded.dequantize() - exact).abs()
        assert (error <= (exact.abs().max() / 14.75 + exact.abs()) / 60).all()  # half a code, and the scale's rounding
        assert error.max() > 0

    back = make(dtype, Lion)
    back.load_state_dict(low.state_dict())
    for p, q in zip(parameters(low), parameters(back), strict=True):
        low_value = low.state[p]["exp_avg"]
        expected = low_value.dequantize() if isinstance(low_value, OptimState8bit) else low_value
        assert type(back.state[q]["exp_avg"]) is Tensor
        assert torch.equal(back.state[q]["exp_avg"], expected)


@pytest.mark.parametrize(("saved_size", "live_size"), [(64, 32), (16, 64), (75, 64)])
def test_another_block_size_is_encoded_anew(saved_size: int, live_size: int) -> None:
    optimizer, fresh = train(make(block_size=saved_size), 0, 5), make(block_size=live_size)
    fresh.load_state_dict(optimizer.state_dict())
    assert fresh.param_groups[0]["block_size"] == live_size
    for p, q in zip(parameters(optimizer), parameters(fresh), strict=True):
        before, after = optimizer.state[p]["exp_avg"], fresh.state[q]["exp_avg"]
        if isinstance(after, OptimState8bit):
            assert after.block_size == live_size
            expected = OptimState8bit.from_float(before.dequantize(), live_size)
            assert torch.equal(after.codes, expected.codes)
            assert torch.equal(after.scale, expected.scale)
            torch.testing.assert_close(after.dequantize(), before.dequantize(), rtol=0.03, atol=0.01)


def test_hyperparameters_come_from_the_checkpoint_and_storage_stays() -> None:
    source = make(lr=0.03, betas=(0.8, 0.95), weight_decay=0.2, decouple_lr=True, maximize=True, quantize=False)
    train(source, 0, 4)
    source.param_groups[0]["lr"], source.param_groups[0]["of_a_scheduler"] = 0.01, 17
    live = make(block_size=32, min_quantized_numel=5000, stochastic_rounding=False)
    live.load_state_dict(source.state_dict())
    group = live.param_groups[0]
    came = {"lr": 0.01, "betas": (0.8, 0.95), "weight_decay": 0.2, "decouple_lr": True, "maximize": True, "step": 4}
    stayed = {"quantize": True, "block_size": 32, "min_quantized_numel": 5000, "stochastic_rounding": False}
    for key, value in {**came, **stayed, "initial_lr": 0.03, "of_a_scheduler": 17}.items():
        assert group[key] == value, key
    kinds = [type(live.state[p]["exp_avg"]) for p in parameters(live)]
    assert kinds.count(OptimState8bit) == 1  # 40 x 128 elements; the other matrices have fewer than 5000


def test_a_tensor_lr_comes_back_and_is_not_shared() -> None:
    source, live = train(make(lr=torch.tensor(0.25)), 0, 2), make()
    saved = source.state_dict()
    live.load_state_dict(saved)
    source.param_groups[0]["lr"].fill_(1.0)
    saved["param_groups"][0]["lr"].fill_(2.0)
    assert live.param_groups[0]["lr"] == torch.tensor(0.25)
    train(live, 2, 3)


def test_each_group_keeps_its_own_precision() -> None:
    def grouped() -> torch.optim.Optimizer:
        model = make_model()
        rest = [*model.linear.parameters(), *model.conv.parameters()]
        return Lion8bit([{"params": model.embedding.parameters(), "quantize": False, "lr": 1e-3}, {"params": rest}])

    source, live = train(grouped(), 0, 3), grouped()
    live.load_state_dict(source.state_dict())
    assert_same(everything(live) | {"weights": {}}, everything(source) | {"weights": {}})
    assert type(live.state[parameters(live)[0]]["exp_avg"]) is Tensor
    assert type(live.state[parameters(live)[1]]["exp_avg"]) is OptimState8bit


def test_a_checkpoint_of_version_1_loads_forever() -> None:
    """Reports 64 and 74: codes that change their meaning between releases ruin a run. These values are frozen."""
    codes = torch.tensor([0, 1, -1, 31, 32, -64, 96, 127] * 2 + [127] + [0] * 15, dtype=torch.int8).view(1, 32)
    scale = torch.tensor([[[0x00, 0x80], [0x80, 0x7D]]], dtype=torch.uint8)  # 2 and 0.375, without the sign bit
    saved = {
        "state": {0: {"exp_avg": {"codes": codes, "scale": scale}}},
        "param_groups": [
            {"lr": 0.1, "betas": [0.9, 0.99], "weight_decay": 0.0, "step": 3, "block_size": 16, "format_version": 1}
            | {"params": [0]}
        ],
    }
    optimizer = Lion([nn.Parameter(torch.zeros(1, 32))])
    optimizer.load_state_dict(saved)
    values = optimizer.state[parameters(optimizer)[0]]["exp_avg"].flatten()
    octaves = [0, 1 / 32, -1 / 32, 31 / 32, 1, -3, 7, 14.75]  # 127 is 1.96875 * 2**3 - 1
    expected = torch.tensor([x / 14.75 * 2.0 for x in octaves] * 2 + [0.375])
    torch.testing.assert_close(values[:17], expected, rtol=3e-7, atol=0)
    assert not values[17:].any()
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.99)


def test_a_saved_file_names_no_class_that_could_move() -> None:
    """Report 83: a class that moved out of ``prototype`` broke the checkpoints that named its old place."""
    file = io.BytesIO()
    torch.save(train(make(), 0, 2).state_dict(), file)
    with zipfile.ZipFile(file) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        operations = list(pickletools.genops(archive.read(name)))
    assert not {operation.name for operation, _, _ in operations} & {"STACK_GLOBAL", "INST"}, "named some other way"
    named = {argument for operation, argument, _ in operations if operation.name == "GLOBAL"}
    assert {name.split()[0].split(".")[0] for name in named} == {"torch", "collections"}


def test_a_file_of_version_1_resumes() -> None:
    """Report 83, from the other side: what version 1 wrote, key by key, written here without the package."""
    codes = torch.randint(-127, 128, (64, 75), dtype=torch.int8)
    scale = torch.randint(0x3000, 0x4000, (64, 2), dtype=torch.int16)  # about 1e-10 to 2
    scale_bytes = scale.unsqueeze(-1).view(torch.uint8)
    bias = torch.randn(64)
    options = {
        "lr": 3e-3,
        "betas": (0.8, 0.95),
        "weight_decay": 0.2,
        "quantize": True,
        "block_size": 64,
        "min_quantized_numel": 4096,
        "master_weight_bits": None,
        "stochastic_rounding": True,
        "seed": 5,
        "decouple_lr": False,
        "maximize": False,
        "offload_state": False,
        "fused": None,
        "step": 7,
    }
    group = {**options, "params": [0, 1], "param_names": ["weight", "bias"], "format_version": 1}
    momentum = {"codes": codes, "scale": scale_bytes}
    saved = {"state": {0: {"exp_avg": momentum}, 1: {"exp_avg": bias}}, "param_groups": [group]}
    live = Lion8bit(nn.Linear(75, 64).named_parameters())
    live.load_state_dict(save_and_load(saved, weights_only=True))
    weight_state, bias_state = (live.state[p]["exp_avg"] for p in parameters(live))
    assert torch.equal(weight_state.codes, codes)
    assert torch.equal(weight_state.scale, scale)
    assert torch.equal(bias_state, bias)
    assert {key: live.param_groups[0][key] for key in options} == options
    train(live, 0, 1)
    assert live.param_groups[0]["step"] == 8


# --- Through torch.distributed.checkpoint.state_dict, on one device -------------------------------------------------

DCP_OPTIONS = [
    StateDictOptions(),
    StateDictOptions(full_state_dict=True, cpu_offload=True),
    StateDictOptions(cpu_offload=True),
    StateDictOptions(flatten_optimizer_state_dict=True),
]
dcp_options = pytest.mark.parametrize("options", DCP_OPTIONS, ids=["default", "full", "cpu_offload", "flatten"])


def make_pair(dtype: torch.dtype = torch.float32, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = make_model(dtype)
    return model, Lion8bit(model.parameters(), lr=1e-2, **options)


@dcp_options
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dcp_state_dicts_come_back_bit_for_bit(options: StateDictOptions, dtype: torch.dtype) -> None:
    """Reports 13 and 25: the full export aborted, and a load lost lr and initial_lr."""
    model, optimizer = make_pair(dtype, decouple_lr=True)
    train(optimizer, 0, 4, LambdaLR(optimizer, lambda step: 1 / (1 + step)))
    optimizer.zero_grad()
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))

    fresh_model, fresh = make_pair(dtype, decouple_lr=True)
    set_optimizer_state_dict(fresh_model, fresh, saved, options=options)
    assert fresh.param_groups[0]["lr"] == pytest.approx(1e-2 / 5)
    assert fresh.param_groups[0]["initial_lr"] == 1e-2
    assert_same(everything(fresh) | {"weights": {}}, everything(optimizer) | {"weights": {}})


@dcp_options
def test_asking_for_the_state_of_a_fresh_optimizer_changes_nothing_but_allocates(options: StateDictOptions) -> None:
    """Report 21: torch takes a hidden step with the float lr 0.0, which an optimizer could not."""
    model, optimizer = make_pair()
    before = everything(optimizer)
    get_optimizer_state_dict(model, optimizer, options=options)
    after = everything(optimizer)
    assert after["groups"] == before["groups"]
    assert_same({**after, "state": {}}, {**before, "state": {}})
    assert len(after["state"]) == 5
    assert not any(x.any() for _, x in tensors(after["state"]))
    optimizer.param_groups[0]["lr"] = 0.0
    train(optimizer, 0, 1)


@dcp_options
def test_loading_while_gradients_are_set_is_never_silently_empty(options: StateDictOptions) -> None:
    """Report 23. torch itself raises in the full mode."""
    model, optimizer = make_pair()
    train(optimizer, 0, 3)
    optimizer.zero_grad()
    saved = get_optimizer_state_dict(model, optimizer, options=options)

    fresh_model, fresh = make_pair()
    set_gradients(fresh, 0)
    try:
        set_optimizer_state_dict(fresh_model, fresh, saved, options=options)
    except (ValueError, RuntimeError, AssertionError):
        return
    assert len(fresh.state) == 5


# --- Broken and ill-fitting checkpoints -----------------------------------------------------------------------------


def _edit(change: Callable[[dict[int, dict], list[dict]], object]) -> Callable[[dict[str, Any]], object]:
    return lambda saved: change(saved["state"], saved["param_groups"])


BROKEN = {
    "no state": (lambda saved: saved.pop("state"), "keys param_groups"),
    "no groups": (lambda saved: saved.pop("param_groups"), "keys state"),
    "group without params": (_edit(lambda s, g: g[0].pop("params")), "parameter group 0 has no 'params'"),
    "extra parameter": (_edit(lambda s, g: s.update({9: s[0]})), "state for 9"),
    "state is a tensor": (_edit(lambda s, g: s.update({1: torch.ones(1)})), "'linear.weight': its state is Tensor"),
    "no momentum": (_edit(lambda s, g: s[1].clear() or s[1].update(x=1)), "'linear.weight'.*the keys x"),
    "extra key": (_edit(lambda s, g: s[1].update(exp_avg_sq=torch.ones(1))), "'linear.weight'.*exp_avg_sq"),
    "no scale": (_edit(lambda s, g: s[1]["exp_avg"].pop("scale")), "'linear.weight'.*the parts codes"),
    "extra part": (_edit(lambda s, g: s[1]["exp_avg"].update(qmap=1)), "'linear.weight'.*codes, qmap, scale"),
    "codes of another dtype": (
        _edit(lambda s, g: s[1]["exp_avg"].update(codes=s[1]["exp_avg"]["codes"].float())),
        "'linear.weight': codes is torch.float32; allowed: torch.int8",
    ),
    "scale of another dtype": (
        _edit(lambda s, g: s[1]["exp_avg"].update(scale=s[1]["exp_avg"]["scale"].half())),
        "'linear.weight': scale is torch.float16; allowed: torch.uint8",
    ),
    "codes without a scale": (
        _edit(lambda s, g: s[1].update(exp_avg=s[1]["exp_avg"]["codes"])),
        "'linear.weight': exp_avg is torch.int8",
    ),
    "codes of another shape": (
        _edit(lambda s, g: s[1]["exp_avg"].update(codes=s[1]["exp_avg"]["codes"][:-1])),
        r"'linear.weight': scale has shape \(64, 2, 2\), not \(63, 2, 2\)",
    ),
    "scale of another shape": (
        _edit(lambda s, g: s[3]["exp_avg"].update(scale=s[3]["exp_avg"]["scale"].flatten())),
        r"'conv.weight': scale has shape \(192,\), not \(32, 3, 2\)",
    ),
    "momentum of another shape": (
        _edit(lambda s, g: s[4].update(exp_avg=torch.ones(31))),
        r"'conv.bias'.*shape \(31,\), the parameter \(32,\)",
    ),
    "a NaN scale": (_edit(lambda s, g: s[3]["exp_avg"]["scale"].fill_(0xFF)), "'conv.weight': a saved scale"),
    "an infinite scale": (
        _edit(lambda s, g: s[3]["exp_avg"]["scale"][..., 1].fill_(0xFF)),
        "'conv.weight': a saved scale",
    ),
    "an infinite momentum": (_edit(lambda s, g: s[4]["exp_avg"].fill_(torch.inf)), "'conv.bias'.*not finite"),
    "a momentum that is no tensor": (_edit(lambda s, g: s[4].update(exp_avg=[0.0])), "'conv.bias'.*list, not a tensor"),
    "a newer version": (_edit(lambda s, g: g[0].update(format_version=2)), "format_version is 2.*upgrade"),
    "no block size": (_edit(lambda s, g: g[0].pop("block_size")), "block_size is None"),
    "no lr": (_edit(lambda s, g: g[0].pop("lr")), "parameter group 0: the checkpoint lacks lr"),
    "a NaN lr": (_edit(lambda s, g: g[0].update(lr=float("nan"))), "parameter group 0: lr is nan"),
    "no betas": (_edit(lambda s, g: g[0].update(betas=None)), "parameter group 0: betas is None"),
    "no number of steps": (_edit(lambda s, g: g[0].update(step="x")), "parameter group 0: step is 'x'"),
    "half a step": (_edit(lambda s, g: g[0].update(step=3.5)), "step is 3.5.*a whole number"),
    "half a step in a tensor": (_edit(lambda s, g: g[0].update(step=torch.tensor(3.5))), "step is tensor.*a whole"),
    "one beta": (_edit(lambda s, g: g[0].update(betas=(0.9,))), r"parameter group 0: betas is \(0.9,\)"),
    "a lost state": (_edit(lambda s, g: s.clear()), r"holds no state.*zero_grad\(\)"),
    "another number of groups": (_edit(lambda s, g: g.append(g[0] | {"params": []})), r"sizes \[5, 0\].*sizes \[5\]"),
}


@pytest.mark.parametrize(("damage", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_checkpoint_is_refused_and_changes_nothing(damage: Callable, message: str) -> None:
    saved = copy.deepcopy(train(make(), 0, 3).state_dict())
    damage(saved)
    live = train(make(torch.float32, lr=0.5), 7, 9)
    before, states = everything(live), {p: live.state[p] for p in parameters(live)}
    with pytest.raises((ValueError, TypeError), match=message):
        live.load_state_dict(saved)
    assert_same(everything(live), before)
    assert all(live.state[p] is state for p, state in states.items())
    twin = make(torch.float32, lr=0.5)
    assert_same(everything(train(live, 9, 11)), everything(train(twin, 7, 11)))


@pytest.mark.parametrize("what", [None, [], "optimizer.pt", {"model": {}}])
def test_what_is_no_state_dict_is_refused(what: object) -> None:
    with pytest.raises(TypeError, match=r"'state' .* and 'param_groups'"):
        make().load_state_dict(what)  # type: ignore[arg-type]


def test_a_parameter_that_was_left_out_is_named() -> None:
    """Report 31: parameters came back frozen and were filtered out, and the message said only that sizes differ."""
    saved = train(make(), 0, 2).state_dict()
    model = make_model()
    model.linear.bias.requires_grad_(False)
    live = Lion8bit([(n, p) for n, p in model.named_parameters() if p.requires_grad])
    with pytest.raises(ValueError, match=r"sizes \[5\].*sizes \[4\].*Only in the checkpoint: linear\.bias"):
        live.load_state_dict(saved)
    assert not live.state


def test_without_names_errors_give_the_number() -> None:
    live = Lion8bit([{"params": [nn.Parameter(torch.zeros(3))]}, {"params": [nn.Parameter(torch.zeros(4))]}])
    saved = copy.deepcopy(train(live, 0, 1).state_dict())
    saved["state"][1]["exp_avg"] = torch.zeros(5)
    with pytest.raises(ValueError, match=r"parameter 1 \(group 1\): the saved momentum has shape \(5,\)"):
        live.load_state_dict(saved)


def test_a_parameter_without_saved_state_starts_from_zero_with_a_warning() -> None:
    """Frozen when it was saved, trained now."""
    source = make()
    parameters(source)[1].requires_grad_(False)
    set_gradients(source, 0)
    parameters(source)[1].grad = None
    source.step()
    live = train(make(), 5, 7)
    with pytest.warns(UserWarning, match="no state for parameter 'linear.weight'") as warned:
        live.load_state_dict(source.state_dict())
    assert parameters(live)[1] not in live.state
    assert [warning.filename for warning in warned] == [__file__]
    train(live, 1, 2)


if __name__ == "__main__":
    with torch.compiler.set_stance("force_eager"):
        resume_in_this_process(sys.argv[1])
