"""A Llama-style decoder: RMSNorm, rotary positions, grouped key-value heads, SwiGLU, no biases."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.lm import UsageError


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a model.

    Args:
        vocab: number of tokens, rows of the embedding.
        layers: number of blocks.
        dim: width of the residual stream.
        ff: hidden width of the SwiGLU.
        heads: query heads, each `dim / heads` wide, which is even.
        kv_heads: key and value heads, a divisor of `heads`.
        tied: whether the output projection is the embedding.
        rope_theta: base of the rotary frequencies.

    Raises:
        UsageError: the numbers make no model.
    """

    vocab: int
    layers: int
    dim: int
    ff: int
    heads: int
    kv_heads: int
    tied: bool
    rope_theta: float = 10_000.0

    def __post_init__(self) -> None:
        if self.dim % (2 * self.heads):
            raise UsageError(f"dim {self.dim} over {self.heads} heads: rotary positions need an even head width")
        if self.heads % self.kv_heads:
            raise UsageError(f"kv_heads {self.kv_heads} must divide heads {self.heads}")
        if self.layers < 1:
            raise UsageError(f"layers is {self.layers}, it must be at least 1")

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads


CONFIGS = {
    "tiny": ModelConfig(vocab=256, layers=4, dim=128, ff=512, heads=4, kv_heads=2, tied=True),
    "30m": ModelConfig(vocab=50304, layers=6, dim=384, ff=1024, heads=6, kv_heads=6, tied=True),
    # words rather than bytes: nearly all of it is embeddings
    "words": ModelConfig(vocab=12288, layers=2, dim=256, ff=512, heads=4, kv_heads=4, tied=False),
    "124m": ModelConfig(vocab=50304, layers=12, dim=768, ff=2048, heads=12, kv_heads=12, tied=True),
    "1b": ModelConfig(128256, layers=16, dim=2048, ff=8192, heads=32, kv_heads=8, tied=False, rope_theta=500_000.0),
    "8b": ModelConfig(128256, layers=32, dim=4096, ff=14336, heads=32, kv_heads=8, tied=False, rope_theta=500_000.0),
}


class GPT(nn.Module):
    """Next-token model: tokens, int64 `(batch, seq_len)`, to logits `(batch, seq_len, vocab)`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.checkpoint_activations = False
        self.embedding = nn.Embedding(config.vocab, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.head = nn.Linear(config.dim, config.vocab, bias=False)
        if config.tied:
            self.head.weight = self.embedding.weight
        self.init_weights()

    def init_weights(self) -> None:
        """Draw the weights from torch's global generator; projections back into the residual stream start smaller."""
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                continue
            residual = name.endswith(("attention.out.weight", "mlp.down.weight"))
            std = 0.02 / math.sqrt(2 * self.config.layers) if residual else 0.02
            nn.init.normal_(parameter, std=std)

    def forward(self, tokens: Tensor) -> Tensor:
        rotation = rotary(tokens.shape[1], self.config, tokens.device)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = (
                checkpoint(block, x, rotation, use_reentrant=False)
                if self.checkpoint_activations
                else block(x, rotation)
            )
        return self.head(self.norm(x))

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy in nats a token, fp32."""
        return next_token_loss(self(tokens), targets)


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class Block(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.mlp = SwiGLU(config)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotation)
        return x + self.mlp(self.mlp_norm(x))


class Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.grouped = config.kv_heads < config.heads
        kv_dim = config.kv_heads * config.head_dim
        self.query = nn.Linear(config.dim, config.dim, bias=False)
        self.key = nn.Linear(config.dim, kv_dim, bias=False)
        self.value = nn.Linear(config.dim, kv_dim, bias=False)
        self.out = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        query, key, value = (self._heads(project(x)) for project in (self.query, self.key, self.value))
        query, key = rotate(query, rotation), rotate(key, rotation)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=self.grouped)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class SwiGLU(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.ff, bias=False)
        self.up = nn.Linear(config.dim, config.ff, bias=False)
        self.down = nn.Linear(config.ff, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def rotary(seq_len: int, config: ModelConfig, device: torch.device) -> Tensor:
    """Cosine and sine of every position's rotation, fp32 `(2, seq_len, head_dim / 2)`."""
    frequencies = config.rope_theta ** -(torch.arange(0, config.head_dim, 2, device=device) / config.head_dim)
    angles = torch.arange(seq_len, device=device)[:, None] * frequencies
    return torch.stack((angles.cos(), angles.sin()))


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Turn each pair (i, i + head_dim/2) of `x`, `(batch, heads, seq_len, head_dim)`, by its position's angle."""
    cos, sin = rotation.to(x.dtype)
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, left * sin + right * cos), dim=-1)
