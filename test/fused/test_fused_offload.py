"""State in host memory with the fused step: the same bits, and state dicts that wait for copies."""

import pytest
import torch
from host_streams import streams_of
from torch import nn

from lowbit_optim import Lion8bit, offload

ON_GPU = torch.cuda.is_available()
SHAPES = [(6, 128), (5, 75), (100,), (65, 16), (7, 3, 3, 3), (0, 64), (64, 256), (33, 130), (128, 64), (40, 1)]
gpu_only = pytest.mark.skipif(not ON_GPU, reason="needs a CUDA GPU")


def train(device: str, offload_state: bool, steps: int, **options: object) -> Lion8bit:
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=generator).to(device, torch.bfloat16)) for shape in SHAPES]
    groups = [{"params": params[::2]}, {"params": params[1::2], "lr": 3e-3}]
    optimizer = Lion8bit(groups, lr=1e-2, min_quantized_numel=0, offload_state=offload_state, **options)
    for _ in range(steps):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).to(device, torch.bfloat16)
        optimizer.step()
    return optimizer


def everything(optimizer: Lion8bit) -> list[torch.Tensor]:
    states = optimizer.state_dict()["state"].values()
    parts = [x for s in states for x in (s["exp_avg"].values() if isinstance(s["exp_avg"], dict) else [s["exp_avg"]])]
    return [*(p for group in optimizer.param_groups for p in group["params"]), *parts]


@pytest.mark.parametrize("options", [{}, {"quantize": False}], ids=str)
def test_the_bits_are_those_of_state_on_the_device(
    fused_device: str, options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload, "_CHUNK_BYTES", 4096)
    monkeypatch.setattr(offload, "is_offloaded", lambda p: True)
    monkeypatch.setattr(offload, "_CudaStreams", streams_of)
    steps = 50 if ON_GPU else 3
    optimizer, expected = (train(fused_device, offload_state, steps, **options) for offload_state in (True, False))
    parts, whole = (sum(plan.fused is not None for plan in o._plans.values()) for o in (optimizer, expected))
    assert parts > whole > 0
    for x, y in zip(everything(optimizer), everything(expected), strict=True):
        assert torch.equal(x.cpu(), y.cpu()), tuple(x.shape)


@gpu_only
def test_a_captured_step_is_refused() -> None:
    p = nn.Parameter(torch.randn(64, 64, device="cuda"))
    optimizer = Lion8bit([p], lr=torch.tensor(1e-3, device="cuda"), offload_state=True)
    p.grad = torch.randn_like(p)
    optimizer.step()
    with pytest.raises(RuntimeError, match="cannot be part of a CUDA graph"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimizer.step()


@gpu_only
@pytest.mark.parametrize("offload_gradients", [False, True])
def test_inside_the_cpu_offload_of_torchao(offload_gradients: bool) -> None:
    """Which steps large parameters on the CPU, each with an optimizer of its own."""
    from torchao.optim import CPUOffloadOptimizer

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64)).cuda().bfloat16()
    options = {"lr": 1e-2, "weight_decay": 0.1}
    twins = {name: nn.Parameter(p.detach().cpu()) for name, p in model.named_parameters()}
    expected = [Lion8bit([p], fused=False, **options) for name, p in twins.items() if p.numel() >= 4096]
    small = Lion8bit([p for p in twins.values() if p.numel() < 4096], fused=False, **options)
    optimizer = CPUOffloadOptimizer(model.parameters(), Lion8bit, offload_gradients=offload_gradients, **options)
    for step in range(20):
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(step)).cuda().bfloat16()
        grads = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
        for p, grad in zip(twins.values(), grads, strict=True):
            p.grad = grad.cpu()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        for each in (*expected, small):
            each.step()
    assert all(torch.equal(p.cpu(), q) for p, q in zip(model.parameters(), twins.values(), strict=True))
