"""Does Lion with an 8-bit momentum do what fp32 Lion does, and which codec does it best?

    python -m benchmarks.fidelity [--device cuda] [--quick]

Two models: `bytes`, a language model on the bytes of the standard library's source, and `words`, one on the words of
its docstrings and manual, nearly all of whose weights are embeddings of words that follow Zipf's law. Two questions:

- flips: fp32 Lion trains; from the same gradients every codec keeps a momentum of its own. In what share of the weights
  would its update have had another sign, and how far is its momentum from fp32's? Means over all steps.
- train: Lion trains with each codec's momentum, from the same weights on the same batches as fp32 Lion. How much higher
  is the held-out loss at the end? One gap a seed; their mean, standard error and 95 % interval (Student's t).

Only tensors that the optimizer would quantise count and are coded: at least two dimensions and 4096 elements.
"""

import argparse
import json
import platform
import random
import statistics
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm import tqdm

from benchmarks import peer_codecs as peers
from benchmarks.gaps.interval import interval
from benchmarks.lm.data import ByteDataset, docstrings, load_text, number_words
from benchmarks.lm.machine import machine
from benchmarks.lm.model import GPT, ModelConfig
from benchmarks.peer_codecs import Codec

BETA1, BETA2 = 0.9, 0.99
MIN_QUANTIZED_NUMEL = 4096
FLIPS_SEED = 1000  # apart from those of `train`, which count from 0

OURS, DYNAMIC, SOFTSIGN = peers.lowbit(64), peers.dynamic_map(256), peers.softsign(32)
CONTROL = peers.linear(256)  # known to train worse: shows that the comparison can tell
TRAINED = [OURS, DYNAMIC, SOFTSIGN, CONTROL]
COMPARED = [
    peers.lowbit(32),
    OURS,
    peers.lowbit(128),
    DYNAMIC,
    SOFTSIGN,
    peers.softsign(64, torch.bfloat16),
    peers.mu_law(8, 64),
    peers.mu_law(16, 64),
    peers.mu_law(32, 64),
    peers.square_root(64),
    peers.linear(64),
]

MAX_GAP = {"cpu": 0.02, "cuda": 0.01}  # nats; the cpu has few seeds and small models, whose losses scatter more


@dataclass(frozen=True)
class Size:
    """How much is run. `batch` windows of `seq_len` tokens a step; `held_out` windows in each evaluation."""

    layers: int
    dim: int
    vocab: int  # of `words`
    batch: int
    seq_len: int
    steps: int
    lr: float
    weight_decay: float = 0.1
    seeds: int = 1
    held_out: int = 512


# by what is asked for, then by part; `train` takes smaller models and many seeds
SIZES = {
    "quick": {
        "flips": Size(layers=1, dim=128, vocab=1024, batch=4, seq_len=32, steps=40, lr=1e-3),
        "train": Size(layers=1, dim=128, vocab=1024, batch=4, seq_len=32, steps=40, lr=5e-4, seeds=2, held_out=32),
    },
    "cpu": {
        "flips": Size(layers=2, dim=256, vocab=2048, batch=8, seq_len=64, steps=200, lr=2e-3),
        "train": Size(layers=2, dim=128, vocab=1024, batch=8, seq_len=32, steps=200, lr=5e-4, seeds=6),
    },
    "cuda": {
        "flips": Size(layers=4, dim=256, vocab=12288, batch=16, seq_len=64, steps=600, lr=1e-3),
        "train": Size(layers=2, dim=256, vocab=4096, batch=8, seq_len=64, steps=400, lr=5e-4, seeds=16, held_out=1024),
    },
}


@dataclass(frozen=True)
class Task:
    """A text, tokenised and split, and the model to train on it."""

    name: str
    train: Tensor
    valid: Tensor
    config: ModelConfig


# --- Texts and models -----------------------------------------------------------------------------------------------


def tasks(size: Size, device: str) -> list[Task]:
    text = ByteDataset.from_text(load_text())
    words = word_tokens(size.vocab)
    cut = len(words) * 9 // 10
    model = ModelConfig(vocab=256, layers=size.layers, dim=size.dim, ff=2 * size.dim, heads=4, kv_heads=4, tied=True)
    embeddings = replace(model, vocab=size.vocab, layers=1, tied=False)
    return [
        Task("bytes", text.train.to(device), text.valid.to(device), model),
        Task("words", words[:cut].to(device), words[cut:].to(device), embeddings),
    ]


def word_tokens(vocab: int) -> Tensor:
    """The documents, shuffled, as word numbers, int64."""
    documents = _documents()
    random.Random(0).shuffle(documents)
    return number_words("\n".join(documents), vocab)


def _documents() -> list[str]:
    """The standard library's docstrings and the manual that `help()` shows."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}
    paths = sorted(path for path in root.rglob("*.py") if not left_out.intersection(path.relative_to(root).parts))
    documents = [docstring for path in paths for docstring in docstrings(path)]
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions package it apart
        return documents
    return documents + [topics[name] for name in sorted(topics)]


class FlatModel:
    """A model whose weights are one vector, so that a codec or an optimizer handles them all in one operation.

    The weights that count as quantised come first. Rows are whole numbers of 128 elements and tensors of 256, so
    that no block of any codec here crosses a row (of ours) or a tensor (of the peers', which flatten it).
    """

    def __init__(self, config: ModelConfig) -> None:
        if config.dim % 128 or config.vocab % 2:
            raise ValueError(f"dim {config.dim} must be a multiple of 128 and vocab {config.vocab} of 2")
        self.model = GPT(config)
        parameters = dict(self.model.named_parameters())
        quantised = {k for k, p in parameters.items() if p.ndim >= 2 and p.numel() >= MIN_QUANTIZED_NUMEL}
        self.names = sorted(parameters, key=lambda name: name not in quantised)
        self.shapes = [parameters[name].shape for name in self.names]
        self.n_quantised = sum(parameters[name].numel() for name in quantised)

    def initial(self, seed: int, device: str) -> Tensor:
        """Weights drawn from `seed`, the same on every device: fp32, 1-D."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.model.init_weights()
        parameters = dict(self.model.named_parameters())
        return torch.cat([parameters[name].detach().flatten() for name in self.names]).to(device)

    def loss(self, weights: Tensor, tokens: Tensor, targets: Tensor) -> Tensor:
        parts = weights.split([shape.numel() for shape in self.shapes])
        parameters = {name: part.view(shape) for name, part, shape in zip(self.names, parts, self.shapes, strict=True)}
        with sdpa_kernel(SDPBackend.MATH):  # the one that vmap runs as a single operation
            logits = functional_call(self.model, parameters, (tokens,))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batches(task: Task, size: Size, seed: int, title: str) -> Iterator[tuple[float, Tensor, Tensor]]:
    """Learning rate, tokens and next tokens of every step. Warm-up over a tenth, then linear decay to nothing."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(task.train) - size.seq_len, (size.steps, size.batch, 1), generator=generator)
    starts = starts.to(task.train.device)
    offsets = torch.arange(size.seq_len + 1, device=task.train.device)
    warm_up = max(1, size.steps // 10)
    for step in tqdm(range(size.steps), desc=title, leave=False):
        lr = size.lr * min((step + 1) / warm_up, (size.steps - step) / (size.steps - warm_up))
        windows = task.train[starts[step] + offsets].long()
        yield lr, windows[:, :-1], windows[:, 1:]


# --- Same gradients, other momentum ---------------------------------------------------------------------------------


def lion_sign(momentum: Tensor, gradient: Tensor) -> Tensor:
    return (BETA1 * momentum + (1 - BETA1) * gradient).sign()


def lion_momentum(momentum: Tensor, gradient: Tensor) -> Tensor:
    return BETA2 * momentum + (1 - BETA2) * gradient


def measure_flips(task: Task, size: Size, codecs: Sequence[Codec]) -> tuple[list[float], list[float]]:
    """Share of weights whose update has another sign than fp32 Lion's, and relative momentum error, a codec."""
    model = FlatModel(task.config)
    gradient_of = grad(model.loss)
    weights = model.initial(FLIPS_SEED, str(task.train.device))
    momentum = torch.zeros_like(weights)
    quantised = slice(0, model.n_quantised)
    stored = weights.new_zeros(len(codecs), model.n_quantised)
    flips, errors = weights.new_zeros(2, len(codecs))
    for lr, tokens, targets in batches(task, size, FLIPS_SEED, f"{task.name}, flips"):
        gradient = gradient_of(weights, tokens, targets)
        update = lion_sign(momentum, gradient)
        momentum = lion_momentum(momentum, gradient)
        weights = weights - lr * (update + size.weight_decay * weights)
        for i, codec in enumerate(codecs):
            flips[i] += (lion_sign(stored[i], gradient[quantised]) != update[quantised]).float().mean()
            stored[i] = codec.roundtrip(lion_momentum(stored[i], gradient[quantised]))
            errors[i] += (stored[i] - momentum[quantised]).norm() / momentum[quantised].norm()
    return (flips / size.steps).tolist(), (errors / size.steps).tolist()


# --- Training for real ----------------------------------------------------------------------------------------------


def train_losses(task: Task, size: Size, codecs: Sequence[Codec], seed: int) -> list[float]:
    """Held-out losses, nats a token, of fp32 Lion and of Lion with each codec, from one start on the same batches."""
    model = FlatModel(task.config)
    gradients_of = vmap(grad(model.loss), in_dims=(0, None, None))
    weights = model.initial(seed, str(task.train.device)).repeat(1 + len(codecs), 1)
    momentum = torch.zeros_like(weights)
    quantised = slice(0, model.n_quantised)
    for lr, tokens, targets in batches(task, size, seed, f"{task.name}, seed {seed}"):
        gradients = gradients_of(weights, tokens, targets)
        weights = weights - lr * (lion_sign(momentum, gradients) + size.weight_decay * weights)
        momentum = lion_momentum(momentum, gradients)
        for row, codec in zip(momentum[1:], codecs, strict=True):
            row[quantised] = codec.roundtrip(row[quantised])
    return held_out_losses(task, size, model, weights)


@torch.no_grad()
def held_out_losses(task: Task, size: Size, model: FlatModel, weights: Tensor) -> list[float]:
    """Mean loss of each row of weights over the same windows, spread evenly over the held-out text."""
    starts = torch.linspace(0, len(task.valid) - size.seq_len - 1, size.held_out, dtype=torch.float64).long()
    windows = task.valid[(starts[:, None] + torch.arange(size.seq_len + 1)).to(task.valid.device)].long()
    losses_of = vmap(model.loss, in_dims=(0, None, None))
    chunks = windows.split(size.batch)
    total = sum(losses_of(weights, chunk[:, :-1], chunk[:, 1:]).double() * len(chunk) for chunk in chunks)
    return (total / size.held_out).tolist()


# --- Report ---------------------------------------------------------------------------------------------------------


def flips_report(task: Task, size: Size) -> dict[str, dict[str, float]]:
    flips, errors = measure_flips(task, size, COMPARED)
    print(f"\n{task.name}: same gradients, {size.steps} steps")
    print(f"{'codec':20}{'B/param':>9}{'sign flips %':>14}{'momentum error %':>18}")
    for codec, flip, error in zip(COMPARED, flips, errors, strict=True):
        print(f"{codec.name:20}{codec.bytes_per_param:9.3f}{100 * flip:14.3f}{100 * error:18.2f}")
    return {
        codec.name: {"bytes_per_param": codec.bytes_per_param, "sign_flips": flip, "momentum_error": error}
        for codec, flip, error in zip(COMPARED, flips, errors, strict=True)
    }


def train_report(task: Task, size: Size) -> dict[str, object]:
    losses = [train_losses(task, size, TRAINED, seed) for seed in range(size.seeds)]
    reference = statistics.mean(row[0] for row in losses)
    print(f"\n{task.name}: {size.seeds} paired seeds, {size.steps} steps, held-out loss of fp32 Lion {reference:.4f}")
    print(f"{'codec':20}{'gap':>9}{'std. err.':>11}{'95 % interval':>20}")
    report: dict[str, object] = {"fp32 Lion": {"losses": [row[0] for row in losses]}}
    for i, codec in enumerate(TRAINED, start=1):
        gap = interval([row[i] - row[0] for row in losses])
        print(f"{codec.name:20}{gap['mean']:+9.4f}{gap['standard_error']:11.4f}{gap['low']:+11.4f} {gap['high']:+.4f}")
        report[codec.name] = {"losses": [row[i] for row in losses], "gap": gap}
    return report


@dataclass(frozen=True)
class Check:
    """A promise: `value` is at most `limit`."""

    task: str
    what: str
    value: float
    limit: float

    @property
    def passed(self) -> bool:
        return self.value <= self.limit


def flips_checks(task: str, flips: dict[str, dict[str, float]]) -> list[Check]:
    def ratio(figure: str, peer: Codec) -> float:
        return flips[OURS.name][figure] / flips[peer.name][figure]

    return [
        Check(task, "bytes a parameter", OURS.bytes_per_param, 1.04),
        Check(task, f"sign flips / those of {DYNAMIC.name}", ratio("sign_flips", DYNAMIC), 0.6),
        Check(task, f"sign flips / those of {SOFTSIGN.name}", ratio("sign_flips", SOFTSIGN), 0.9),
        Check(task, f"momentum error / that of {DYNAMIC.name}", ratio("momentum_error", DYNAMIC), 0.55),
        Check(task, f"momentum error / that of {SOFTSIGN.name}", ratio("momentum_error", SOFTSIGN), 1.45),
    ]


def train_checks(task: str, train: dict, device: str) -> list[Check]:
    return [Check(task, "upper 95 % bound of the loss gap", train[OURS.name]["gap"]["high"], MAX_GAP[device])]


def print_checks(checks: Sequence[Check]) -> None:
    print(f"\n{OURS.name}, the default:")
    for check in checks:
        verdict = "pass" if check.passed else "FAIL"
        print(f"{check.task:8}{check.what:45}{check.value:8.4f}  at most {check.limit:<6g}{verdict}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", nargs="?", choices=["flips", "train", "all"], default="all")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--quick", action="store_true", help="a minute's run that shows that all works; saves nothing")
    for name, value in asdict(SIZES["cpu"]["train"]).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), help="default: by device and part")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no GPU here; use --device cpu")
    return args


def chosen_size(args: argparse.Namespace, part: str) -> Size:
    size = SIZES["quick" if args.quick else args.device][part]
    return replace(size, **{name: getattr(args, name) for name in asdict(size) if getattr(args, name) is not None})


def main() -> None:
    args = arguments()
    report: dict = {
        "machine": machine(args.device),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "flips": {},
        "train": {},
    }
    checks: list[Check] = []
    if args.part != "train":
        size = chosen_size(args, "flips")
        report["flips"]["size"] = asdict(size)
        for task in tasks(size, args.device):
            figures = report["flips"][task.name] = flips_report(task, size)
            checks += flips_checks(task.name, figures)
    if args.part != "flips":
        size = chosen_size(args, "train")
        report["train"]["size"] = asdict(size)
        for task in tasks(size, args.device):
            figures = report["train"][task.name] = train_report(task, size)
            checks += train_checks(task.name, figures, args.device)
    print_checks(checks)
    report["checks"] = [{**asdict(check), "passed": check.passed} for check in checks]
    if not args.quick:
        results = Path(__file__).parent / "results" / f"fidelity_{args.device}.json"
        results.parent.mkdir(exist_ok=True)
        results.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
