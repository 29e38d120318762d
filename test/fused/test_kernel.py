"""The kernel equals the ordinary-looking step in every bit."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from lowbit_optim import codec
from lowbit_optim.lion import lion_update
from lowbit_optim.subclasses import OptimState8bit
from lowbit_optim.updates import FusedOptions, Updates

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
SCALARS = (1e-2, 1e-3, 0.9, 1 - 0.9, 0.99, 1 - 0.99)
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
SHAPES: list[tuple[int, ...]] = [
    *[(1, 64), (3, 128), (64, 64), (5, 4, 64), (3, 64, 1, 1), (40, 192)],  # whole blocks
    *[(65, 16), (300, 16), (129, 32), (2, 1, 4, 4)],  # rows that are blocks themselves
    *[(1, 65), (2, 63), (3, 100), (17, 75), (5, 17), (7, 3, 3, 3), (33, 130), (5, 96), (4, 33, 3, 3)],  # uneven
    *[(1,), (63,), (64,), (1000,), (40, 1), (33, 15), (3000,), (16,)],  # not quantised
    *[(0, 64), (0,), (5, 0)],
]
Case = tuple[list[Tensor], list[Tensor]]


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(INTEGERS[x.element_size()]).cpu()


def parts(state: Tensor) -> list[Tensor]:
    return [state.codes, state.scale] if isinstance(state, OptimState8bit) else [state]


def assert_same_bits(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        for part, expected in zip(parts(a), parts(b), strict=True):
            assert torch.equal(bits(part), bits(expected)), f"{tuple(a.shape)}: {a}\n{b}"


def make(shapes: list, dtype: torch.dtype, block_size: int = 64, quantize: bool = True) -> Case:
    params = [torch.randn(shape, device=DEVICE).to(dtype) for shape in shapes]
    states = [
        OptimState8bit.from_float(torch.randn(p.shape, device=DEVICE) * 0.01, block_size)
        if quantize and p.ndim > 1 and p.numel() and codec.row_layout(p.shape, block_size)[1] >= 16
        else torch.randn(p.shape, device=DEVICE) * 0.01
        for p in params
    ]
    return params, states


def copies(tensors: list[Tensor]) -> list[Tensor]:
    return [t.clone() for t in tensors]


def gradients(params: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Of magnitudes from 1e-6 to 1, with a few zeros."""
    grads = []
    for p in params:
        magnitude = 10 ** (-6 * torch.rand(p.shape, device=DEVICE))
        grads.append((torch.randn(p.shape, device=DEVICE) * magnitude * (torch.rand_like(magnitude) > 0.05)).to(dtype))
    return grads


def reference(
    params: list[Tensor],
    grads: list[Tensor],
    states: list[Tensor],
    step: int,
    rounding: bool,
    residuals: list[Tensor] | None = None,
) -> None:
    scalars = [torch.tensor(value, dtype=torch.float32) for value in SCALARS]
    for i, (p, g, m) in enumerate(zip(params, grads, states, strict=True)):
        noise = codec.Noise(torch.tensor(codec.noise_key(0, i)), torch.tensor(step))
        noise = noise if rounding and p.dtype != torch.float32 else None
        lion_update(p, g, m, *scalars, noise, residuals[i] if residuals else None)


def residuals_of(params: list[Tensor], bits: int) -> list[Tensor]:
    """Anything that fits."""
    dtype = codec.RESIDUAL_DTYPES[bits]
    limits = torch.iinfo(dtype)
    return [torch.randint(limits.min, limits.max + 1, p.shape, device=DEVICE).to(dtype) for p in params]


def rounds_like_a_gpu(dtype: torch.dtype, rounding: bool) -> bool:
    """The interpreter cuts bfloat16 off rather than rounding it to nearest, which matters where nothing else rounds."""
    return ON_GPU or rounding or dtype != torch.bfloat16


class Fused:
    """A fused step of parameters that are all of a group."""

    def __init__(self) -> None:
        from lowbit_optim.fused import FusedLion

        self.step = FusedLion()
        self.plans = 0

    def __call__(
        self,
        params: list[Tensor],
        grads: list[Tensor],
        states: list[Tensor],
        step: int | Tensor,
        rounding: bool = True,
        block_size: int = 64,
        scalars: tuple = SCALARS,
        inverse_grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
        firsts: list[int] | None = None,
        residuals: list[Tensor] | None = None,
    ) -> None:
        n = len(params)
        fine = [None] * n if residuals is None else residuals
        updates = Updates(params, grads, states, fine, list(range(n)), [0] * n if firsts is None else firsts)
        options = FusedOptions(block_size, 0, rounding, None if residuals is None else 24)
        if not self.step.takes(updates, options):
            self.step.plan(updates, options)
            self.plans += 1
        self.step.run(scalars, step, inverse_grad_scale, found_inf)


@pytest.mark.parametrize("rounding", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_bit_is_the_eager_steps(dtype: torch.dtype, rounding: bool) -> None:
    if not rounds_like_a_gpu(dtype, rounding):
        pytest.skip("Triton's interpreter does not round bfloat16 to nearest; this runs on a GPU")
    params, states = make(SHAPES, dtype)
    expected, expected_states = copies(params), copies(states)
    fused = Fused()
    for step in range(1, 101 if ON_GPU else 3):
        grads = gradients(params, dtype)
        fused(params, grads, states, step, rounding)
        reference(expected, grads, expected_states, step, rounding)
    assert_same_bits(params, expected)
    assert_same_bits(states, expected_states)


@pytest.mark.parametrize(
    ("dtype", "grad_dtype"),
    [pair for pair in itertools.product([torch.float32, torch.bfloat16, torch.float16], repeat=2) if pair[0] != pair[1]]
    + [(torch.float32, torch.float64)],
)
def test_gradients_of_another_dtype(dtype: torch.dtype, grad_dtype: torch.dtype) -> None:
    params, states = make([(3, 128), (17, 75), (100,)], dtype)
    expected, expected_states = copies(params), copies(states)
    grads = gradients(params, grad_dtype)
    Fused()(params, grads, states, 1)
    reference(expected, grads, expected_states, 1, True)
    assert_same_bits(params + states, expected + expected_states)


@pytest.mark.parametrize(("bits", "rounding"), [(24, True), (24, False), (32, True)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_master_weights(dtype: torch.dtype, bits: int, rounding: bool) -> None:
    """Of all magnitudes, the largest and what is not finite included."""
    params, states = make(SHAPES, dtype)
    for p in params:
        p *= 2.0 ** torch.randint(-30, 8, p.shape, device=DEVICE)
    special = torch.tensor(
        [0.0, -0.0, math.inf, -math.inf, torch.finfo(dtype).max, torch.finfo(dtype).tiny], dtype=dtype
    )
    params[1][0, :6] = special
    residuals = residuals_of(params, bits)
    residuals[1][0, :4] = torch.tensor([-7, -7, 0, 0])  # a weight that was set to 0 kept the residual that it had
    expected, expected_states, expected_residuals = copies(params), copies(states), copies(residuals)
    fused = Fused()
    for step in range(1, 101 if ON_GPU else 3):
        grads = gradients(params, dtype)
        fused(params, grads, states, step, rounding, residuals=residuals)
        reference(expected, grads, expected_states, step, rounding, expected_residuals)
    assert torch.equal(params[1].isnan().nonzero(), torch.tensor([[0, 2], [0, 3]], device=DEVICE)), "inf - 0.001 * inf"
    for weights in (params, expected):
        weights[1].nan_to_num_(7)
    assert_same_bits(params + residuals, expected + expected_residuals)
    assert_same_bits(states, expected_states)


@pytest.mark.parametrize(("bits", "rounding"), [(24, True), (24, False), (32, False)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_are_split_and_merged_as_the_codec_does(dtype: torch.dtype, bits: int, rounding: bool) -> None:
    """Of every sign and exponent, by all that the rounding looks at; of NaNs those that arithmetic makes."""
    import triton.language as tl
    from rounding_kernel import split_and_merge

    upper = torch.arange(-(2**15), 2**15, 1 if ON_GPU else 16, dtype=torch.int32).unsqueeze(1) << 16
    special = torch.tensor([[0x477F], [0x387F], [0x3880], [0x7F7F], [-0x81]], dtype=torch.int32) << 16
    lower = torch.tensor([0, 1, 0x80, 0xFF, 0x1000, 0xEFFF, 0xFFE0, 0x7FFF, 0x8000, 0xFF7F, 0xFF80, 0xFFFF])
    lower = torch.cat([lower, torch.randint(0, 2**16, (52,))]).to(torch.int32)
    x = (torch.cat([special, upper]) | lower).flatten().to(DEVICE).view(torch.float32)
    x = x[: x.numel() // 4096 * 4096]
    x = torch.where(x.isnan(), torch.tensor(0x7FFFFFFF, dtype=torch.int32, device=DEVICE).view(torch.float32), x)
    noise = torch.randint(0, 2**16, x.shape, dtype=torch.int32, device=DEVICE)
    weight, residual = torch.empty_like(x, dtype=dtype), torch.empty_like(x, dtype=codec.RESIDUAL_DTYPES[bits])
    merged = torch.empty_like(x)
    param = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype]
    split_and_merge[(x.numel() // 4096,)](x, noise, weight, residual, merged, 4096, param, bits - 16, rounding)
    expected, expected_residual = codec.split_weight(x, dtype, bits, noise if rounding else None)
    assert torch.equal(residual, expected_residual)
    for ours, theirs in [(weight, expected), (merged, codec.merge_weight(expected, expected_residual))]:
        assert torch.equal(ours.isnan(), theirs.isnan())
        assert torch.equal(bits_of_numbers(ours), bits_of_numbers(theirs))


def bits_of_numbers(x: Tensor) -> Tensor:
    return torch.where(x.isnan(), 0, x.view(INTEGERS[x.element_size()]))


@pytest.mark.parametrize("bits", [24, 32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_weight_that_is_not_a_number_stays_so(dtype: torch.dtype, bits: int) -> None:
    params, states = make([(3, 128)], dtype)
    residuals = residuals_of(params, bits)
    params[0][0, 5] = math.nan
    for step in range(1, 4):
        Fused()(params, gradients(params, dtype), states, step, residuals=residuals)
        assert torch.equal(params[0].isnan().nonzero(), torch.tensor([[0, 5]], device=DEVICE))


def test_only_some_have_residuals() -> None:
    """Each kind in a launch of its own, and without a residual as if no other had one."""
    params, states = make([(3, 128), (17, 75), (100,), (6, 128)], torch.bfloat16)
    residuals = [None, *residuals_of(params[1:3], 24), None]
    expected, expected_states, expected_residuals = copies(params), copies(states), copies(residuals[1:3])
    grads = gradients(params, torch.bfloat16)
    Fused()(params, grads, states, 1, residuals=residuals)
    reference(expected, grads, expected_states, 1, True, [None, *expected_residuals, None])
    assert_same_bits(params + residuals[1:3], expected + expected_residuals)


@pytest.mark.parametrize("bits", [24, 32])
def test_residuals_that_begin_anywhere(bits: int) -> None:
    params, states = make([(3, 128), (64,)], torch.bfloat16)
    residuals = [torch.cat([r.new_zeros(1), r.flatten()])[1:].view(r.shape) for r in residuals_of(params, bits)]
    expected, expected_states, expected_residuals = copies(params), copies(states), copies(residuals)
    grads = gradients(params, torch.bfloat16)
    Fused()(params, grads, states, 1, residuals=residuals)
    reference(expected, grads, expected_states, 1, True, expected_residuals)
    assert_same_bits(params + residuals, expected + expected_residuals)


@pytest.mark.parametrize("lr_on_device", [True, False])
def test_master_weights_stay_at_a_learning_rate_of_zero(lr_on_device: bool) -> None:
    params, states = make([(3, 128), (17, 75)], torch.bfloat16)
    params[0][0, 0] = math.inf
    residuals = residuals_of(params, 24)
    before = copies(params + residuals)
    zero = torch.tensor(0.0, device=DEVICE) if lr_on_device else 0.0
    scalars = (zero, zero, *SCALARS[2:])
    Fused()(params, gradients(params, torch.bfloat16), states, 1, scalars=scalars, residuals=residuals)
    assert_same_bits(params + residuals, before)


@pytest.mark.parametrize("block_size", [16, 32, 48, 128, 1024])
def test_other_block_sizes(block_size: int) -> None:
    params, states = make([(6, 128), (17, 75), (3, 2048), (100,), (9, 48)], torch.bfloat16, block_size)
    expected, expected_states = copies(params), copies(states)
    grads = gradients(params, torch.bfloat16)
    Fused()(params, grads, states, 1, block_size=block_size)
    reference(expected, grads, expected_states, 1, True)
    assert_same_bits(params + states, expected + expected_states)


def test_momentum_in_32_bits() -> None:
    params, states = make([(6, 128), (17, 75), (100,)], torch.bfloat16, quantize=False)
    expected, expected_states = copies(params), copies(states)
    grads = gradients(params, torch.bfloat16)
    Fused()(params, grads, states, 1)
    reference(expected, grads, expected_states, 1, True)
    assert_same_bits(params + states, expected + expected_states)


@pytest.mark.parametrize("which", ["param", "grad", "both"])
@pytest.mark.parametrize("quantize", [True, False])
def test_memory_that_begins_anywhere(which: str, quantize: bool) -> None:
    params, states = make([(3, 128), (64,), (17, 75)], torch.bfloat16, quantize=quantize)
    expected, expected_states = copies(params), copies(states)
    grads = gradients(params, torch.bfloat16)
    given = grads
    if which != "grad":
        params = [torch.cat([p.new_zeros(3), p.flatten()])[3:].view(p.shape) for p in params]
    if which != "param":
        given = [torch.cat([g.new_zeros(1), g.flatten()])[1:].view(g.shape) for g in grads]
    Fused()(params, given, states, 1)
    reference(expected, grads, expected_states, 1, True)
    assert_same_bits(params + states, expected + expected_states)


def test_what_is_not_finite() -> None:
    params, states = make([(3, 128), (17, 75), (100,)], torch.bfloat16)
    params[0][0, :4] = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0])
    expected, expected_states = copies(params), copies(states)
    grads = gradients(params, torch.bfloat16)
    for g in grads:
        g.view(-1)[5:8] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    for step in range(1, 4):
        Fused()(params, grads, states, step)
        reference(expected, grads, expected_states, step, True)
    for p, q in zip(params, expected, strict=True):
        assert torch.equal(p.isnan(), q.isnan())
    assert_same_bits([p.nan_to_num(7) for p in params], [p.nan_to_num(7) for p in expected])
    assert_same_bits(states, expected_states)
    assert all(m.dequantize().isfinite().all() for m in states[:2])


def test_a_gpus_own_nan_stays_one_whatever_the_noise() -> None:
    """It is 0x7FFFFFFF, to which noise may add a carry into the sign; a CPU's has zeros there."""
    from rounding_kernel import round_to_bfloat16

    nan = torch.full((64,), 0x7FFFFFFF, dtype=torch.int32, device=DEVICE).view(torch.float32)
    noise = torch.linspace(0, 65535, 64).to(DEVICE, torch.int32)
    out = torch.zeros(64, dtype=torch.int16, device=DEVICE)
    round_to_bfloat16[(1,)](nan, noise, out, 64)
    assert out.view(torch.bfloat16).isnan().all()


def test_scalars_on_the_device() -> None:
    params, states = make([(3, 128), (17, 75), (100,)], torch.bfloat16)
    expected, expected_states = copies(params), copies(states)
    grads = gradients(params, torch.bfloat16)
    lr, decay = (torch.tensor(value, device=DEVICE) for value in SCALARS[:2])
    Fused()(params, grads, states, torch.tensor(3, device=DEVICE), scalars=(lr, decay, *SCALARS[2:]))
    reference(expected, grads, expected_states, 3, True)
    assert_same_bits(params + states, expected + expected_states)


def test_lr_zero_on_the_device_moves_no_weight() -> None:
    params, states = make([(3, 128), (17, 75), (100,)], torch.bfloat16)
    params[0][0, :3] = torch.tensor([float("inf"), -0.0, float("nan")])
    before = copies(params)
    zero = torch.zeros((), device=DEVICE)
    Fused()(params, gradients(params, torch.bfloat16), states, 1, scalars=(zero, zero, *SCALARS[2:]))
    assert_same_bits(params, before)


@pytest.mark.parametrize("found_inf", [0.0, 1.0])
def test_what_a_grad_scaler_hands_over(found_inf: float) -> None:
    params, states = make([(3, 128), (17, 75), (100,), (40, 1)], torch.float16)
    expected, expected_states = copies(params), copies(states)
    grads = gradients(params, torch.float32)
    scale = torch.tensor(2.0**-10, device=DEVICE)
    scaled = [g * 1024 for g in grads]
    Fused()(params, scaled, states, 1, inverse_grad_scale=scale, found_inf=torch.tensor([found_inf], device=DEVICE))
    if found_inf == 0:
        reference(expected, grads, expected_states, 1, True)
    assert_same_bits(params + states, expected + expected_states)


def test_many_programs_find_their_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a bucket of programs there may be the ends of many tensors, or the middle of one."""
    if not ON_GPU:
        import triton.language as tl

        from lowbit_optim.fused import kernel, launch

        for module in (kernel, launch):
            monkeypatch.setattr(module, "PROGRAMS_PER_BUCKET", tl.constexpr(2))
    large = [(40_000, 64), (9_000_001,)] if ON_GPU else [(160, 64), (9001,)]
    params, states = make([(16,), large[0], *[(16,)] * 7, large[1], (3, 128), (16,)], torch.float32)
    expected, expected_states = copies(params), copies(states)
    grads = gradients(params, torch.float32)
    Fused()(params, grads, states, 1)
    reference(expected, grads, expected_states, 1, True)
    assert_same_bits(params + states, expected + expected_states)


@pytest.mark.parametrize(
    ("shape", "cut"),
    [((40, 128), 17), ((40, 64), 3), ((7, 75), 2), ((300, 16), 101), ((9, 3, 4, 4), 5), ((1000,), 333)],
)
def test_a_shard_rounds_as_its_part_of_the_whole(shape: tuple[int, ...], cut: int) -> None:
    """Cut along the first dimension, as FSDP2 does."""
    (whole,), (state,) = make([shape], torch.bfloat16)
    grads = gradients([whole], torch.bfloat16)
    row = whole[0].numel() if len(shape) > 1 else 1
    for begin, end in [(0, cut), (cut, shape[0])]:
        shard, part = whole[begin:end].clone(), state[begin:end].clone()
        fused = Fused()
        fused_updates = ([shard], [grads[0][begin:end].clone()], [part])
        fused(*fused_updates, 1, firsts=[begin * row])
        expected, expected_state = whole.clone(), state.clone()
        reference([expected], grads, [expected_state], 1, True)
        assert_same_bits([shard, part], [expected[begin:end], expected_state[begin:end]])


def test_launches_are_few() -> None:
    """One a dtype, and one for each length of rows that are blocks themselves."""
    fused = Fused()
    params, states = make(SHAPES, torch.bfloat16)
    grads = [gradients(params, torch.bfloat16) for _ in range(2)]
    fused(params, grads[0], states, 1)
    assert sorted(launch.block_size for launch in fused.step._launches) == [16, 32, 64]
    fused(params, grads[1], states, 2)
    assert fused.plans == 1, "new addresses of gradients alone need no new plan"


@pytest.mark.parametrize("guards", [True, False])
def test_a_plan_is_for_these_tensors_alone(guards: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for gradients, which may be anywhere that begins on 16 bytes as well."""
    if not guards:  # where torch has none of that name
        monkeypatch.setattr("lowbit_optim.fused.launch.TensorGuards", None)
    params, states = make([(3, 128), (100,)], torch.bfloat16)
    grads = [torch.randn_like(p) for p in params]
    fused, options = Fused().step, FusedOptions(64, 0, True, 24)
    given = Updates(params, grads, states, residuals_of(params, 24), [0, 1], [0, 0])
    fused.plan(given, options)
    assert fused.takes(given, options)
    assert fused.takes(given._replace(grads=[g.clone() for g in grads]), options)
    odd = torch.randn(3 * 128 + 1, device=DEVICE).to(torch.bfloat16)[1:].view(3, 128)
    for other in [
        {"params": [params[0].view(6, 64), params[1]]},
        {"params": [params[0].clone(), params[1]]},
        {"grads": [odd, grads[1]]},
        {"grads": [grads[0].to(torch.float32), grads[1]]},
        {"grads": [grads[0], grads[1][:64]]},
        {"exp_avgs": [states[0].clone(), states[1]]},
        {"exp_avgs": [OptimState8bit(states[0].codes, states[0].scale, 32), states[1]]},
        {"residuals": [given.residuals[0].clone(), given.residuals[1]]},
        {"indices": [0, 2]},
        {"firsts": [0, 64]},
    ]:
        assert not fused.takes(given._replace(**other), options), other.keys()
    for changed in [(32, 0, True, 24), (64, 1, True, 24), (64, 0, False, 24), (64, 0, True, None)]:
        assert not fused.takes(given, FusedOptions(*changed))


@pytest.mark.parametrize("part", ["codes", "scale", "all", "float"])
def test_a_plan_ends_with_the_memory_of_the_state(part: str) -> None:
    """Objects that are freed may leave their ids to others, and those their addresses."""
    params, states = make([(3, 128), (100,)], torch.float32)
    grads = [torch.randn_like(p) for p in params]
    given = Updates(params, grads, states, [None, None], [0, 1], [0, 0])
    fused, options = Fused().step, FusedOptions(64, 0, True, None)
    fused.plan(given, options)
    assert fused.takes(given, options)
    kept = states[0].codes, states[0].scale, states[1].data  # so that no address can be the same
    if part == "float":
        states[1].data = states[1].data.clone()
    elif part == "all":
        states[0] = states[0].clone()
    else:
        setattr(states[0], part, getattr(states[0], part).clone())
    del kept
    assert not fused.takes(given, options)
    fused.plan(given, options)
    assert fused.takes(given, options)


@pytest.mark.parametrize("part", ["shape", "dtype", "device"])
def test_state_that_does_not_fit_is_refused(part: str) -> None:
    params, _ = make([(3, 128)], torch.float32)
    wrong = {
        "shape": OptimState8bit.zeros((2, 128), device=DEVICE),
        "dtype": torch.zeros(3, 128, dtype=torch.float64, device=DEVICE),
        "device": OptimState8bit.zeros((3, 128), device="meta"),
    }[part]
    before = params[0].clone()
    with pytest.raises(RuntimeError, match=r"the state of a parameter of shape \(3, 128\) .* was changed"):
        Fused()(params, gradients(params, torch.float32), [wrong], 1)
    assert torch.equal(params[0], before)


@pytest.mark.parametrize("wrong", [torch.zeros(3, 127), torch.zeros(3, 128), torch.zeros(3, 128, device="meta").char()])
def test_a_residual_that_does_not_fit_is_refused(wrong: Tensor) -> None:
    params, states = make([(3, 128)], torch.bfloat16)
    wrong = wrong if wrong.is_meta else wrong.to(DEVICE)
    wrong = wrong if wrong.shape[1] == 128 else wrong.char()
    with pytest.raises(RuntimeError, match=r"the state of a parameter of shape \(3, 128\) .* was changed"):
        Fused()(params, gradients(params, torch.bfloat16), states, 1, residuals=[wrong])


@pytest.mark.skipif(not ON_GPU, reason="needs 16 GB")
def test_more_elements_than_an_int32_counts() -> None:
    """2**31 + 256: the last block is right, and so is the last element of an odd number of them."""
    for numel, quantize in [(2**31 + 256, True), (2**31 + 7, False)]:
        torch.cuda.empty_cache()
        p = torch.full((1, numel) if quantize else (numel,), 0.5, dtype=torch.bfloat16, device="cuda")
        g = torch.zeros_like(p)
        g.view(-1)[-64:] = torch.randn(64, device="cuda")
        m = OptimState8bit.zeros(p.shape, device="cuda") if quantize else torch.zeros(p.shape, device="cuda")
        Fused()([p], [g], [m], 1, rounding=False, found_inf=torch.ones(1, device="cuda"))
        assert (p.view(-1)[-(2**20) :] == 0.5).all(), "found_inf holds for every element"
        Fused()([p], [g], [m], 1, rounding=False)
        ours = [p.view(-1)[-64:].clone(), parts(m)[0].view(-1)[-64:].clone()]
        theirs = [torch.full((1, 64), 0.5, dtype=torch.bfloat16, device="cuda"), g.view(-1)[-64:].view(1, 64)]
        state = OptimState8bit.zeros((1, 64), device="cuda") if quantize else torch.zeros(1, 64, device="cuda")
        scalars = [torch.tensor(value, dtype=torch.float32) for value in SCALARS]
        lion_update(theirs[0], theirs[1], state, *scalars)
        assert torch.equal(bits(ours[0]), bits(theirs[0].view(-1)))
        assert torch.equal(bits(ours[1]), bits(parts(state)[0].view(-1)))
        del p, g, m
