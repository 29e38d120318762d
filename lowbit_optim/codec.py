"""How numbers are stored: the 8-bit block codec, stochastic rounding and master weights, in pure functions of tensors.

Two rules hold for everything here, so that eager, compiled and hand-written kernels agree in every bit:

- Only operations that IEEE 754 rounds correctly, and integer arithmetic. No log, exp or lookup table.
- Where an approximate operation is unavoidable (a GPU's fast division), its result is rounded to fewer bits than its
  error reaches.

Shapes: a tensor is seen as rows (:func:`row_layout`); blocks of ``block_size`` elements run along a row and never
cross into the next one. The last block of a row may be short.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

# A code is a point on a mu-law curve (mu ~ 15) made of straight pieces, as in ITU-T G.711: with x = |value| / scale in
# [0, 1], y = 1 + 14.75 x spans [1, 15.75], and the code counts steps of 1/32 octave from 1.0 in y's own float bits:
# 4 octaves of 32 steps are the codes 0 ... 127.
SPAN = 14.75
ONE_BITS = 0x3F800000  # the bits of 1.0f
SIGN_BIT = -0x80000000
CODE_SHIFT = 18  # 23 mantissa bits, of which 5 are kept
INVERSE_SPAN = 1.0 / SPAN

# A scale is the upper 16 bits of a float32 after its sign, which it does not need: 8 of exponent and 8 of mantissa.
# So it cannot underflow before the momentum would, and is twice as fine as bfloat16, which matters where no gradient
# comes for long: there the scale alone has to decay, by 1 - beta2 a step.
SCALE_DTYPE = torch.int16
SCALE_SHIFT = 15
MIN_SCALE_BITS = (127 - 112) << 23  # 2**-112; the smallest value it gives, 2**-121, is still a normal number
MAX_SCALE_BITS = 0x7F7F8000  # the largest finite scale


# --- Blocks ---------------------------------------------------------------------------------------------------------


def row_layout(shape: Sequence[int], block_size: int) -> tuple[int, int]:
    """``(rows, row_length)``: how blocks see a tensor of this shape.

    A row is the last dimension if that is at least one block long, else all dimensions but the first (convolution
    kernels, LoRA factors). A 1-D tensor is one row.
    """
    if len(shape) <= 2:
        row_length = shape[-1] if shape else 1
        return (shape[0] if len(shape) == 2 else 1), row_length
    if shape[-1] >= block_size:
        return math.prod(shape[:-1]), shape[-1]
    return shape[0], math.prod(shape[1:])


def blocks_per_row(row_length: int, block_size: int) -> int:
    """The last block of a row may be short."""
    return (row_length + block_size - 1) // block_size


def scale_shape(shape: Sequence[int], block_size: int) -> tuple[int, ...]:
    """Shape of the scales of a tensor of this shape: the row dimension(s) replaced by the blocks of a row."""
    _, row_length = row_layout(shape, block_size)
    n_blocks = blocks_per_row(row_length, block_size)
    if len(shape) <= 2 or shape[-1] >= block_size:
        return (*shape[:-1], n_blocks)
    return (shape[0], n_blocks)


def _is_block_view(shape: Sequence[int], block_size: int) -> bool:
    """Whether each row already is one whole block, as in the compiled step's view of aligned rows.

    There a reshape, even to the same shape, would make the compiler write its input to memory.
    """
    return len(shape) == 2 and statically_known_true(shape[1] == block_size)


def _to_blocks(x: Tensor, block_size: int) -> Tensor:
    """Any shape -> ``(..., block_size)``, the short last block of a row filled up with zeros."""
    if _is_block_view(x.shape, block_size):
        return x
    rows, row_length = row_layout(x.shape, block_size)
    n_blocks = blocks_per_row(row_length, block_size)
    padded = F.pad(x.reshape(rows, row_length), (0, n_blocks * block_size - row_length))
    return padded.reshape(rows, n_blocks, block_size)


def _beside_scale(x: Tensor, scale: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """``x`` as blocks, or as rows where these end in a short block, and its scale, broadcastable to that."""
    if _is_block_view(x.shape, block_size):
        return x, scale
    rows, row_length = row_layout(x.shape, block_size)
    scale = scale.reshape(rows, blocks_per_row(row_length, block_size))
    if statically_known_true(row_length % block_size == 0):
        return x.reshape(rows, scale.shape[1], block_size), scale.unsqueeze(2)
    # Filling the rows up and cutting them off again would do, but torch's CPU compiler (2.13) then makes of an index
    # i // block_size two nested loops, and forgets the rest of the row. It knows `//`, but does not see through this:
    block = torch.div(torch.arange(row_length, device=x.device), block_size, rounding_mode="trunc")
    return x.reshape(rows, row_length), scale[:, block]


def _reshape(x: Tensor, shape: Sequence[int], block_size: int) -> Tensor:
    return x if _is_block_view(shape, block_size) else x.reshape(shape)


# --- The 8-bit code -------------------------------------------------------------------------------------------------


def scale_from_absmax(absmax: Tensor) -> Tensor:
    """Block maximum (fp32, >= 0) -> scale, rounded to the 9 significant bits that are stored, as fp32.

    Zero if the maximum is below 2**-112 (2e-34), so that no decoded value is subnormal: some devices flush those.
    """
    bits = absmax.view(torch.int32)
    half = 1 << (SCALE_SHIFT - 1)
    rounded = (bits + (half - 1) + ((bits >> SCALE_SHIFT) & 1)) & -(1 << SCALE_SHIFT)
    return torch.where(bits < MIN_SCALE_BITS, 0, rounded.clamp(max=MAX_SCALE_BITS)).view(torch.float32)


def pack_scale(scale: Tensor) -> Tensor:
    """fp32 from :func:`scale_from_absmax` -> int16, as it is stored."""
    return (scale.view(torch.int32) >> SCALE_SHIFT).to(SCALE_DTYPE)


def unpack_scale(stored: Tensor) -> Tensor:
    """int16 -> fp32."""
    return ((stored.to(torch.int32) & 0xFFFF) << SCALE_SHIFT).view(torch.float32)


def _inverse_scale(scale: Tensor) -> Tensor:
    """``14.75 / scale``, and 0 for a scale of 0, rounded to 11 significant bits.

    A GPU's fast division is off by up to 2 units in the last of 24 bits. A scale has 9 bits, and no quotient comes
    within 15 units of where rounding to 11 bits would tip, so every device gets the same result.
    """
    bits = (SPAN / scale).view(torch.int32)
    rounded = ((bits + 0x1000) & -0x2000).view(torch.float32)
    return torch.where(scale > 0, rounded, 0.0)


def _encode_blocks(x: Tensor, scale: Tensor) -> Tensor:
    """fp32 values and their broadcastable fp32 scale -> int8 codes. ``|x| <= scale`` up to the scale's rounding."""
    y = x.abs() * _inverse_scale(scale) + 1.0
    magnitude = (y.view(torch.int32) - (ONE_BITS - (1 << (CODE_SHIFT - 1)))) >> CODE_SHIFT
    sign = x.view(torch.int32) >> 31  # 0 or -1
    return ((magnitude ^ sign) - sign).to(torch.int8)


def _decode_blocks(codes: Tensor, scale: Tensor) -> Tensor:
    """int8 codes and their broadcastable fp32 scale -> fp32 values."""
    code = codes.to(torch.int32)
    y = ((code.abs() << CODE_SHIFT) + ONE_BITS).view(torch.float32)
    magnitude = (y - 1.0) * (scale * INVERSE_SPAN)
    return (magnitude.view(torch.int32) | (code & SIGN_BIT)).view(torch.float32)


def encode(x: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Quantise ``x`` block by block.

    Args:
        x: finite values, any shape but 0-D, any float dtype.
        block_size: elements that share a scale.

    Returns:
        ``codes``, int8, shaped like ``x``, in -127 ... 127; and ``scale``, int16 (:func:`pack_scale`), of
        :func:`scale_shape`. Zero is coded exactly; each block's maximum decodes to the scale, give or take fp32's
        last bit. Encoding what :func:`decode` returned gives the same codes and scale.
    """
    x = x.float()
    scale = scale_from_absmax(_to_blocks(x, block_size).abs().amax(-1, keepdim=True))
    codes = _reshape(_encode_blocks(*_beside_scale(x, scale, block_size)), x.shape, block_size)
    return codes, pack_scale(scale).reshape(scale_shape(x.shape, block_size))


def decode(codes: Tensor, scale: Tensor, block_size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values that ``codes`` (int8) and ``scale`` stand for, shaped like ``codes``. Inverse of :func:`encode`."""
    values = _decode_blocks(*_beside_scale(codes, unpack_scale(scale), block_size))
    return _reshape(values, codes.shape, block_size).to(dtype)


# --- Blocks that several shards hold parts of -----------------------------------------------------------------------
# Values and codes are (rows, elements of a row that are held here); `block` is int64, the block that each of those
# elements belongs to; absmax and scale are (rows, blocks_per_row).


def absmax_of_part(x: Tensor, block: Tensor, n_blocks: int) -> Tensor:
    """Largest magnitude of each block among the elements held here, fp32; 0 where there are none."""
    return x.new_zeros(x.shape[0], n_blocks).scatter_reduce_(1, block.expand(x.shape), x.abs(), "amax")


def encode_part(x: Tensor, absmax: Tensor, block: Tensor) -> tuple[Tensor, Tensor]:
    """``(codes, scale)`` as :func:`encode` makes them, given the maxima over the whole of each block."""
    scale = scale_from_absmax(absmax)
    return _encode_blocks(x, scale[:, block]), pack_scale(scale)


def decode_part(codes: Tensor, scale: Tensor, block: Tensor) -> Tensor:
    """fp32 values. Inverse of :func:`encode_part`."""
    return _decode_blocks(codes, unpack_scale(scale)[:, block])


# --- Stochastic rounding --------------------------------------------------------------------------------------------
# The noise is a hash of (key, step, element index), not a generator's next number: it is the same however a tensor is
# sharded and whatever else draws random numbers. int32 arithmetic wraps. Most of the mixing is done once for each 64
# consecutive elements, since it would otherwise cost as much time as the rest of the step.

NOISE_LANES = 64
MIX_A, MIX_B, MIX_STEP = 0x7FEB352D, 0x846CA68B - (1 << 32), 0x9E3779B1 - (1 << 32)
LANE_STEP, LANE_BASE = 0x3C6EF362, 0x2C1B3C6D


def _shift_right(x: Tensor, n: int) -> Tensor:
    """Logical shift of an int32."""
    return (x >> n) & ((1 << (32 - n)) - 1)


def _multiply(x: Tensor, y: Tensor | int) -> Tensor:
    """Product of int32s, wrapping. By way of int64: a C++ compiler may take it that an int32 does not overflow."""
    return (x.to(torch.int64) * y).to(torch.int32)


def rounding_noise(group: Tensor, lane: Tensor, key: Tensor, step: Tensor) -> Tensor:
    """16 uniform bits an element, int32 in 0 ... 65535.

    Args:
        group: int32, element index // 64, broadcastable to the result.
        lane: int32, element index % 64, likewise.
        key: 0-D int64, from :func:`noise_key`.
        step: 0-D int64, the number of the step.
    """
    key_low, key_high = key.to(torch.int32), (key >> 32).to(torch.int32)
    h = _multiply(group ^ key_low, MIX_A)
    h = h ^ _shift_right(h, 15) ^ (step * MIX_STEP + key_high).to(torch.int32)
    h = _multiply(h, MIX_B)
    h = h ^ _shift_right(h, 16)
    h = _multiply(h, MIX_A)
    h = h ^ _shift_right(h, 15)
    # One odd multiplier a lane: uniform in each lane, and uncorrelated between any two, since no small multiples of
    # two multipliers agree.
    multiplier = _multiply(lane, LANE_STEP) ^ LANE_BASE
    return _shift_right(_multiply(h, multiplier), 16)


class Position(NamedTuple):
    """Where in a tensor the elements of a shard lie, in order: from ``first`` on, in one go or in runs.

    ``first`` and the ``(length, stride)`` of runs are 0-D int64 tensors; a run begins ``stride`` after the one before.
    They count elements, or groups of ``NOISE_LANES`` if ``in_groups``.
    """

    first: Tensor
    runs: tuple[Tensor, Tensor] | None
    in_groups: bool

    def __call__(self, index: Tensor) -> Tensor:
        """Index in the shard -> index in the tensor."""
        if self.runs is None:
            return index + self.first
        length, stride = self.runs
        return index + torch.div(index, length, rounding_mode="trunc") * (stride - length) + self.first


def element_index(
    shape: Sequence[int], device: torch.device, position: Position | None = None
) -> tuple[Tensor, Tensor]:
    """``(group, lane)`` of :func:`rounding_noise` for a contiguous tensor, broadcastable to ``shape``.

    ``position`` says where it lies, if it is a shard of another one whose elements are counted.
    """
    in_groups = position is None or position.in_groups
    if in_groups and len(shape) == 2 and statically_known_true(shape[1] == NOISE_LANES):
        group = torch.arange(shape[0], dtype=torch.int32, device=device).unsqueeze(1)
        lane = torch.arange(NOISE_LANES, dtype=torch.int32, device=device)
    else:
        index = torch.arange(math.prod(shape), device=device).reshape(shape)
        if position is not None and not in_groups:
            index = position(index)
        group, lane = (index // NOISE_LANES).to(torch.int32), (index % NOISE_LANES).to(torch.int32)
    return (position(group) if position is not None and in_groups else group), lane


class Noise(NamedTuple):
    """The noise of one parameter in one step.

    Args:
        key, step: 0-D int64, as :func:`rounding_noise` takes them.
        position: of a shard in the parameter; None: it is the whole, or lies at the same indices.
    """

    key: Tensor
    step: Tensor
    position: Position | None = None


def noise_of(param: Tensor, noise: Noise | None) -> Tensor | None:
    """What :func:`write_weight` takes: :func:`rounding_noise` shaped like ``param``, contiguous; None for None."""
    if noise is None:
        return None
    group, lane = element_index(param.shape, param.device, noise.position)
    return rounding_noise(group, lane, noise.key, noise.step)


def noise_key(seed: int, parameter_index: int) -> int:
    """A 64-bit key (as a signed int) for the noise of one parameter, by SplitMix64's finaliser."""
    mask = (1 << 64) - 1
    z = (seed * 0x9E3779B97F4A7C15 + (parameter_index + 1) * 0xD1342543DE82EF95) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    z ^= z >> 31
    return z - (1 << 64) if z >> 63 else z


def stochastic_round(x: Tensor, noise: Tensor, dtype: torch.dtype) -> Tensor:
    """Round fp32 ``x`` to bfloat16 or float16, up with the probability of the fraction that rounding down cuts off.

    Args:
        x: float32.
        noise: int32, 16 uniform bits an element (:func:`rounding_noise`).
        dtype: ``torch.bfloat16`` or ``torch.float16``.

    Beyond the largest finite value of ``dtype`` this may give infinity. Infinity and NaN stay what they are.
    """
    if dtype == torch.bfloat16:
        rounded = ((x.view(torch.int32) + noise) & -0x10000).view(torch.float32)
        return torch.where(x.isnan(), x, rounded).to(dtype)  # noise would turn a NaN into a number
    if dtype == torch.float16:
        rounded = _from_ordinal((_ordinal(x, dtype) + (noise >> 3)) & -0x2000, dtype)
        return torch.where(x.abs() < 65504.0, rounded, x).to(dtype)
    raise TypeError(f"stochastic rounding is to torch.bfloat16 or torch.float16, not {dtype}")


# --- Master weights -------------------------------------------------------------------------------------------------
# A 16-bit weight and a residual together are a wider one: weight + residual * ulp(weight) / 2**B, where B is the bits
# of the residual, 8 or 16. The weight is that sum rounded to nearest, ties away from zero, so that a tie's residual is
# -2**(B - 1), which fits, and not 2**(B - 1). All of it is integer arithmetic on ordinals.

CUT_BITS = {torch.bfloat16: 16, torch.float16: 13}  # of a float32 significand, that the dtype has no room for
RESIDUAL_DTYPES = {24: torch.int8, 32: torch.int16}
NAN_BITS = 0x7FC00000
FIRST_NORMAL = 2.0**-14  # of float16
FIRST_NORMAL_BITS = (127 - 14) << 23
ONE_EXPONENT = 1 << 23
MAX_MASTER = {
    (torch.bfloat16, 24): (2 - 2.0**-15) * 2.0**127,
    (torch.bfloat16, 32): (2 - 2.0**-23) * 2.0**127,
    (torch.float16, 24): 65520 - 2.0**-3,
    (torch.float16, 32): 65520 - 2.0**-8,
}


def _ordinal(x: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 -> int32, a sign bit and a magnitude that grows with ``|x|``; ``dtype`` has multiples of 2**CUT_BITS.

    For bfloat16 these are the float32's own bits. float16 has fixed spacing below 2**-14, and adding that number gives
    float32 the same, 13 bits finer: this rounds to multiples of 2**-37.
    """
    bits = x.view(torch.int32)
    if dtype == torch.bfloat16:
        return bits
    magnitude = x.abs()
    shifted = (magnitude + FIRST_NORMAL).view(torch.int32) - ONE_EXPONENT
    magnitude_bits = torch.where(magnitude < FIRST_NORMAL, shifted, magnitude.view(torch.int32))
    return magnitude_bits | (bits & SIGN_BIT)


def _from_ordinal(ordinal: Tensor, dtype: torch.dtype) -> Tensor:
    """int32 -> fp32. Inverse of :func:`_ordinal`; exact."""
    if dtype == torch.bfloat16:
        return ordinal.view(torch.float32)
    magnitude = ordinal & ~SIGN_BIT
    shifted = (magnitude + ONE_EXPONENT).view(torch.float32) - FIRST_NORMAL
    value = torch.where(magnitude < FIRST_NORMAL_BITS, shifted, magnitude.view(torch.float32))
    return (value.view(torch.int32) | (ordinal & SIGN_BIT)).view(torch.float32)


def split_weight(x: Tensor, dtype: torch.dtype, bits: int, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """fp32 master weights -> the weights that a model sees, and what they lack. :func:`merge_weight` puts it together.

    Args:
        x: float32.
        dtype: of the weights, ``torch.bfloat16`` or ``torch.float16``.
        bits: of weight and residual together, 24 or 32.
        noise: int32, 16 uniform bits an element (:func:`rounding_noise`), to round to 24 bits stochastically; None
            rounds to nearest. With 32 bits it changes nothing.

    Returns:
        ``weight`` of ``dtype``, and ``residual``, int8 or int16. Merged they give ``x``

        - bfloat16, 32 bits: exactly, for every finite ``x``;
        - bfloat16, 24 bits: rounded to 16 significant bits, an error of at most 2**-16 of ``|x|`` (of 2**-142 below
          2**-126), and beyond the largest such number, 0x7F7FFF00, to that;
        - float16, 32 bits: exactly, if ``2**-14 <= |x| < 65520``; below with an error of at most 2**-38;
        - float16, 24 bits: rounded to 19 significant bits, an error of at most 2**-19 of ``|x|``; below 2**-14 of at
          most 2**-33 + 2**-38.

        Rounded stochastically, twice these errors. A float16 master is at most 65520, saturating. The weight is the
        merged value rounded to nearest, ties away from zero, so it is infinite where a finite bfloat16 master is nearer
        to 2**128 than to the largest bfloat16. Infinity and NaN stay what they are, with a residual of 0.
    """
    cut = CUT_BITS[dtype]
    limit = MAX_MASTER[dtype, bits]
    ordinal = _ordinal(torch.where(x.abs() < math.inf, x.clamp(-limit, limit), x), dtype)
    ordinal = torch.where(x.isnan(), NAN_BITS, ordinal)
    if bits == 24:
        dropped = cut - 8
        ordinal = ordinal + (1 << (dropped - 1) if noise is None else noise >> (16 - dropped))
        ordinal = ordinal & -(1 << dropped)
    nearest = (ordinal + (1 << (cut - 1))) & -(1 << cut)
    residual = ordinal - nearest
    residual = residual >> (cut - 8) if bits == 24 else residual << (16 - cut)
    return _from_ordinal(nearest, dtype).to(dtype), residual.to(RESIDUAL_DTYPES[bits])


def merge_weight(weight: Tensor, residual: Tensor) -> Tensor:
    """fp32 master weights. Inverse of :func:`split_weight`.

    Of a weight that was set to 0 since, the residual may be of the other sign; it is then taken as 0.
    """
    cut = CUT_BITS[weight.dtype]
    ordinal, fine = _ordinal(weight.float(), weight.dtype), residual.to(torch.int32)
    merged = ordinal + (fine << (cut - 8) if residual.dtype == torch.int8 else fine >> (16 - cut))
    merged = torch.where((merged ^ ordinal) < 0, ordinal, merged)
    return _from_ordinal(merged, weight.dtype)


def convert_residual(residual: Tensor, dtype: torch.dtype) -> Tensor:
    """Between int8 and int16; to int8 rounded to nearest, ties away from zero, and 128 to 127, as the weight stays."""
    if residual.dtype == dtype:
        return residual
    fine = residual.to(torch.int32)
    return (fine << 8 if dtype == torch.int16 else ((fine + 0x80) >> 8).clamp(max=127)).to(dtype)


def read_weight(weight: Tensor, residual: Tensor | None) -> Tensor:
    """fp32: the master weight if there is a residual."""
    return weight.float() if residual is None else merge_weight(weight, residual)


def write_weight(weight: Tensor, residual: Tensor | None, x: Tensor, noise: Tensor | None) -> None:
    """Store fp32 ``x`` in ``weight``, and in ``residual`` if there is one; rounded stochastically if there is noise."""
    if residual is not None:
        x, fine = split_weight(x, weight.dtype, 24 if residual.dtype == torch.int8 else 32, noise)
        residual.copy_(fine)
    elif noise is not None:
        x = stochastic_round(x, noise, weight.dtype)
    weight.copy_(x)
