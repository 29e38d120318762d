"""What users do that nobody planned for: it works, or says what is wrong before anything has changed."""

import io
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim.lr_scheduler import LambdaLR

from lowbit_optim import Lion8bit


@pytest.fixture(autouse=True)
def eager() -> Iterator[None]:
    with torch.compiler.set_stance("force_eager"):
        yield


def parameter(dtype: torch.dtype = torch.float32) -> nn.Parameter:
    p = nn.Parameter(torch.randn(64, 64).to(dtype))
    p.grad = torch.randn_like(p)
    return p


def momentum(optimizer: Lion8bit, p: Tensor) -> Tensor:
    return optimizer.state[p]["exp_avg"].dequantize()


def test_groups_given_one_tensor_lr_have_one_each() -> None:
    """Schedulers fill a tensor lr in place."""
    lr = torch.tensor(1e-3)
    optimizer = Lion8bit([{"params": [parameter()]}, {"params": [parameter()]}], lr=lr)
    LambdaLR(optimizer, [lambda step: 1.0, lambda step: 0.1])
    assert [g["lr"].item() for g in optimizer.param_groups] == pytest.approx([1e-3, 1e-4])
    assert lr.item() == optimizer.defaults["lr"].item() == pytest.approx(1e-3)


def test_numpy_scalars_stay_out_of_a_checkpoint() -> None:
    optimizer = Lion8bit([parameter()], weight_decay=np.float64(0.1), betas=(np.float64(0.9), 0.99))
    LambdaLR(optimizer, lambda step: np.cos(0.1 * step))
    optimizer.step()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    torch.load(file, weights_only=True)


def test_what_a_schedule_left_behind_loads() -> None:
    """A linear decay one step past its end has a negative lr."""
    p = parameter()
    optimizer = Lion8bit([p])
    optimizer.param_groups[0]["lr"] = np.float32(-1e-5)
    optimizer.step()
    other = Lion8bit([p])
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["lr"] == pytest.approx(-1e-5)


@pytest.mark.parametrize("lr", [-1e-5, math.nan])
def test_one_goes_back_to_a_checkpoint_whatever_lr_has_become(lr: float) -> None:
    optimizer = Lion8bit([parameter()], lr=1e-3)
    saved = optimizer.state_dict()
    optimizer.param_groups[0]["lr"] = lr
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 1e-3


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")
def test_a_tensor_lr_that_requires_grad_is_copied_without_its_graph() -> None:
    p = parameter()
    optimizer = Lion8bit([p], lr=torch.tensor(1e-2, requires_grad=True))
    optimizer.step()
    other = Lion8bit([p], lr=torch.tensor(1e-3))
    other.load_state_dict(optimizer.state_dict())
    assert float(other.param_groups[0]["lr"]) == pytest.approx(1e-2)


@pytest.mark.parametrize("shape", [(32, 64), (32, 128), (1, 64)], ids=str)
@pytest.mark.parametrize("quantize", [False, True])
def test_a_parameter_of_another_shape_is_refused_before_a_weight_moves(shape: tuple[int, int], quantize: bool) -> None:
    """What the error says to do works, and what is saved then loads."""
    first, second = parameter(), parameter()
    optimizer = Lion8bit([first, second], quantize=quantize, min_quantized_numel=0)
    optimizer.step()
    second.grad = None
    second.data = torch.randn(shape)
    second.grad = torch.randn(shape)
    before = first.detach().clone()
    with pytest.raises(
        RuntimeError, match=rf"parameter 1 of shape \({shape[0]}, {shape[1]}\) .* state of shape \(64, 64\)"
    ):
        optimizer.step()
    assert torch.equal(first, before)
    del optimizer.state[second]
    optimizer.step()
    assert not torch.equal(first, before)
    optimizer.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("decouple_lr", [False, True])
def test_lr_zero_changes_no_weight_in_any_bit(decouple_lr: bool) -> None:
    p = parameter()
    p.data[0, :2] = torch.tensor([math.inf, -0.0])
    before = p.detach().clone()
    Lion8bit([p], lr=0.0, weight_decay=0.1, decouple_lr=decouple_lr).step()
    assert torch.equal(p.view(torch.int32), before.view(torch.int32))


def test_an_lr_that_is_not_finite_stops_before_a_weight_moves() -> None:
    p = parameter()
    before = p.detach().clone()
    optimizer = Lion8bit([p])
    optimizer.param_groups[0]["lr"] = math.nan
    with pytest.raises(ValueError, match="lr is nan"):
        optimizer.step()
    assert torch.equal(p, before)


def test_decouple_lr_switched_on_later_takes_the_lr_of_then() -> None:
    p = parameter()
    optimizer = Lion8bit([p], lr=1e-2, weight_decay=0.5)
    group = optimizer.param_groups[0]
    group["decouple_lr"] = True
    optimizer.step()
    group["lr"] = 1e-3
    before = p.detach().clone()
    p.grad = None
    p.grad = torch.zeros_like(p)
    optimizer.state[p]["exp_avg"].zero_()
    optimizer.step()
    torch.testing.assert_close(p.detach(), before * (1 - 0.5 * 0.1))


def test_fake_and_meta_steps_leave_real_ones_alone() -> None:
    """Nothing cached by a memory estimate may reach a real step."""
    with FakeTensorMode():
        Lion8bit([parameter(torch.bfloat16)]).step()
    p = parameter(torch.bfloat16)
    optimizer = Lion8bit([p])
    with torch.device("meta"):
        optimizer.step()
    optimizer.step()
    assert momentum(optimizer, p).any()


def test_a_model_built_on_meta_saves() -> None:
    with torch.device("meta"):
        model = nn.Linear(64, 64)
        optimizer = Lion8bit(model.parameters())
    model.to_empty(device="cpu")
    for p in model.parameters():
        p.data.normal_()
        p.grad = torch.randn_like(p)
    optimizer.step()
    assert optimizer.state_dict()["param_groups"][0]["step"] == 1


def test_frozen_parameters_of_other_dtypes_may_be_there() -> None:
    """As the base weights of QLoRA are."""
    packed = nn.Parameter(torch.zeros(4, dtype=torch.uint8), requires_grad=False)
    p = parameter()
    optimizer = Lion8bit([packed, p])
    optimizer.step()
    assert packed not in optimizer.state


def test_a_refused_group_is_not_there() -> None:
    optimizer = Lion8bit([parameter()])
    with pytest.raises(TypeError, match="float64"):
        optimizer.add_param_group({"params": [parameter(torch.float64)]})
    assert len(optimizer.param_groups) == 1


def test_a_model_converted_to_float64_is_refused_before_a_weight_moves() -> None:
    first, second = parameter(), parameter()
    optimizer = Lion8bit([first, second])
    before = first.detach().clone()
    second.data, second.grad = second.data.double(), None
    second.grad = torch.randn_like(second)
    with pytest.raises(TypeError, match="float64"):
        optimizer.step()
    assert torch.equal(first, before)


@pytest.mark.parametrize(("key", "meant"), [("weight_deacy", "weight_decay"), ("blocksize", "block_size")])
def test_a_typo_in_a_group_is_named(key: str, meant: str) -> None:
    with pytest.raises(ValueError, match=f"{key}=1.*did you mean {meant}"):
        Lion8bit([{"params": [parameter()], key: 1}])
    Lion8bit([{"params": [parameter()], "lr_scale": 0.5, "name": "head"}])  # metadata of other libraries


def test_names_in_another_order_are_refused() -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer = Lion8bit(model.named_parameters())
    optimizer.step()
    turned = Lion8bit(list(model.named_parameters())[::-1])
    with pytest.raises(ValueError, match=r"'0\.weight' was saved where the optimizer has '1\.weight'"):
        turned.load_state_dict(optimizer.state_dict())
    assert not turned.state


@pytest.mark.parametrize(
    ("key", "value"), [("seed", "x"), ("maximize", None), ("decouple_lr", 1), ("step", 2**70), ("lr", math.nan)]
)
def test_a_bad_option_in_a_checkpoint_changes_nothing(key: str, value: Any) -> None:
    p = parameter()
    optimizer = Lion8bit([p])
    optimizer.step()
    before = momentum(optimizer, p)
    saved = optimizer.state_dict()
    saved["param_groups"][0][key] = value
    with pytest.raises((ValueError, TypeError), match=key):
        optimizer.load_state_dict(saved)
    assert torch.equal(momentum(optimizer, p), before)
    assert optimizer.param_groups[0]["step"] == 1


def test_a_saved_momentum_put_into_the_state_is_named() -> None:
    """As torch's ZeroRedundancyOptimizer does when it loads."""
    p = parameter()
    optimizer = Lion8bit([p])
    optimizer.step()
    optimizer.state[p] = optimizer.state_dict()["state"][0]
    before = p.detach().clone()
    with pytest.raises(TypeError, match=r"parameter 0 .* as it is saved.*load_state_dict"):
        optimizer.step()
    assert torch.equal(p.detach(), before)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()
    assert not torch.equal(p.detach(), before)
