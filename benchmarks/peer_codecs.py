"""8-bit codecs that the package's own is compared with, written from their published descriptions.

Every codec takes blocks of consecutive elements of the flattened tensor, divides each block by its largest magnitude
and stores one code an element and one scale a block.

- Dynamic map: Dettmers et al., 8-bit Optimizers via Block-wise Quantization (arXiv:2110.02861), as bitsandbytes and
  torchao use it.
- Softsign: Gonzalez Ortiz et al., FlashOptim (arXiv:2602.23349), section on momentum.
- Mu-law: ITU-T G.711's curve. Square root and linear: the obvious baselines.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lowbit_optim import codec

Curve = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Codec:
    """A way to store a tensor in 8 bits an element.

    Args:
        name: what a table calls it.
        block: elements that share a scale.
        scale_bytes: bytes of one scale.
        roundtrip_blocks: fp32 `(n, block)` to what is read back after storing it, same shape and dtype.
    """

    name: str
    block: int
    scale_bytes: int
    roundtrip_blocks: Curve

    @property
    def bytes_per_param(self) -> float:
        return 1 + self.scale_bytes / self.block

    def roundtrip(self, x: Tensor) -> Tensor:
        """What is read back after storing `x`, a float tensor of any shape: fp32, shaped like `x`."""
        flat = x.float().flatten()
        padded = F.pad(flat, (0, -len(flat) % self.block))
        return self.roundtrip_blocks(padded.view(-1, self.block)).flatten()[: len(flat)].view(x.shape)


def lowbit(block: int) -> Codec:
    """The package's own codec."""

    def roundtrip(blocks: Tensor) -> Tensor:
        return codec.decode(*codec.encode(blocks, block), block)

    return Codec(f"lowbit_optim {block}", block, codec.SCALE_DTYPE.itemsize, roundtrip)


def dynamic_map(block: int = 256) -> Codec:
    """The nearest of 256 signed values spaced like a float whose exponent and fraction share 7 bits; fp32 scale."""
    values = dynamic_values()
    boundaries = (values[1:] + values[:-1]) / 2

    def roundtrip(blocks: Tensor) -> Tensor:
        absmax = _absmax(blocks)
        codes = torch.bucketize(_divide(blocks, absmax), boundaries.to(blocks.device))
        return values.to(blocks.device)[codes] * absmax

    return Codec(f"dynamic map {block}", block, 4, roundtrip)


def dynamic_values() -> Tensor:
    """The dynamic map, fp32 `(256,)`, ascending.

    Decade i of 7, which ends at 10**(i - 6), is cut into 2**i equal parts. The values are the midpoints of these with
    both signs, and 0 and 1.
    """
    positive = []
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2**decade + 1)
        positive.append(10.0 ** (decade - 6) * (edges[1:] + edges[:-1]) / 2)
    magnitudes = torch.cat(positive)
    return torch.cat((-magnitudes, magnitudes, torch.tensor([0.0, 1.0]))).sort().values


def softsign(block: int = 32, scale_dtype: torch.dtype = torch.float16) -> Codec:
    """2x / (1 + |x|) in 255 equal steps. The codes are relative to the block's maximum before the scale is rounded."""

    def roundtrip(blocks: Tensor) -> Tensor:
        absmax = _absmax(blocks).clamp(min=1e-12)
        x = blocks / absmax
        y = (2 * x / (1 + x.abs()) * 127 + 0.5).floor() / 127
        return y / (2 - y.abs()) * absmax.to(scale_dtype).float()

    return Codec(f"softsign {block}", block, scale_dtype.itemsize, roundtrip)


def mu_law(mu: float, block: int) -> Codec:
    """log(1 + mu |x|) in 127 equal steps a sign; bfloat16 scale."""
    span = math.log1p(mu)
    return _companded(
        f"mu-law {mu:g}, {block}", block, lambda x: torch.log1p(mu * x) / span, lambda y: torch.expm1(y * span) / mu
    )


def square_root(block: int) -> Codec:
    """The square root of |x| in 127 equal steps a sign; bfloat16 scale."""
    return _companded(f"square root {block}", block, torch.sqrt, torch.square)


def linear(block: int) -> Codec:
    """|x| in 127 equal steps a sign; bfloat16 scale."""
    return _companded(f"linear {block}", block, lambda x: x, lambda y: y)


def _companded(name: str, block: int, compress: Curve, expand: Curve) -> Codec:
    """A codec with equal steps on a curve from [0, 1] to [0, 1]; the sign is kept apart. bfloat16 scale."""

    def roundtrip(blocks: Tensor) -> Tensor:
        scale = _absmax(blocks).bfloat16().float()
        x = _divide(blocks, scale).abs().clamp(max=1)
        codes = (compress(x) * 127).round()
        return expand(codes / 127) * scale * blocks.sign()

    return Codec(name, block, 2, roundtrip)


def _absmax(blocks: Tensor) -> Tensor:
    return blocks.abs().amax(1, keepdim=True)


def _divide(blocks: Tensor, absmax: Tensor) -> Tensor:
    """`blocks / absmax`, and 0 where a block is all zero."""
    return torch.where(absmax > 0, blocks / absmax, 0.0)
