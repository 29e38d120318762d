"""The Triton kernel of the fused step: Lion on every tensor of a table, in one launch.

It repeats :mod:`lowbit_optim.codec` and :func:`lowbit_optim.lion.lion_update` operation by operation, so that it gives
their bits; ``test/fused`` holds it to that. It must be compiled without contraction to FMA.

A program steps ``ROWS`` blocks of one tensor, which it looks up in the table by its number. All that differs from one
tensor to the next comes from there, so that one compiled kernel serves any model.
"""

import torch
import triton
import triton.language as tl

from lowbit_optim import codec

# The table, int64: the address of each gradient; these fields of each tensor, sizes in elements; the first program of
# each tensor; for each PROGRAMS_PER_BUCKET programs the tensor of the first of them; the last tensor.
FIELDS = ("kind", "param", "exp_avg", "scale", "numel", "row_length", "noise_key", "first_element", "residual")
N_FIELDS = tl.constexpr(len(FIELDS))
_KIND = tl.constexpr(FIELDS.index("kind"))
_PARAM = tl.constexpr(FIELDS.index("param"))
_EXP_AVG = tl.constexpr(FIELDS.index("exp_avg"))
_SCALE = tl.constexpr(FIELDS.index("scale"))
_NUMEL = tl.constexpr(FIELDS.index("numel"))
_ROW_LENGTH = tl.constexpr(FIELDS.index("row_length"))
_NOISE_KEY = tl.constexpr(FIELDS.index("noise_key"))
_FIRST_ELEMENT = tl.constexpr(FIELDS.index("first_element"))
_RESIDUAL = tl.constexpr(FIELDS.index("residual"))
PROGRAMS_PER_BUCKET = tl.constexpr(4096)

# Kinds of tensors, as bits. A kernel is compiled for those that occur in a table.
QUANTIZED = 1
UNEVEN = 2  # memory that does not begin on 16 bytes, or blocks that do not: each element is loaded by itself
_QUANTIZED = tl.constexpr(QUANTIZED)
_UNEVEN = tl.constexpr(UNEVEN)
N_KINDS = tl.constexpr(4)

# Triton wants its global constants marked
_CODE_SHIFT = tl.constexpr(codec.CODE_SHIFT)
_SCALE_SHIFT = tl.constexpr(codec.SCALE_SHIFT)
_ONE_BITS = tl.constexpr(codec.ONE_BITS)
_SIGN_BIT = tl.constexpr(codec.SIGN_BIT)
_SPAN = tl.constexpr(codec.SPAN)
_INVERSE_SPAN = tl.constexpr(codec.INVERSE_SPAN)
_MIN_SCALE_BITS = tl.constexpr(codec.MIN_SCALE_BITS)
_MAX_SCALE_BITS = tl.constexpr(codec.MAX_SCALE_BITS)
_NOISE_LANES = tl.constexpr(codec.NOISE_LANES)
_MIX_A = tl.constexpr(codec.MIX_A)
_MIX_B = tl.constexpr(codec.MIX_B)
_MIX_STEP = tl.constexpr(codec.MIX_STEP)
_LANE_STEP = tl.constexpr(codec.LANE_STEP)
_LANE_BASE = tl.constexpr(codec.LANE_BASE)
_NAN_BITS = tl.constexpr(0x7FFF0000)
_BELOW_HALF_SCALE = tl.constexpr((1 << (codec.SCALE_SHIFT - 1)) - 1)
_SCALE_MASK = tl.constexpr(-(1 << codec.SCALE_SHIFT))
_FIRST_CODE_BITS = tl.constexpr(codec.ONE_BITS - (1 << (codec.CODE_SHIFT - 1)))
_MAX_FLOAT16 = tl.constexpr(65504.0)
_FIRST_NORMAL = tl.constexpr(codec.FIRST_NORMAL)
_FIRST_NORMAL_BITS = tl.constexpr(codec.FIRST_NORMAL_BITS)
_ONE_EXPONENT = tl.constexpr(codec.ONE_EXPONENT)
_MAX_BFLOAT16_24 = tl.constexpr(codec.MAX_MASTER[torch.bfloat16, 24])
_MAX_FLOAT16_24 = tl.constexpr(codec.MAX_MASTER[torch.float16, 24])
_MAX_FLOAT16_32 = tl.constexpr(codec.MAX_MASTER[torch.float16, 32])


@triton.jit(do_not_specialize=["n_tensors", "step"])
def lion_kernel(
    table,
    n_tensors,
    step,  # an integer; where STEP_ON_DEVICE, a pointer to int64
    lr,  # this and the next: float32; where LR_ON_DEVICE, a pointer to it
    decay,
    beta1,
    grad_weight1,
    beta2,
    grad_weight2,
    inverse_grad_scale,  # pointer to float32, or None
    found_inf,  # pointer to float32, or None: unless 0, nothing is changed
    STEP_ON_DEVICE: tl.constexpr,
    LR_ON_DEVICE: tl.constexpr,
    LR_MAY_BE_ZERO: tl.constexpr,  # a check that costs 3 %
    PARAM: tl.constexpr,
    GRAD: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    RESIDUAL_BITS: tl.constexpr,  # of master weights: 8 or 16, or 0 if there are none
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,  # BLOCK, or the next power of 2
    ROWS: tl.constexpr,
    UNEVEN_ROWS: tl.constexpr,
    KINDS: tl.constexpr,  # 1 << kind, for each that occurs
):
    if STEP_ON_DEVICE:
        step = tl.load(step)
    if LR_ON_DEVICE:
        lr = tl.load(lr)
        decay = tl.load(decay)
    scalars = (
        tl.full((), lr, tl.float32),
        tl.full((), decay, tl.float32),
        tl.full((), beta1, tl.float32),
        tl.full((), grad_weight1, tl.float32),
        tl.full((), beta2, tl.float32),
        tl.full((), grad_weight2, tl.float32),
    )
    program = tl.program_id(0)
    first_program = table + (1 + N_FIELDS) * n_tensors
    tensor = _find_tensor(first_program, first_program + n_tensors, program)
    chunk = program - tl.load(first_program + tensor).to(tl.int32)
    fields = table + n_tensors + tensor * N_FIELDS
    kind = tl.load(fields + _KIND)
    for candidate in tl.static_range(N_KINDS):
        if (KINDS >> candidate) & 1:  # known to the compiler; what is not set costs nothing
            if kind == candidate:
                _step_blocks(
                    fields,
                    table + tensor,
                    chunk,
                    step,
                    scalars,
                    inverse_grad_scale,
                    found_inf,
                    LR_MAY_BE_ZERO,
                    PARAM,
                    GRAD,
                    STOCHASTIC,
                    RESIDUAL_BITS,
                    BLOCK if _QUANTIZED & candidate else WIDTH,
                    WIDTH,
                    UNEVEN_ROWS if _UNEVEN & candidate else ROWS,
                    _QUANTIZED & candidate,
                    _UNEVEN & candidate,
                )


@triton.jit
def _find_tensor(first_program, bucket, program):
    """The last tensor whose first program is not after this one."""
    bucket += program // PROGRAMS_PER_BUCKET
    low = tl.load(bucket).to(tl.int32)
    high = tl.load(bucket + 1).to(tl.int32) + 1
    while high - low > 1:
        middle = (low + high) // 2
        is_after = tl.load(first_program + middle).to(tl.int32) > program
        high = tl.where(is_after, middle, high)
        low = tl.where(is_after, low, middle)
    return low


@triton.jit
def _step_blocks(
    fields,
    grad,
    chunk,
    step,
    scalars,
    inverse_grad_scale,
    found_inf,
    LR_MAY_BE_ZERO: tl.constexpr,
    PARAM: tl.constexpr,
    GRAD: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    RESIDUAL_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    IS_QUANTIZED: tl.constexpr,
    IS_UNEVEN: tl.constexpr,
):
    first_block = chunk.to(tl.int64) * ROWS
    param_ptr = tl.load(fields + _PARAM).to(tl.pointer_type(PARAM))
    grad_ptr = tl.load(grad).to(tl.pointer_type(GRAD))
    exp_avg_ptr = tl.load(fields + _EXP_AVG).to(tl.pointer_type(tl.int8 if IS_QUANTIZED else tl.float32))
    scale_ptr = tl.load(fields + _SCALE).to(tl.pointer_type(tl.int16)) + first_block
    residual_ptr = None
    if RESIDUAL_BITS:
        residual_ptr = tl.load(fields + _RESIDUAL).to(tl.pointer_type(tl.int8 if RESIDUAL_BITS == 8 else tl.int16))
    numel = tl.load(fields + _NUMEL)
    if found_inf is not None:
        numel = tl.where(tl.load(found_inf) == 0, numel, 0)

    first_element = tl.load(fields + _FIRST_ELEMENT)  # of a shard, in the whole parameter: noise follows that
    if IS_UNEVEN:
        row_length = tl.load(fields + _ROW_LENGTH)
        places = _uneven_places(first_block, numel, row_length, first_element, BLOCK, WIDTH, ROWS)
    else:
        places = _even_places(first_block, numel, first_element, WIDTH, ROWS)
        param_ptr = tl.multiple_of(param_ptr, 16)
        grad_ptr = tl.multiple_of(grad_ptr, 16)
        # codes are aligned to 16, too, but then a thread would have 16 elements, and bfloat16 weights would be
        # exchanged among threads before they are stored
        exp_avg_ptr = tl.multiple_of(exp_avg_ptr, 8 if IS_QUANTIZED else 16)
        if RESIDUAL_BITS:
            residual_ptr = tl.multiple_of(residual_ptr, RESIDUAL_BITS)
    rows, has_block, first, offset, mask, group, lane = places
    param_ptr += first
    grad_ptr += first
    exp_avg_ptr += first
    if RESIDUAL_BITS:
        residual_ptr += first

    # volatile keeps these loads together: the compiler would put the weights' after the momentum's arithmetic, and a
    # program would wait for memory twice
    p = tl.load(param_ptr + offset, mask, other=0.0, volatile=True)
    if RESIDUAL_BITS:
        residual = tl.load(residual_ptr + offset, mask, other=0, volatile=True)
    g = tl.load(grad_ptr + offset, mask, other=0.0, volatile=True).to(tl.float32)
    if inverse_grad_scale is not None:
        g = g * tl.load(inverse_grad_scale)
    m = tl.load(exp_avg_ptr + offset, mask, other=0, volatile=True)
    if IS_QUANTIZED:
        m = _decode(m, tl.load(scale_ptr + rows, has_block, other=0))
    if RESIDUAL_BITS:
        p = _merge_weight(p, residual, PARAM, RESIDUAL_BITS)
    else:
        p = p.to(tl.float32)

    p, m = _lion(p, g, m, scalars)

    residual = None
    noise = None
    if STOCHASTIC:
        noise = _rounding_noise(group, lane, tl.load(fields + _NOISE_KEY), step)
    if RESIDUAL_BITS:
        p, residual = _split_weight(p, noise, PARAM, RESIDUAL_BITS)
    elif STOCHASTIC:
        p = _stochastic_round(p, noise, PARAM)
    if LR_MAY_BE_ZERO:
        if scalars[0] != 0.0:  # 0 * inf is NaN, and 0 + -0.0 is 0.0
            _store_weight(param_ptr, residual_ptr, offset, mask, p, residual)
    else:
        _store_weight(param_ptr, residual_ptr, offset, mask, p, residual)
    if IS_QUANTIZED:
        scale = _scale_from_absmax(tl.max(tl.abs(m), axis=1))
        tl.store(scale_ptr + rows, (scale.to(tl.int32, bitcast=True) >> _SCALE_SHIFT).to(tl.int16), has_block)
        m = _encode(m, scale)
    tl.store(exp_avg_ptr + offset, m, mask)


# What a program steps: its blocks, as `rows` from 0 on, and whether the tensor `has_block`; its elements, as the index
# of the `first`, each one's `offset` from there, a `mask` of those that exist, and `group` and `lane` of their noise.


@triton.jit
def _even_places(first_block, numel, first_element, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """Whole blocks, that begin on 16 elements."""
    rows = tl.arange(0, ROWS)
    lanes = tl.arange(0, WIDTH)[None, :]
    first = first_block * WIDTH
    # says to the compiler that a load of 16 elements is wholly inside or wholly outside
    remaining = tl.minimum(tl.maximum(numel - first, 0), ROWS * WIDTH).to(tl.int32) // 16 * 16
    offset = rows[:, None] * WIDTH + lanes
    first_group = ((first_element + first) // _NOISE_LANES).to(tl.int32)
    if WIDTH <= _NOISE_LANES:  # a row has one group
        group = (first_group + rows * WIDTH // _NOISE_LANES)[:, None]
    else:
        group = first_group + offset // _NOISE_LANES
    lane = lanes if WIDTH == _NOISE_LANES else offset % _NOISE_LANES
    return rows, rows * WIDTH < remaining, first, offset, offset < remaining, group, lane


@triton.jit
def _uneven_places(
    first_block, numel, row_length, first_element, BLOCK: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr
):
    """Blocks of any length, the last one of a row perhaps shorter."""
    rows = tl.arange(0, ROWS)
    lanes = tl.arange(0, WIDTH)[None, :]
    blocks_per_row = (row_length + BLOCK - 1) // BLOCK
    first_row = first_block // blocks_per_row
    first_in_row = first_block - first_row * blocks_per_row
    first = first_row * row_length + first_in_row * BLOCK
    # in int32 from here on, as distances from the first block of the program
    block = first_in_row.to(tl.int32) + rows
    row = block // blocks_per_row.to(tl.int32)
    in_row = block - row * blocks_per_row.to(tl.int32)
    begin = row * row_length.to(tl.int32) + (in_row - first_in_row.to(tl.int32)) * BLOCK
    length_of_last = (row_length - (blocks_per_row - 1) * BLOCK).to(tl.int32)
    length = tl.where(in_row == blocks_per_row.to(tl.int32) - 1, length_of_last, BLOCK)
    has_block = row < tl.minimum(numel // row_length - first_row, ROWS).to(tl.int32)
    offset = begin[:, None] + lanes
    mask = has_block[:, None] & (lanes < length[:, None])
    first_element += first
    index = (first_element % _NOISE_LANES).to(tl.int32) + offset
    group = (first_element // _NOISE_LANES).to(tl.int32) + index // _NOISE_LANES
    return rows, has_block, first, offset, mask, group, index % _NOISE_LANES


@triton.jit
def _lion(p, g, m, scalars):
    """Weight and momentum after a step, all float32."""
    lr, decay, beta1, grad_weight1, beta2, grad_weight2 = scalars
    p = p - decay * p
    p = _minus_signed(p, lr, beta1 * m + grad_weight1 * g)
    m = beta2 * m
    return p, tl.where(tl.abs(g) < float("inf"), m + grad_weight2 * g, m)


@triton.jit
def _store_weight(param_ptr, residual_ptr, offset, mask, p, residual):
    tl.store(param_ptr + offset, p.to(param_ptr.dtype.element_ty), mask)
    if residual is not None:
        tl.store(residual_ptr + offset, residual, mask)


@triton.jit
def _minus_signed(p, lr, x):
    """``p - lr * sign(x)``."""
    signed = lr.to(tl.int32, bitcast=True) ^ (x.to(tl.int32, bitcast=True) & _SIGN_BIT)
    return tl.where(tl.abs(x) > 0.0, p - signed.to(tl.float32, bitcast=True), p)


# --- codec.py, again --------------------------------------------------------------------------------------------------


@triton.jit
def _decode(codes, stored_scale):
    """``codes`` (rows, lanes), scale (rows,)."""
    code = codes.to(tl.int32)
    scale = ((stored_scale.to(tl.int32) & 0xFFFF) << _SCALE_SHIFT).to(tl.float32, bitcast=True) * _INVERSE_SPAN
    y = ((tl.abs(code) << _CODE_SHIFT) + _ONE_BITS).to(tl.float32, bitcast=True)
    magnitude = tl.fma(y, scale[:, None], -scale[:, None])  # as (y - 1.0) * scale: that difference is exact
    return (magnitude.to(tl.int32, bitcast=True) | (code & _SIGN_BIT)).to(tl.float32, bitcast=True)


@triton.jit
def _scale_from_absmax(absmax):
    bits = absmax.to(tl.int32, bitcast=True)
    rounded = (bits + _BELOW_HALF_SCALE + ((bits >> _SCALE_SHIFT) & 1)) & _SCALE_MASK
    rounded = tl.minimum(rounded, _MAX_SCALE_BITS)
    return tl.where(bits < _MIN_SCALE_BITS, 0, rounded).to(tl.float32, bitcast=True)


@triton.jit
def _encode(x, scale):
    """``x`` (rows, lanes), scale (rows,)."""
    bits = tl.fdiv(_SPAN, scale).to(tl.int32, bitcast=True)
    inverse = ((bits + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    inverse = tl.where(scale > 0.0, inverse, 0.0)
    y = tl.abs(x) * inverse[:, None] + 1.0
    magnitude = (y.to(tl.int32, bitcast=True) - _FIRST_CODE_BITS) >> _CODE_SHIFT
    return tl.where(x < 0.0, -magnitude, magnitude).to(tl.int8)


@triton.jit
def _shift_right(x, n: tl.constexpr):
    return (x >> n) & ((1 << (32 - n)) - 1)


@triton.jit
def _rounding_noise(group, lane, key, step):
    h = (group ^ key.to(tl.int32)) * _MIX_A
    h = h ^ _shift_right(h, 15) ^ (step.to(tl.int64) * _MIX_STEP + (key >> 32)).to(tl.int32)
    h = h * _MIX_B
    h = h ^ _shift_right(h, 16)
    h = h * _MIX_A
    h = h ^ _shift_right(h, 15)
    return _shift_right(h * ((lane * _LANE_STEP) ^ _LANE_BASE), 16)


@triton.jit
def _stochastic_round(x, noise, PARAM: tl.constexpr):
    if PARAM == tl.bfloat16:
        # a device's own NaN is 0x7FFFFFFF; lowered, it stays one whatever is added
        bits = tl.minimum(x.to(tl.int32, bitcast=True), _NAN_BITS)
        return ((bits + noise) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        rounded = _from_ordinal((_ordinal(x) + (noise >> 3)) & -0x2000)
        return tl.where(tl.abs(x) < _MAX_FLOAT16, rounded, x).to(PARAM)


@triton.jit
def _ordinal(x):
    """Of float16."""
    magnitude = tl.abs(x)
    shifted = (magnitude + _FIRST_NORMAL).to(tl.int32, bitcast=True) - _ONE_EXPONENT
    ordinal = tl.where(magnitude < _FIRST_NORMAL, shifted, magnitude.to(tl.int32, bitcast=True))
    return ordinal | (x.to(tl.int32, bitcast=True) & _SIGN_BIT)


@triton.jit
def _from_ordinal(ordinal):
    magnitude = ordinal & ~_SIGN_BIT
    shifted = (magnitude + _ONE_EXPONENT).to(tl.float32, bitcast=True) - _FIRST_NORMAL
    value = tl.where(magnitude < _FIRST_NORMAL_BITS, shifted, magnitude.to(tl.float32, bitcast=True))
    return (value.to(tl.int32, bitcast=True) | (ordinal & _SIGN_BIT)).to(tl.float32, bitcast=True)


@triton.jit
def _merge_weight(weight, residual, PARAM: tl.constexpr, RESIDUAL_BITS: tl.constexpr):
    fine = residual.to(tl.int32)
    if PARAM == tl.bfloat16:
        ordinal = weight.to(tl.int16, bitcast=True).to(tl.int32) << 16
        merged = ordinal + (fine << (16 - RESIDUAL_BITS))
    else:
        ordinal = _ordinal(weight.to(tl.float32))
        merged = ordinal + (fine << 5 if RESIDUAL_BITS == 8 else fine >> 3)
    merged = tl.where((merged ^ ordinal) < 0, ordinal, merged)
    return merged.to(tl.float32, bitcast=True) if PARAM == tl.bfloat16 else _from_ordinal(merged)


@triton.jit
def _split_weight(x, noise, PARAM: tl.constexpr, RESIDUAL_BITS: tl.constexpr):
    if PARAM == tl.bfloat16:
        return _split_bfloat16(x, noise, RESIDUAL_BITS)
    else:
        return _split_float16(x, noise, RESIDUAL_BITS)


@triton.jit
def _split_bfloat16(x, noise, RESIDUAL_BITS: tl.constexpr):
    """The residual is the lower half of the bits, or the upper byte of that, which the nearest upper half leaves."""
    bits = tl.minimum(x.to(tl.int32, bitcast=True), _NAN_BITS)
    if RESIDUAL_BITS == 8:
        rounded = bits + (128 if noise is None else noise >> 8)
        bits = tl.where(tl.abs(x) <= _MAX_BFLOAT16_24, rounded, bits) & -256
        residual = (bits >> 8).to(tl.int8)
    else:
        residual = bits.to(tl.int16)
    return ((bits + 0x8000) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True), residual


@triton.jit
def _split_float16(x, noise, RESIDUAL_BITS: tl.constexpr):
    limit: tl.constexpr = _MAX_FLOAT16_24 if RESIDUAL_BITS == 8 else _MAX_FLOAT16_32
    finite = tl.minimum(tl.maximum(x, -limit), limit)
    ordinal = _ordinal(tl.where(tl.abs(x) < float("inf"), finite, x))
    ordinal = tl.where(x == x, ordinal, _NAN_BITS)
    if RESIDUAL_BITS == 8:
        ordinal = (ordinal + (16 if noise is None else noise >> 11)) & -32
    nearest = (ordinal + 0x1000) & -0x2000
    if RESIDUAL_BITS == 8:
        residual = ((ordinal - nearest) >> 5).to(tl.int8)
    else:
        residual = ((ordinal - nearest) << 3).to(tl.int16)
    return _from_ordinal(nearest).to(tl.float16), residual
