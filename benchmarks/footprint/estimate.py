"""The memory of a training step in closed form, for the model in benchmarks/lm/model.py."""

from dataclasses import dataclass

from benchmarks.lm.model import ModelConfig

# State, bytes a parameter, of matrices and of vectors, where weights are bf16.
STATE_BYTES = {
    "lion8bit": (1 + 2 / 64, 4),
    "lion": (4, 4),
    "torch.AdamW": (4, 4),
    "lion_pytorch.Lion": (2, 2),
    "bnb.Lion": (4, 4),
    "bnb.Lion8bit": (1 + 4 / 256, 4),
    "flashoptim.FlashLion": (1 + 2 / 32, 1 + 2 / 32),
    "torchao.AdamW8bit": (2 + 8 / 256, 4),
}
# What a step allocates for the largest matrix, bytes an element; nothing where a kernel does it all.
STEP_BYTES = {"lion_pytorch.Lion": 4}
_WAITING_BYTES, _WAITING_SHARE = 256 << 20, 1 / 16  # of gradients that gradient_release keeps waiting, at most
_OFFLOAD_BUFFERS = 3 * (64 << 20)
_WEIGHT_BYTES = 2


@dataclass(frozen=True)
class Estimate:
    """Bytes at the peak. ``activations`` are whatever else the forward and backward pass hold at a time."""

    weights: float
    state: float
    gradients: float
    activations: float
    temporary: float

    @property
    def peak(self) -> float:
        return self.weights + self.state + self.gradients + self.activations + self.temporary


def matrix_sizes(config: ModelConfig) -> list[int]:
    """Elements of each matrix, in the order of the model."""
    kv_dim = config.kv_heads * config.head_dim
    attention = [config.dim * config.dim, config.dim * kv_dim, config.dim * kv_dim, config.dim * config.dim]
    block = [*attention, *[config.dim * config.ff] * 3]
    embedding = [config.vocab * config.dim]
    return [*embedding, *block * config.layers, *([] if config.tied else embedding)]


def vector_elements(config: ModelConfig) -> int:
    return (2 * config.layers + 1) * config.dim


def estimate(
    config: ModelConfig,
    tokens: int,
    optimizer: str,
    *,
    master_weight_bits: int | None = None,
    gradient_release: bool = False,
    offload_state: bool = False,
) -> Estimate:
    """Of one step in bf16 with activation checkpointing: the largest of these moments.

    1. *The loss*, before there is any gradient: the input of each block (2 bytes an element), and three fp32 matrices
       of tokens by vocabulary in the backward of cross entropy.
    2. *The first block's backward*: all gradients but the embedding's, and the activations of one block.
    3. *The end of backward, and the step*: all gradients, and what the step allocates.

    With ``gradient_release`` the second and third have only the largest gradient and those that wait for the step.

    Args:
        tokens: of a batch, in all its sequences.
        optimizer: a key of ``STATE_BYTES``.
        master_weight_bits: bits of weight and residual together; None has no residual.
        gradient_release: parameters are stepped in backward.
        offload_state: state is in host memory, and passes through buffers.
    """
    matrices = matrix_sizes(config)
    n_matrix, n_vector = sum(matrices), vector_elements(config)
    per_matrix, per_vector = STATE_BYTES[optimizer]
    residual = (master_weight_bits - 16) / 8 if master_weight_bits else 0
    weights = _WEIGHT_BYTES * (n_matrix + n_vector)
    state = (per_matrix + residual) * n_matrix + (per_vector + residual) * n_vector
    buffers = 0.0
    if offload_state:
        buffers = min(state, _OFFLOAD_BUFFERS + (per_matrix + residual) * max(matrices))
        state = 0.0

    inputs = 2 * config.layers * tokens * config.dim
    block = 2 * (8 * config.dim + 4 * config.ff) * tokens
    largest, gradients = _WEIGHT_BYTES * max(matrices), float(weights)
    before_embedding = gradients - _WEIGHT_BYTES * matrices[0] * (not config.tied)
    if gradient_release:
        waiting = min(_WAITING_BYTES, _WAITING_SHARE * gradients)
        gradients, before_embedding = waiting + largest, waiting
    temporary = buffers + STEP_BYTES.get(optimizer, 0) * max(matrices)
    moments = [
        Estimate(weights, state, 0, inputs + 12 * tokens * config.vocab, 0),
        Estimate(weights, state, before_embedding, block, buffers if gradient_release else 0),
        Estimate(weights, state, gradients, 0, temporary),
    ]
    return max(moments, key=lambda moment: moment.peak)
