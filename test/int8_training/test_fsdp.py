"""Int8 linear layers under FSDP2, on two processes."""

import copy
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from lowbit_optim.int8_training import convert_int8_mixed_precision

RANKS = 2
TOKENS = 24  # a rank


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    # FSDP hangs a hook on the first layer's output, which the in-place operation must not lose.
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(inplace=True), nn.Linear(64, 15, bias=False))
    convert_int8_mixed_precision(model, filter_fn=lambda module, name: True)
    return model


def make_inputs() -> Tensor:
    return torch.randn(RANKS, TOKENS, 32, generator=torch.Generator().manual_seed(1))


def mean_gradients(model: nn.Module, param_dtype: torch.dtype) -> dict[str, Tensor]:
    """Of the ranks' losses, in one process."""
    model.to(param_dtype)
    sums: dict[str, Tensor] = {}
    for x in make_inputs():
        model.zero_grad()
        model(x.to(param_dtype)).square().sum().backward()
        for name, parameter in model.named_parameters():
            sums[name] = sums.get(name, 0) + parameter.grad.float() / RANKS
    return sums


def run_rank(rank: int, store: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    try:
        for param_dtype in (torch.float32, torch.bfloat16):
            check_rank(rank, param_dtype)
    finally:
        dist.destroy_process_group()


def check_rank(rank: int, param_dtype: torch.dtype) -> None:
    model = make_model()
    expected = mean_gradients(copy.deepcopy(model), param_dtype)
    state = copy.deepcopy(model.state_dict())
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
    mesh = init_device_mesh("cpu", (RANKS,))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh, mp_policy=policy)

    sharded_state = model.state_dict()
    assert list(sharded_state) == list(state)
    assert all(torch.equal(sharded_state[name].full_tensor(), value) for name, value in state.items())

    for _ in range(2):  # the second time with weights that were freed before
        model.zero_grad()
        x = make_inputs()[rank].requires_grad_()  # so that the first layer's weight is needed again
        model(x).float().square().sum().backward()
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor)
            torch.testing.assert_close(parameter.grad.full_tensor(), expected[name], rtol=1e-6, atol=1e-6)


def test_gradients_are_those_of_one_process(tmp_path: Path) -> None:
    mp.spawn(run_rank, args=(tmp_path / "store",), nprocs=RANKS)
