"""The codec keeps what docs/numerics.md promises; the references here are written from that page, in numpy."""

import hashlib
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from lowbit_optim import codec

MIN_SCALE = 2.0**-112
MAX_SCALE = (2 - 2.0**-8) * 2.0**127
# y = 2**octave * (1 + step / 32) at code 32 * octave + step, and 1 + 14.75 x = y
CURVE = (2.0 ** (np.arange(128) // 32) * (1 + np.arange(128) % 32 / 32) - 1) / 14.75

SHAPES = [
    (1,),
    (64,),
    (130,),
    (6, 130),
    (5, 20),
    (16, 64),
    (8, 4, 3, 3),
    (4, 16, 3, 3),
    (3, 4, 128),
    (3, 4, 100),
    (3, 8, 48),
]
EMPTY_SHAPES = [(0,), (0, 64), (0, 130), (6, 0), (0, 4, 3, 3), (0, 3, 64)]


def wide_range(*shape: int, device: str = "cpu") -> Tensor:
    """Random fp32 values whose magnitudes span the curve within a block and fp32's exponents across rows."""
    within = torch.randn(shape) * 10 ** (-3 * torch.rand(shape))
    if not shape or shape[0] == 0:
        return within.to(device)
    across = 10 ** torch.linspace(-30, 30, shape[0]).reshape(-1, *[1] * (len(shape) - 1))
    return (within * across).to(device)


def all_scales(device: str = "cpu") -> Tensor:
    """Every scale that :func:`codec.encode` can return but 0, as fp32."""
    scales = (torch.arange(0xFF00, dtype=torch.int32) << 15).view(torch.float32)
    return scales[scales >= MIN_SCALE].to(device)


def stored_scale(value: float) -> Tensor:
    return codec.pack_scale(torch.tensor([value]))


def unpacked(scale: Tensor) -> Tensor:
    """Stored scales as fp32, not by way of the package."""
    return ((scale.int() & 0xFFFF) * 2**15).view(torch.float32)


def random_bits(n: int) -> Tensor:
    """fp32 values of all exponents and signs, NaN and infinity among them."""
    return torch.randint(-(2**31), 2**31, (n,)).to(torch.int32).view(torch.float32)


# --- References -----------------------------------------------------------------------------------------------------


def round_to_bits(x: np.ndarray, bits: int) -> np.ndarray:
    """fp64 ``x`` with so many significant bits, ties to even."""
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.rint(mantissa * 2.0**bits), exponent - bits)


def reference_scale(absmax: np.ndarray) -> np.ndarray:
    scale = np.minimum(round_to_bits(absmax.astype(np.float64), 9), MAX_SCALE)
    return np.where(absmax < MIN_SCALE, 0, scale)


def reference_codes(x: np.ndarray, scale: float) -> np.ndarray:
    """fp32 values of one block -> codes."""
    if scale == 0:
        return np.zeros(x.shape, np.int8)
    inverse = np.float32(round_to_bits(np.float64(14.75) / scale, 11))
    mantissa, exponent = np.frexp(np.abs(x) * inverse + np.float32(1))
    steps = np.floor((2 * mantissa.astype(np.float64) - 1) * 32 + 0.5)
    return (np.sign(x) * (32 * (exponent - 1) + steps)).astype(np.int8)


def reference_encode(x: Tensor, rows: int, block_size: int) -> tuple[np.ndarray, np.ndarray]:
    """``(codes, scales)`` of ``x``, seen as so many rows, one block after the other."""
    matrix = x.double().cpu().numpy().astype(np.float32).reshape(rows, -1)
    codes, scales = np.zeros(matrix.shape, np.int8), []
    for row in range(rows):
        for start in range(0, matrix.shape[1], block_size):
            block = matrix[row, start : start + block_size]
            scale = reference_scale(np.abs(block).max())
            codes[row, start : start + block_size] = reference_codes(block, float(scale))
            scales.append(scale)
    return codes, np.array(scales)


# --- Blocks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "block_size", "layout", "scale_shape"),
    [
        ((1,), 64, (1, 1), (1,)),
        ((64,), 64, (1, 64), (1,)),
        ((130,), 64, (1, 130), (3,)),
        ((0,), 64, (1, 0), (0,)),
        ((6, 128), 64, (6, 128), (6, 2)),
        ((6, 130), 64, (6, 130), (6, 3)),
        ((6, 130), 128, (6, 130), (6, 2)),
        ((6, 20), 64, (6, 20), (6, 1)),
        ((20, 1), 64, (20, 1), (20, 1)),
        ((0, 130), 64, (0, 130), (0, 3)),
        ((6, 0), 64, (6, 0), (6, 0)),
        ((8, 4, 3, 3), 64, (8, 36), (8, 1)),  # a convolution
        ((8, 16, 3, 3), 64, (8, 144), (8, 3)),
        ((8, 16, 1, 1), 16, (8, 16), (8, 1)),
        ((0, 4, 3, 3), 64, (0, 36), (0, 1)),
        ((8, 16, 7), 64, (8, 112), (8, 2)),
        ((4, 32, 128), 64, (128, 128), (4, 32, 2)),  # experts
        ((4, 32, 100), 64, (128, 100), (4, 32, 2)),
        ((4, 32, 64), 64, (128, 64), (4, 32, 1)),
        ((4, 32, 63), 64, (4, 2016), (4, 32)),
        ((2, 3, 5, 64), 64, (30, 64), (2, 3, 5, 1)),
        ((0, 3, 64), 64, (0, 64), (0, 3, 1)),
    ],
)
def test_row_layout_and_scale_shape(shape, block_size, layout, scale_shape):
    assert codec.row_layout(shape, block_size) == layout
    assert codec.scale_shape(shape, block_size) == scale_shape
    codes, scale = codec.encode(torch.randn(shape), block_size)
    assert (codes.shape, codes.dtype) == (shape, torch.int8)
    assert (scale.shape, scale.dtype) == (scale_shape, torch.int16)
    assert codec.decode(codes, scale, block_size).shape == shape


@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_never_cross_rows(shape):
    x = torch.randn(shape)
    rows, _ = codec.row_layout(shape, 64)
    codes, scale = codec.encode(x, 64)
    for row in {0, rows // 2, rows - 1}:
        changed = x.clone().view(rows, -1)
        changed[row] *= -1024
        new_codes, new_scale = codec.encode(changed.view(shape), 64)
        others = torch.arange(rows) != row
        assert torch.equal(new_codes.view(rows, -1)[others], codes.view(rows, -1)[others])
        assert torch.equal(new_scale.view(rows, -1)[others], scale.view(rows, -1)[others])
        assert torch.equal(new_codes.view(rows, -1)[row], -codes.view(rows, -1)[row])
        assert torch.equal(unpacked(new_scale).view(rows, -1)[row], 1024 * unpacked(scale).view(rows, -1)[row])


@pytest.mark.parametrize("shape", [s for s in SHAPES if len(s) > 1])
def test_encoding_a_slice_is_slicing_what_is_encoded(shape):
    x = wide_range(*shape)
    codes, scale = codec.encode(x, 64)
    for dim in range(1 if scale.ndim < len(shape) else len(shape) - 1):
        for cut in [slice(0, 1), slice(1, 3), slice(2, None), slice(0, 0)]:
            index = (slice(None),) * dim + (cut,)
            part_codes, part_scale = codec.encode(x[index], 64)
            assert torch.equal(part_codes, codes[index])
            assert torch.equal(part_scale, scale[index])
            assert torch.equal(codec.decode(codes[index], scale[index], 64), codec.decode(codes, scale, 64)[index])


# --- The 8-bit code -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("block_size", [64, 16, 128])
@pytest.mark.parametrize("shape", SHAPES)
def test_encode_and_decode_match_the_reference(device, shape, block_size, dtype):
    x = wide_range(*shape, device=device) if dtype != torch.float16 else torch.randn(shape, device=device)
    x = x.to(dtype)
    rows, _ = codec.row_layout(shape, block_size)
    codes, scale = codec.encode(x, block_size)
    expected_codes, expected_scale = reference_encode(x, rows, block_size)
    np.testing.assert_array_equal(codes.cpu().numpy().reshape(rows, -1), expected_codes)
    np.testing.assert_array_equal(unpacked(scale).double().cpu().numpy().ravel(), expected_scale)

    n_blocks = len(expected_scale) // rows
    scale_of_element = np.repeat(expected_scale.reshape(rows, n_blocks), block_size, axis=1)[:, : codes.numel() // rows]
    expected = np.sign(expected_codes) * CURVE[np.abs(expected_codes.astype(int))] * scale_of_element
    decoded = codec.decode(codes, scale, block_size)
    assert decoded.dtype == torch.float32
    np.testing.assert_allclose(decoded.double().cpu().numpy().reshape(rows, -1), expected, rtol=2e-7, atol=0)
    assert torch.equal(codec.decode(codes, scale, block_size, dtype), decoded.to(dtype))


@pytest.mark.parametrize("shape", EMPTY_SHAPES)
def test_empty_tensors(device, shape):
    codes, scale = codec.encode(torch.empty(shape, device=device), 64)
    assert codec.decode(codes, scale, 64).shape == codes.shape == shape


def test_layout_in_memory_does_not_matter(device):
    x = torch.randn(8, 16, 3, 3, device=device)
    for strided in [
        x.to(memory_format=torch.channels_last),
        x.flip(0).flip(0),
        x.permute(1, 0, 2, 3).contiguous().permute(1, 0, 2, 3),
    ]:
        for part, expected in zip(codec.encode(strided, 64), codec.encode(x, 64), strict=True):
            assert torch.equal(part, expected)


def test_encode_leaves_its_input_alone():
    x = torch.randn(6, 128)
    before = x.clone()
    codec.encode(x, 64)
    assert torch.equal(x, before)


def test_a_code_is_the_nearest_of_the_255_values(device):
    scale = all_scales()[torch.randperm(len(all_scales()))[:200]].to(device)
    ratio = torch.cat([torch.linspace(0, 1, 3000), torch.rand(3000) ** 4]).to(device)
    x = torch.cat([ratio, -ratio]) * scale[:, None]
    codes, found_scale = codec.encode(torch.cat([x, scale[:, None]], 1), x.shape[1] + 1)
    assert torch.equal(unpacked(found_scale), scale[:, None])

    values = np.concatenate([-CURVE[:0:-1], CURVE])
    exact = x.double().cpu().numpy() / scale.double().cpu().numpy()[:, None]
    error = np.abs(values[codes[:, :-1].cpu().numpy().astype(int) + 127] - exact)
    right = np.searchsorted(values, exact).clip(1, 254)
    smallest = np.minimum(np.abs(values[right] - exact), np.abs(values[right - 1] - exact))
    # 14.75 / scale has 11 bits: a value so close to the middle of two may go to either
    assert (error <= smallest + 2 * (np.abs(exact) * 2.0**-11 + 2.0**-22)).all()
    assert (error > smallest).mean() < 0.02


def test_documented_errors():
    """The table of docs/numerics.md."""
    x = torch.cat([torch.linspace(0, 1, 200_001, dtype=torch.float64), torch.rand(100_000, dtype=torch.float64) ** 3])
    decoded = codec.decode(*codec.encode(x, x.numel()), x.numel()).double()
    error = (decoded - x).abs()
    assert error.max() <= 0.0085
    assert (error / x)[x >= 0.2].max() <= 0.021
    assert (error / x)[x >= 0.03].max() <= 0.036
    assert (decoded[x < 0.999 / 944] == 0).all()
    assert (decoded[x > 1.001 / 944] > 0).all()


def test_codebook_is_pinned():
    """Every stored state relies on these values: cases 64, a codebook edited by mistake."""
    values = codec.decode(torch.arange(-127, 128, dtype=torch.int8), stored_scale(1.0), 255)
    assert (values.diff() > 0).all()
    assert torch.equal(values, -values.flip(0))
    assert values[127] == 0
    assert not values[127].signbit()
    assert values[128].item() == pytest.approx(1 / 32 / 14.75, rel=1e-7)
    assert values[-1].item() == pytest.approx(1, rel=1e-7)
    np.testing.assert_allclose(values[127:].double(), CURVE, rtol=2e-7)
    assert hashlib.sha256(values.numpy().astype("<f4").tobytes()).hexdigest() == (
        "4fa1a840e0cddd2de5dcd6892f23fd4c5c1b5973862ce704424a903b5e98df3b"
    )


def test_encoding_what_was_decoded_changes_nothing(device):
    scale = all_scales(device)
    codes = torch.arange(-127, 128, dtype=torch.int8, device=device).expand(len(scale), 255).contiguous()
    again, scale_again = codec.encode(codec.decode(codes, codec.pack_scale(scale)[:, None], 255), 255)
    assert torch.equal(again, codes)
    assert torch.equal(unpacked(scale_again).flatten(), scale)


def test_the_maximum_of_a_block_decodes_to_the_scale(device):
    absmax = random_bits(200_000).abs()
    absmax = torch.cat([absmax[absmax.isfinite() & (absmax >= MIN_SCALE)], all_scales()]).to(device)
    for sign in [1, -1]:
        codes, scale = codec.encode(sign * absmax[:, None], 1)
        assert (codes == sign * 127).all()
        decoded = codec.decode(codes, scale, 1)
        assert ((decoded - sign * unpacked(scale)).abs() <= unpacked(scale) * 2.0**-23).all()


def test_scale_is_the_maximum_rounded_to_nine_bits(device):
    absmax = random_bits(1_000_000).abs()
    absmax = absmax[absmax.isfinite()].to(device)
    scale = codec.scale_from_absmax(absmax)
    ordinary = (absmax >= MIN_SCALE) & (absmax <= MAX_SCALE)
    expected = round_to_bits(absmax[ordinary].double().cpu().numpy(), 9)
    np.testing.assert_array_equal(scale[ordinary].double().cpu().numpy(), expected)
    assert torch.equal(codec.unpack_scale(codec.pack_scale(scale)), scale)
    assert (scale[absmax < MIN_SCALE] == 0).all()
    assert (scale[absmax > MAX_SCALE] == MAX_SCALE).all()
    assert ordinary.any()
    assert (absmax < MIN_SCALE).any()
    assert (absmax > MAX_SCALE).any()


@pytest.mark.parametrize(("beta2", "tolerance"), [(0.95, 0.02), (0.98, 0.02), (0.99, 0.02), (0.998, 0.5)])
def test_momentum_without_gradients_decays(beta2, tolerance, device):
    """Its codes stay as they are, so its scale has to: bfloat16's 8 bits are off by 8 % at 0.99 and stop at 0.998."""
    x = torch.randn(200, 64, device=device)
    n_steps = 200
    decoded = x
    for _ in range(n_steps):
        decoded = codec.decode(*codec.encode(beta2 * decoded, 64), 64)
    rate = (decoded.norm(dim=1) / x.norm(dim=1)).log() / math.log(beta2) / n_steps
    assert ((rate - 1).abs() < tolerance).all()


def test_inverse_scale_does_not_depend_on_how_a_device_divides(device):
    scale = all_scales()
    inverse = codec._inverse_scale(scale.to(device)).cpu().numpy()
    quotient = (np.float32(14.75) / scale.numpy()).view(np.int32)
    for error in range(-14, 15):  # units in the last place; fast divisions are off by 2
        divided = (quotient + np.int32(error)).view(np.float32)
        np.testing.assert_array_equal(round_to_bits(divided.astype(np.float64), 11), inverse.astype(np.float64))
    assert codec._inverse_scale(torch.zeros(1, device=device)).item() == 0


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_zeros_are_exact(device, zero):
    codes, scale = codec.encode(torch.full((3, 70), zero, device=device), 64)
    assert not codes.any()
    assert not scale.any()
    among_others = torch.randn(3, 70, device=device)
    among_others[:, ::3] = zero
    decoded = codec.decode(*codec.encode(among_others, 64), 64)
    assert (decoded[:, ::3] == 0).all()
    assert (decoded == 0).float().mean() < 0.4


def test_blocks_below_the_smallest_scale_are_zero(device):
    """And at it they are kept, so that no decoded value is subnormal."""
    just_below = float(np.nextafter(np.float32(MIN_SCALE), np.float32(0)))
    x = torch.rand(4, 64, device=device)
    x[:, 5] = 1.0
    x *= torch.tensor([[MIN_SCALE], [just_below], [2.0**-130], [2.0**-149]], device=device)
    decoded = codec.decode(*codec.encode(x, 64), 64)
    assert not decoded[1:].any()
    assert torch.allclose(decoded[0], x[0], rtol=0, atol=0.0085 * MIN_SCALE)
    smallest = codec.decode(torch.ones(1, dtype=torch.int8), stored_scale(MIN_SCALE), 64)
    assert smallest.item() >= 2.0**-121


def test_flushing_subnormal_numbers_to_zero_changes_nothing():
    x = torch.randn(120, 64) * 2.0 ** torch.linspace(-140, -100, 120)[:, None]
    expected = [*codec.encode(x, 64), codec.decode(*codec.encode(x, 64), 64)]
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormal numbers")
    try:
        found = [*codec.encode(x, 64), codec.decode(*codec.encode(x, 64), 64)]
    finally:
        torch.set_flush_denormal(False)
    assert (expected[1] == 0).any()
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def test_the_largest_floats_stay_finite(device):
    largest = torch.finfo(torch.float32).max
    x = torch.tensor([[largest, -largest, largest / 2, 1.0]], device=device)
    codes, scale = codec.encode(x, 64)
    assert unpacked(scale).item() == MAX_SCALE
    assert codes[0, :2].tolist() == [127, -127]
    decoded = codec.decode(codes, scale, 64)
    assert decoded.isfinite().all()
    torch.testing.assert_close(decoded, x, rtol=0.02, atol=0.0085 * largest)


# --- Stochastic rounding --------------------------------------------------------------------------------------------

LOW_DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
SMALLEST_EXPONENT = {torch.bfloat16: -126, torch.float16: -14}
MANTISSA_BITS = {torch.bfloat16: 7, torch.float16: 10}


def neighbours(x: Tensor, dtype: torch.dtype) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """``(down, up, fraction)``: |x| lies that fraction of the way from ``down`` to ``up``, neighbours in ``dtype``."""
    magnitude = x.double().abs().cpu().numpy()
    exponent = np.maximum(np.frexp(magnitude)[1] - 1, SMALLEST_EXPONENT[dtype])
    spacing = np.ldexp(1.0, exponent - MANTISSA_BITS[dtype])
    down = np.floor(magnitude / spacing) * spacing
    return down, down + spacing, (magnitude - down) / spacing


def hard_values(dtype: torch.dtype) -> Tensor:
    """fp32 values within the range of ``dtype``: ordinary, subnormal in it, at the ends of binades and of the range."""
    tiny, largest = torch.finfo(dtype).tiny, torch.finfo(dtype).max
    ends = np.nextafter(np.float32([1, 1, 2, 2, tiny, tiny, largest]), np.float32([0, 9, 0, 9, 0, 1, 0]))
    values = torch.cat(
        [
            torch.randn(16),
            torch.randn(8) * 1e-4,
            torch.rand(12) * tiny,
            torch.rand(4) * tiny / 500,
            torch.rand(4) * largest,
            torch.from_numpy(ends),
            torch.tensor([1 + 2.0**-9, 1 + 2.0**-11, 1 + 2.0**-8, 1.0, tiny, 0.0]),
        ]
    )
    return torch.cat([values, -values])


@LOW_DTYPES
def test_rounding_up_has_exactly_the_probability_of_the_fraction_cut_off(device, dtype):
    """Counted over all values that the noise can have."""
    x = hard_values(dtype)
    every_noise = torch.arange(65536, dtype=torch.int32, device=device)
    rounded = codec.stochastic_round(x.to(device)[:, None].expand(-1, 65536), every_noise, dtype)
    assert rounded.dtype == dtype
    found = rounded.double().abs().cpu().numpy()
    down, up, fraction = neighbours(x, dtype)
    is_up = found == up[:, None]
    assert (is_up | (found == down[:, None])).all()
    assert (((rounded.cpu() <= 0) & (x < 0)[:, None]) | ((rounded.cpu() >= 0) & (x >= 0)[:, None])).all()

    share = is_up.mean(1)
    normal = x.abs().numpy() >= 2.0 ** SMALLEST_EXPONENT[dtype]
    np.testing.assert_array_equal(share[normal], fraction[normal])
    # fp16 subnormals cut off more than the 13 bits that are drawn
    np.testing.assert_allclose(share, fraction, rtol=0, atol=0 if dtype == torch.bfloat16 else 2.0**-14)


@LOW_DTYPES
def test_values_that_need_no_rounding_stay(device, dtype):
    """All 65536 patterns of the dtype."""
    exact = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(dtype).to(device)
    for noise in [0, 1, 65535]:
        rounded = codec.stochastic_round(exact.float(), torch.full_like(exact, noise, dtype=torch.int32), dtype)
        assert torch.equal(rounded.isnan(), exact.isnan())
        assert torch.equal(rounded.nan_to_num(), exact.nan_to_num())


@LOW_DTYPES
def test_nan_and_infinity_survive_rounding(device, dtype):
    nans = torch.tensor([0x7FC00000, 0x7FFFFFFF, -0x400000, -1, 0x7F800001], dtype=torch.int32).view(torch.float32)
    x = torch.cat([nans, torch.tensor([torch.inf, -torch.inf])]).to(device)
    for noise in [0, 1, 0x8000, 0xFFFF]:
        rounded = codec.stochastic_round(x, torch.full(x.shape, noise, dtype=torch.int32, device=device), dtype)
        assert rounded[:5].isnan().all()
        assert rounded[5:].tolist() == [torch.inf, -torch.inf]


@LOW_DTYPES
def test_beyond_the_largest_finite_value_rounding_gives_that_or_infinity(device, dtype):
    largest = torch.finfo(dtype).max
    beyond = largest * (1 + torch.cat([torch.zeros(1), torch.rand(500) * 2.0**-7, torch.rand(99)]))
    beyond = torch.cat([beyond[beyond.isfinite()], torch.tensor([torch.finfo(torch.float32).max])])
    x = torch.cat([beyond, -beyond]).to(device)
    for noise in [0, 0x7FFF, 0xFFFF]:
        rounded = codec.stochastic_round(x, torch.full(x.shape, noise, dtype=torch.int32, device=device), dtype)
        assert torch.equal(rounded.sign(), x.sign().to(dtype))
        assert ((rounded.abs() == largest) | rounded.isinf()).all()


@LOW_DTYPES
def test_rounding_is_unbiased_with_the_real_noise(device, dtype):
    x = torch.randn(256, 64) * torch.logspace(-6, 2, 256)[:, None]
    down, _, fraction = neighbours(x, dtype)
    group, lane = codec.element_index(x.shape, torch.device(device))
    key, n_steps, ups = torch.tensor(codec.noise_key(0, 3), device=device), 200, np.zeros(x.shape)
    for step in range(n_steps):
        noise = codec.rounding_noise(group, lane, key, torch.tensor(step, device=device))
        ups += codec.stochastic_round(x.to(device), noise, dtype).double().abs().cpu().numpy() > down

    variance = n_steps * fraction * (1 - fraction)
    excess = ups - n_steps * fraction
    assert abs(excess.sum()) < 5 * np.sqrt(variance.sum())
    often = variance > 10
    chi_square = excess[often] ** 2 / variance[often]  # of each element over the steps: 1 on average
    assert abs(chi_square.mean() - 1) < 5 * np.sqrt(2 / chi_square.size)


def test_rounding_to_another_dtype_is_refused():
    with pytest.raises(TypeError, match=r"bfloat16 or torch\.float16, not torch\.float64"):
        codec.stochastic_round(torch.ones(1), torch.zeros(1, dtype=torch.int32), torch.float64)


# --- Rounding noise -------------------------------------------------------------------------------------------------

N_GROUPS = 2**16


def noise_of(key: int, step: int, groups: int = N_GROUPS, device: str = "cpu") -> Tensor:
    group, lane = codec.element_index((groups, codec.NOISE_LANES), torch.device(device))
    return codec.rounding_noise(group, lane, torch.tensor(key, device=device), torch.tensor(step, device=device))


def standardised(noise: Tensor) -> Tensor:
    return (noise.float() - 32767.5) / (65536 / 12**0.5)


def assert_uncorrelated(a: Tensor, b: Tensor) -> None:
    assert abs((a * b).mean().item()) < 5 / a.numel() ** 0.5


def test_noise_is_pinned():
    """A resumed run draws what the original would have drawn, whatever the version that saved it."""
    noise = noise_of(codec.noise_key(1, 2), step=3, groups=64)
    assert noise[0, :4].tolist() == [58204, 17913, 17861, 4256]
    assert noise[63, 60:].tolist() == [47231, 44220, 44302, 38656]
    assert hashlib.sha256(noise.numpy().astype("<u2").tobytes()).hexdigest() == (
        "cf267b7e91f7ecbd894e5d7a2c1f8f95397057c965c17ec2a74868ff58a93126"
    )


def test_noise_is_the_same_everywhere(device):
    assert torch.equal(noise_of(-12345678901234567, 7, 100, device).cpu(), noise_of(-12345678901234567, 7, 100))


def test_noise_is_uniform():
    noise = noise_of(codec.noise_key(0, 0), step=1)
    assert noise.dtype == torch.int32
    assert noise.min() >= 0
    assert noise.max() <= 65535
    for bins in [noise >> 12, noise & 15]:  # the bits that count most and least
        lane = torch.arange(codec.NOISE_LANES)
        count = torch.bincount((bins + 16 * lane).flatten(), minlength=16 * len(lane)).view(-1, 16).double()
        expected = N_GROUPS / 16
        assert ((count - expected) ** 2 / expected).sum(1).max() < 55  # chi-square, 15 degrees of freedom: p = 2e-6
    values = torch.bincount(noise.flatten(), minlength=65536)
    assert values.min() > 0
    assert values.max() < 2 * 64


def test_noise_of_lanes_is_uncorrelated():
    """Between any two of 64 neighbours: a weight matrix whose neighbours round alike would drift as a whole."""
    noise = standardised(noise_of(codec.noise_key(0, 0), step=1, groups=2**18))
    correlation = noise.T @ noise / len(noise)
    correlation.fill_diagonal_(0)
    assert correlation.abs().max() < 6 / len(noise) ** 0.5


def test_noise_of_groups_steps_parameters_and_seeds_is_uncorrelated():
    key = codec.noise_key(0, 0)
    noise = standardised(noise_of(key, step=1))
    for distance in [1, 2, 3, 4, 8, 16, 64, 1024]:
        assert_uncorrelated(noise[distance:], noise[:-distance])
        assert_uncorrelated(noise.flatten()[distance:], noise.flatten()[:-distance])
    for other in [
        noise_of(key, step=0),
        noise_of(key, step=2),
        noise_of(key, step=1001),
        noise_of(key, step=2**31 + 1),
        noise_of(codec.noise_key(0, 1), step=1),
        noise_of(codec.noise_key(1, 0), step=1),
        noise_of(key ^ 1, step=1),
        noise_of(key ^ (1 << 40), step=1),
        noise_of(codec.noise_key(0, 1), step=2),
    ]:
        assert_uncorrelated(noise, standardised(other))


def test_consecutive_steps_round_an_element_independently():
    over_steps = torch.stack([standardised(noise_of(codec.noise_key(5, 5), step, groups=64)) for step in range(256)])
    for distance in [1, 2, 3, 7]:
        assert_uncorrelated(over_steps[distance:], over_steps[:-distance])
    assert (over_steps.mean(0).abs() < 6 / 16).all()


@pytest.mark.parametrize(
    "shape",
    [(64,), (130,), (10, 64), (1, 64), (4, 130), (3, 5, 7), (2, 64, 64), (64, 10), (0, 64), (5, 0), (8, 4, 3, 3)],
)
def test_element_index_counts_through_the_tensor(device, shape):
    group, lane = codec.element_index(shape, torch.device(device))
    assert group.dtype == lane.dtype == torch.int32
    assert group.device.type == lane.device.type == device
    index = torch.broadcast_to(group.long() * codec.NOISE_LANES + lane, shape)
    assert torch.equal(index.flatten(), torch.arange(index.numel(), device=device))
    assert lane.numel() == 0 or (lane.min() >= 0 and lane.max() < codec.NOISE_LANES)


def test_noise_depends_on_nothing_but_the_index_of_the_element():
    """So it is the same however a tensor is cut or viewed."""
    key, step = torch.tensor(codec.noise_key(0, 7)), torch.tensor(11)
    as_blocks = codec.rounding_noise(*codec.element_index((390, 64), torch.device("cpu")), key, step)
    for shape in [(96, 260), (260, 96), (24960,), (2, 3, 4160)]:
        whole = codec.rounding_noise(*codec.element_index(shape, torch.device("cpu")), key, step)
        assert torch.equal(whole.flatten(), as_blocks.flatten())
    start, end = 12345, 13000
    index = torch.arange(start, end, dtype=torch.int32)
    part = codec.rounding_noise(index // 64, index % 64, key, step)
    assert torch.equal(part, as_blocks.flatten()[start:end])


def test_noise_keys():
    keys = {codec.noise_key(seed, parameter) for seed in range(300) for parameter in range(300)}
    keys |= {codec.noise_key(2**63 + seed, parameter) for seed in range(10) for parameter in range(10)}
    assert len(keys) == 300 * 300 + 10 * 10
    assert len({key & 0xFFFFFFFF for key in keys}) > 0.99 * len(keys)
    assert min(keys) >= -(2**63)
    assert max(keys) < 2**63
    assert min(keys) < -(2**62) < 2**62 < max(keys)
    assert [codec.noise_key(0, 0), codec.noise_key(0, 1), codec.noise_key(1, 0)] == [
        -5957183380564808212,
        -4774392932359685904,
        -817120325086700006,
    ]
