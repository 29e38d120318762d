"""The 8-bit optimizer state: int8 codes and a 16-bit scale for each block."""

import torch
from torch import Tensor

from lowbit_optim import codec
from lowbit_optim.subclasses.blockwise import BlockwiseTensor


class OptimState8bit(BlockwiseTensor):
    """A float tensor in 8 bits an element and 16 bits a block, for optimizer state (codec: :mod:`lowbit_optim.codec`).

    ``codes`` is int8 in -127 ... 127 and shaped like the tensor; ``scale`` is int16, the upper bits of a float32 after
    its sign (:func:`lowbit_optim.codec.unpack_scale`). See
    :class:`~lowbit_optim.subclasses.blockwise.BlockwiseTensor` for what works on it.
    """

    @staticmethod
    def _encode(x: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
        return codec.encode(x, block_size)

    @staticmethod
    def _decode(codes: Tensor, scale: Tensor, block_size: int, dtype: torch.dtype) -> Tensor:
        return codec.decode(codes, scale, block_size, dtype)

    @staticmethod
    def _encode_part(x: Tensor, absmax: Tensor, block: Tensor) -> tuple[Tensor, Tensor]:
        return codec.encode_part(x, absmax, block)

    @staticmethod
    def _decode_part(codes: Tensor, scale: Tensor, block: Tensor) -> Tensor:
        return codec.decode_part(codes, scale, block)
