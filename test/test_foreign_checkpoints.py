"""Checkpoints of the optimizers that people come from, and back to them."""

import copy

import pytest
import torch
from torch import Tensor, nn

from lowbit_optim import Lion, Lion8bit
from lowbit_optim.checkpoint import float_state_dict
from lowbit_optim.subclasses import OptimState8bit

SHAPES = {"weight": (64, 80), "kernel": (32, 16, 3, 3), "bias": (64,)}
OPTIONS = {"lr": 3e-4, "betas": (0.95, 0.98), "weight_decay": 0.1}


@pytest.fixture(autouse=True)
def _eager():
    with torch.compiler.set_stance("force_eager"):
        yield


def make_parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES.values()]


def train(optimizer: torch.optim.Optimizer, steps: int, seed: int = 2) -> torch.optim.Optimizer:
    """Gradients whose sizes differ much within a block, as they do in training."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for group in optimizer.param_groups:
            for p in group["params"]:
                sizes = torch.rand(p.shape, generator=generator) ** 3
                p.grad = (torch.randn(p.shape, generator=generator) * sizes).to(p.dtype)
        optimizer.step()
    return optimizer


def momenta(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    states = [optimizer.state[p]["exp_avg"] for p in parameters]
    return [m.dequantize() if isinstance(m, OptimState8bit) else m for m in states]


def assert_loaded(optimizer: torch.optim.Optimizer, expected: list[Tensor], quantize: bool) -> None:
    """fp32 momentum as it was, 8-bit momentum within half a code: 1/64 of (value + block maximum / 14.75)."""
    for p, loaded, value in zip(make_parameters(), momenta(optimizer), expected, strict=True):
        value = value.float()
        if not quantize or p.ndim < 2:
            assert torch.equal(loaded, value)
            continue
        error = (loaded - value).abs()
        assert (error <= (value.abs().max() / 14.75 + value.abs()) / 60).all()
        assert error.mean() < 0.02 * value.abs().mean()


def assert_options_taken(optimizer: torch.optim.Optimizer) -> None:
    assert {key: optimizer.param_groups[0][key] for key in OPTIONS} == OPTIONS


@pytest.mark.parametrize("quantize", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lion_pytorch_loads(dtype: torch.dtype, quantize: bool) -> None:
    lion_pytorch = pytest.importorskip("lion_pytorch")
    theirs = train(lion_pytorch.Lion(make_parameters(dtype), **OPTIONS), 5)
    expected = momenta(theirs)
    assert expected[0].dtype == dtype

    ours = Lion8bit(make_parameters(dtype), quantize=quantize)
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    assert_loaded(ours, expected, quantize)
    assert_options_taken(ours)
    train(ours, 1)


@pytest.mark.parametrize("source", [Lion8bit, Lion])
def test_lion_pytorch_loads_float_state_dict_and_goes_on(source: type) -> None:
    lion_pytorch = pytest.importorskip("lion_pytorch")
    ours = train(source(make_parameters(), **OPTIONS), 5)
    theirs = lion_pytorch.Lion([p.detach().clone().requires_grad_() for p in ours.param_groups[0]["params"]])
    theirs.load_state_dict(float_state_dict(ours))
    assert_options_taken(theirs)
    for m, expected in zip(momenta(theirs), momenta(ours), strict=True):
        assert m.dtype == torch.float32
        assert torch.equal(m, expected)

    train(theirs, 1, seed=3)
    train(ours, 1, seed=3)
    for p, q in zip(theirs.param_groups[0]["params"], ours.param_groups[0]["params"], strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_float_state_dict_shares_nothing_and_leaves_out_how_state_is_stored(dtype: torch.dtype) -> None:
    ours = train(Lion(make_parameters()), 3)
    saved = float_state_dict(ours.state_dict(), dtype)
    before = [m.clone() for m in momenta(ours)]
    for state in saved["state"].values():
        assert list(state) == ["exp_avg"]
        assert state["exp_avg"].dtype == dtype
        state["exp_avg"].fill_(7)
    assert all(torch.equal(m, b) for m, b in zip(momenta(ours), before, strict=True))
    assert not {"quantize", "block_size", "format_version"} & set(saved["param_groups"][0])


def test_float_state_dict_refuses_an_integer_dtype() -> None:
    with pytest.raises(ValueError, match=r"torch\.int8.*torch\.float32"):
        float_state_dict(Lion8bit(make_parameters()), torch.int8)


@pytest.mark.parametrize("quantize", [True, False])
@pytest.mark.parametrize("nested", [True, False], ids=["nested", "flat"])
@pytest.mark.parametrize("name", ["Lion", "Lion8bit"])
def test_bitsandbytes_loads(name: str, nested: bool, quantize: bool) -> None:
    """Newer versions nest the tensors for FSDP's sake, older ones did not."""
    bnb = pytest.importorskip("bitsandbytes")
    theirs = train(getattr(bnb.optim, name)(make_parameters(), **OPTIONS), 5)
    expected = [bitsandbytes_momentum(theirs.state[p]) for p in theirs.param_groups[0]["params"]]
    saved = theirs.state_dict()
    if not nested:
        saved["state"] = dict(enumerate(theirs.state[p] for p in theirs.param_groups[0]["params"]))
        assert "state1" in saved["state"][0]

    ours = Lion8bit(make_parameters(), quantize=quantize)
    ours.load_state_dict(saved)
    assert_loaded(ours, expected, quantize)
    assert_options_taken(ours)
    assert ours.param_groups[0]["step"] == 5
    assert "eps" not in ours.param_groups[0]
    train(ours, 1)


def bitsandbytes_momentum(state: dict) -> Tensor:
    """Decoded by bitsandbytes itself."""
    from bitsandbytes.functional import dequantize_blockwise

    if state["state1"].dtype != torch.uint8:
        return state["state1"]
    return dequantize_blockwise(state["state1"], absmax=state["absmax1"], code=state["qmap1"], blocksize=256)


def test_older_bitsandbytes_with_blocks_of_2048_loads() -> None:
    parameters = [nn.Parameter(torch.zeros(3, 2000))]
    table = torch.linspace(-1, 1, 256)
    indices = torch.randint(256, (3, 2000), dtype=torch.uint8)
    absmax = torch.tensor([1.0, 2.0, 4.0])
    ours = Lion(parameters)
    ours.load_state_dict(plain({"step": 7, "state1": indices, "qmap1": table, "absmax1": absmax}))
    expected = [table[int(i)] * absmax[n // 2048] for n, i in enumerate(indices.flatten())]
    assert torch.equal(momenta(ours)[0].flatten(), torch.stack(expected))


def test_llm_foundry_lion_loads() -> None:
    """DecoupledLionW: its groups carry initial_lr. DecoupledLionW_8bit, uncompressed: bfloat16, and 'errors'."""
    saved = plain({"exp_avg": torch.randn(64, 80).bfloat16()}, initial_lr=1e-3, fused=True, **OPTIONS)
    ours = Lion8bit([make_parameters()[0]], quantize=False)
    ours.load_state_dict(saved)
    assert torch.equal(momenta(ours)[0], saved["state"][0]["exp_avg"].float())
    assert ours.param_groups[0]["initial_lr"] == 1e-3
    assert ours.param_groups[0]["fused"] is None

    saved["state"][0]["errors"] = torch.zeros(64, 80)
    with pytest.warns(UserWarning, match="errors were not read") as warned:
        ours.load_state_dict(saved)
    assert [warning.filename for warning in warned] == [__file__]


def test_llm_foundry_compressed_is_refused_by_name() -> None:
    saved = plain({"exp_avg::quantized": torch.zeros(64, 80, dtype=torch.int8), "exp_avg::scales": torch.zeros(160)})
    with pytest.raises(ValueError, match=r"parameter 0 \(group 0\).*DecoupledLionW_8bit.*compress_state_dict=False"):
        Lion8bit([make_parameters()[0]]).load_state_dict(saved)


def test_flashlion_uncompressed_loads() -> None:
    flashoptim = pytest.importorskip("flashoptim")
    theirs = flashoptim.FlashLion(make_parameters(), quantize=False, master_weight_bits=None, fused=False, **OPTIONS)
    train(theirs, 5)
    saved = theirs.state_dict()
    ours = Lion8bit(make_parameters())
    ours.load_state_dict(saved)
    assert_loaded(ours, [saved["state"][i]["exp_avg"] for i in range(len(SHAPES))], quantize=True)
    assert_options_taken(ours)
    assert ours.param_groups[0]["quantize"] is True


# codes in two groups of 32 and 8, and what flashoptim 0.1.4's own kernel decodes them to
FLASH_CODES = [127, -127, 64, -64, 5, -1, 0, 100] + 28 * [90] + [-127, 1, 33, 0]
FLASH_SCALES = [0.5, 3.0]
FLASH_VALUES = (
    [0.5, -0.5, 0.16842104494571686, -0.16842104494571686, 0.01004016026854515, -0.0019762846641242504, 0.0]
    + [0.3246753215789795]
    + 24 * [0.27439025044441223]
    + 4 * [1.6463415622711182]
    + [-3.0, 0.011857707984745502, 0.44796377420425415, 0.0]
)


@pytest.mark.parametrize("scales_dtype", [torch.float16, torch.bfloat16])
def test_flashlion_compressed_loads(scales_dtype: torch.dtype) -> None:
    """Beside bfloat16 weights the bits of the fp16 scales are saved as bfloat16."""
    scales = torch.tensor(FLASH_SCALES, dtype=torch.float16).view(scales_dtype)
    codes = torch.tensor(FLASH_CODES, dtype=torch.int8).view(2, 20)
    saved = plain({"exp_avg::quantized": codes, "exp_avg::scales": scales}, master_bytewidth=0, quantize=True)
    ours = Lion([nn.Parameter(torch.zeros(2, 20))])
    ours.load_state_dict(saved)
    assert torch.equal(momenta(ours)[0].flatten(), torch.tensor(FLASH_VALUES))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="FlashLion compresses on a GPU alone")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_flashlion_trained_on_a_gpu_loads(dtype: torch.dtype) -> None:
    flashoptim = pytest.importorskip("flashoptim")
    parameters = [nn.Parameter(p.detach().to("cuda", dtype)) for p in make_parameters()]
    theirs = flashoptim.FlashLion(parameters, master_weight_bits=None, **OPTIONS)
    for p in parameters:
        p.grad = torch.randn_like(p)
    theirs.step()
    expected = [theirs.state[p]["exp_avg"].materialize().cpu() for p in parameters]
    ours = Lion(make_parameters())
    ours.load_state_dict(theirs.state_dict())
    for m, e in zip(momenta(ours), expected, strict=True):
        torch.testing.assert_close(m, e, rtol=1e-6, atol=0)  # their kernel's division is not rounded to nearest


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"exp_avg": torch.zeros(64, 80), "exp_avg_sq": torch.zeros(64, 80)}, "exp_avg_sq.*Adam"),
        ({"exp_avg": torch.zeros(64, 80, dtype=torch.int8)}, "exp_avg is torch.int8; allowed: torch.float32"),
        ({"exp_avg": torch.full((64, 80), torch.inf)}, "exp_avg has values that are not finite"),
        ({"exp_avg": torch.zeros(80, 64)}, r"shape \(80, 64\), the parameter \(64, 80\)"),
        ({"momentum_buffer": torch.zeros(64, 80)}, "momentum_buffer, none of which is a Lion momentum"),
        ({"state1": torch.zeros(64, 80, dtype=torch.uint8)}, "qmap1 is NoneType"),
        (
            {
                "state1": torch.zeros(64, 80, dtype=torch.uint8),
                "qmap1": torch.zeros(256),
                "absmax1": torch.zeros(19),
            },
            r"absmax1 has shape \(19,\) for 5120 elements",
        ),
    ],
)
def test_what_is_not_a_lion_is_refused_with_the_parameter_named(state: dict, message: str) -> None:
    ours = Lion8bit([("layer.weight", make_parameters()[0])])
    with pytest.raises((ValueError, TypeError), match=f"parameter 'layer.weight'.*{message}"):
        ours.load_state_dict(plain(state))
    assert not ours.state


def plain(state: dict, **options: object) -> dict:
    return {"state": {0: state}, "param_groups": [{"lr": 1e-4, "betas": (0.9, 0.99), **options, "params": [0]}]}
