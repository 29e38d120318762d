"""Parameter shapes of models, in the order that their layers have them."""

from collections.abc import Callable

Shape = tuple[int, ...]


def single() -> list[Shape]:
    """One matrix of 268,435,456 elements."""
    return [(16384, 16384)]


def llama1b() -> list[Shape]:
    """A Llama 3.2 1B with an output matrix of its own: 147 tensors, 1.498 B parameters."""
    return _llama(layers=16, dim=2048, kv_dim=512, ffn_dim=8192, vocab=128256)


def llama8b() -> list[Shape]:
    """Llama 3 8B: 291 tensors, 8.030 B parameters."""
    return _llama(layers=32, dim=4096, kv_dim=1024, ffn_dim=14336, vocab=128256)


def vit_l() -> list[Shape]:
    """ViT-L/16 without position embedding and head: 291 tensors, 303 M parameters."""
    dim = 1024
    norm: list[Shape] = [(dim,), (dim,)]
    attention: list[Shape] = [(3 * dim, dim), (3 * dim,), (dim, dim), (dim,)]
    mlp: list[Shape] = [(4 * dim, dim), (4 * dim,), (dim, 4 * dim), (dim,)]
    return [(dim, 3, 16, 16), *(norm + attention + norm + mlp) * 24, *norm]


def resnet50() -> list[Shape]:
    """161 tensors, 25.6 M parameters, most tensors small."""
    convolutions: list[Shape] = [(64, 3, 7, 7)]
    channels = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            convolutions += [(width, channels, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)]
            if block == 0:
                convolutions.append((4 * width, channels, 1, 1))
            channels = 4 * width
    with_norms = [shape for conv in convolutions for shape in (conv, conv[:1], conv[:1])]
    return [*with_norms, (1000, 2048), (1000,)]


def moe() -> list[Shape]:
    """Four layers of OLMoE 1B-7B with its 64 experts as 3-D tensors: 47 tensors, 1.884 B parameters."""
    dim, experts, ffn_dim, vocab = 2048, 64, 1024, 50304
    attention: list[Shape] = [(dim, dim)] * 4 + [(dim,)] * 2  # norms of queries and keys
    feed_forward: list[Shape] = [(experts, dim), (experts, 2 * ffn_dim, dim), (experts, dim, ffn_dim)]
    layer = [(dim,), *attention, (dim,), *feed_forward]
    return [(vocab, dim), *layer * 4, (dim,), (vocab, dim)]


def lora() -> list[Shape]:
    """Adapters of rank 16 on every linear layer of Llama 3 8B: 448 tensors, 41.9 M parameters."""
    rank = 16
    linears = [shape for shape in llama8b()[1:-1] if len(shape) == 2]
    return [factor for out_dim, in_dim in linears for factor in ((rank, in_dim), (out_dim, rank))]


def small500() -> list[Shape]:
    """500 tensors of 864 to 4,608 elements, 1.47 M parameters: what is left is the cost of a tensor."""
    return [(1000,), (32, 3, 3, 3), (64, 64), (4096,), (256, 18)] * 100


def _llama(layers: int, dim: int, kv_dim: int, ffn_dim: int, vocab: int) -> list[Shape]:
    attention: list[Shape] = [(dim, dim), (kv_dim, dim), (kv_dim, dim), (dim, dim)]
    feed_forward: list[Shape] = [(ffn_dim, dim), (ffn_dim, dim), (dim, ffn_dim)]
    layer = [(dim,), *attention, (dim,), *feed_forward]
    return [(vocab, dim), *layer * layers, (dim,), (vocab, dim)]


SHAPE_SETS: dict[str, Callable[[], list[Shape]]] = {
    function.__name__: function for function in (single, llama1b, llama8b, vit_l, resnet50, moe, lora, small500)
}


def scaled(shapes: list[Shape], divisor: int) -> list[Shape]:
    """As many tensors, each dimension above 16 divided but none to less than 16: for machines that are not a GPU."""
    return [tuple(max(dim // divisor, min(dim, 16)) for dim in shape) for shape in shapes]
