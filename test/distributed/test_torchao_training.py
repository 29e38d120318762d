"""torchao's own int8 training under FSDP2: parameters that are DTensors of subclasses, or of swapped modules."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from meshes import device_mesh, local
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from workers import Ranks, device

from lowbit_optim import Lion8bit
from lowbit_optim.subclasses import OptimState8bit

STEPS, MORE = 5, 3


def make_model(dtype: torch.dtype, converted: Callable[[nn.Module], None] | None = None) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)).to(device(), dtype)
    if converted is not None:
        converted(model)
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=device_mesh((dist.get_world_size(),)))
    return model


def mixed_precision(model: nn.Module, module_swap: bool = False) -> None:
    from torchao.prototype.quantized_training import int8_mixed_precision_training
    from torchao.quantization import quantize_

    quantize_(model, int8_mixed_precision_training(module_swap=module_swap))


def swapped(model: nn.Module) -> None:
    mixed_precision(model, module_swap=True)


def quantized_weights(model: nn.Module) -> None:
    from torchao.prototype.quantized_training import int8_weight_only_quantized_training
    from torchao.quantization import quantize_

    quantize_(model, int8_weight_only_quantized_training())


def make_optimizer(model: nn.Module) -> Lion8bit:
    return Lion8bit(model.parameters(), lr=3e-3, weight_decay=0.1)


def train(model: nn.Module, optimizer: Any, first: int, steps: int) -> list[float]:
    """Losses; every rank has the same data."""
    losses = []
    for step in range(first, first + steps):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(step)).to(device(), model[2].bias.dtype)
        loss = (model(x) - x).square().float().mean()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def bits(model: nn.Module, optimizer: Any) -> list[Tensor]:
    """What this rank holds: weights, codes and scales."""
    found = []
    for p in model.parameters():
        exp_avg = optimizer.state[p]["exp_avg"]
        parts = [exp_avg.codes, exp_avg.scale] if isinstance(exp_avg, OptimState8bit) else [exp_avg]
        found += [plain(p), *map(local, parts)]
    return [x.clone() for x in found]


def plain(p: Any) -> Tensor:
    held = local(p)
    return torch.empty(held.shape, dtype=held.dtype, device=held.device).copy_(held)


def assert_plain_8_bit_state(model: nn.Module, optimizer: Any) -> None:
    for p in (model[0].weight, model[2].weight):
        exp_avg = optimizer.state[p]["exp_avg"]
        assert type(exp_avg) is OptimState8bit
        assert isinstance(exp_avg.codes, DTensor)
        assert {type(local(part)) for part in (exp_avg.codes, exp_avg.scale)} == {Tensor}
        assert exp_avg.codes.placements == p.placements


@pytest.mark.parametrize("converted", [mixed_precision, swapped])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mixed_precision_trains_as_bf16_does_and_resumes(
    converted: Callable[[nn.Module], None], dtype: torch.dtype, ranks: Ranks, tmp_path: Path
) -> None:
    """Report 87."""
    pytest.importorskip("torchao.prototype.quantized_training")
    ranks.run(2, _mixed_precision, converted, dtype, tmp_path)


def _mixed_precision(converted: Callable[[nn.Module], None], dtype: torch.dtype, folder: Path) -> None:
    model = make_model(dtype, converted)
    kinds = [type(local(p)) for p in model.parameters()]
    optimizer = make_optimizer(model)
    losses = train(model, optimizer, 0, STEPS)
    assert_plain_8_bit_state(model, optimizer)
    assert [type(local(p)) for p in model.parameters()] == kinds

    in_bf16 = make_model(torch.bfloat16)
    expected = train(in_bf16, make_optimizer(in_bf16), 0, STEPS)
    assert expected[-1] < 0.95 * expected[0]
    assert losses == pytest.approx(expected, rel=1e-2)
    if converted is swapped:  # torchao 0.18 multiplies weights of its subclass in bf16, sharded or not
        assert losses != expected

    _save(model, optimizer, folder)
    more = train(model, optimizer, STEPS, MORE)
    fresh = make_model(dtype, converted)
    fresh_optimizer = make_optimizer(fresh)
    _load(fresh, fresh_optimizer, folder)
    assert train(fresh, fresh_optimizer, STEPS, MORE) == more
    for a, b in zip(bits(fresh, fresh_optimizer), bits(model, optimizer), strict=True):
        assert torch.equal(a, b)


def _save(model: nn.Module, optimizer: Any, folder: Path) -> None:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state}, checkpoint_id=folder / "model")
    dcp.save({"optimizer": optimizer_state}, checkpoint_id=folder / "optimizer")


def _load(model: nn.Module, optimizer: Any, folder: Path) -> None:
    """The optimizer's half needs no class of torchao's, which is in the model's."""
    from torchao.prototype.quantized_training import int8_mixed_precision

    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.load({"optimizer": optimizer_state}, checkpoint_id=folder / "optimizer")
    names = ["Int8MixedPrecisionTrainingLinearWeight", "Int8MixedPrecisionTrainingConfig"]
    with torch.serialization.safe_globals([getattr(int8_mixed_precision, name) for name in names]):
        dcp.load({"model": model_state}, checkpoint_id=folder / "model")
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)


def test_momentum_of_a_quantized_weight_is_not_one(ranks: Ranks) -> None:
    """Report 90: ``zeros_like(p)`` would be another int8 weight, which rounds what is added to it."""
    pytest.importorskip("torchao.prototype.quantized_training")
    ranks.run(2, _quantized_weights)


def _quantized_weights() -> None:
    model = make_model(torch.bfloat16, quantized_weights)
    kind = type(local(model[0].weight))
    assert kind.__name__ == "Int8QuantizedTrainingLinearWeight"
    optimizer = make_optimizer(model)
    losses = train(model, optimizer, 0, STEPS)
    assert losses[-1] < losses[0]
    assert_plain_8_bit_state(model, optimizer)
    assert type(local(model[0].weight)) is kind
