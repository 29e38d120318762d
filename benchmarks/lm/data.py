"""Text as bytes, or words: a corpus that every Python has, and random windows of it."""

import ast
import hashlib
import re
import sysconfig
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from benchmarks.lm import UsageError

Split = Literal["train", "valid"]

# Packages that are large, repetitive or often left out of an installation.
_LEFT_OUT = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3", "ensurepip"}


def load_text(files: Iterable[str | Path] | None = None) -> bytes:
    """Contents of `files`, one after the other; by default the Python standard library's own source.

    Raises:
        OSError: a file is missing or cannot be read.
    """
    paths = _standard_library() if files is None else [Path(file) for file in files]
    return b"\n".join(path.read_bytes() for path in paths)


def _standard_library() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    paths = [path.relative_to(root) for path in root.rglob("*.py")]
    kept = [path for path in paths if not _LEFT_OUT.intersection(path.parts)]
    # Ordered by hash, so that the end of the text, which is held out, is a fair sample of it.
    kept.sort(key=lambda path: hashlib.sha256(path.as_posix().encode()).digest())
    return [root / path for path in kept]


def docstrings(path: Path) -> Iterator[str]:
    """Of a Python file: the module's, its classes' and functions'; empty where there is none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about what the library's own source does
        tree = ast.parse(path.read_bytes())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def number_words(text: str, vocab: int) -> Tensor:
    """Its words as numbers by falling frequency, int64, 1-D; rarer words than the last are number 0."""
    words = re.findall(r"\w+|[^\w\s]", text.lower())
    number = {word: i for i, (word, _) in enumerate(Counter(words).most_common(vocab - 1), start=1)}
    return torch.tensor([number.get(word, 0) for word in words])


@dataclass(frozen=True)
class ByteDataset:
    """A text and its held-out part.

    Args:
        train: bytes to train on, uint8, 1-D.
        valid: bytes held out, uint8, 1-D.
    """

    train: Tensor
    valid: Tensor

    @classmethod
    def from_text(cls, text: bytes, valid_fraction: float = 0.1) -> "ByteDataset":
        """Hold out the end of `text`.

        Raises:
            UsageError: `valid_fraction` leaves nothing on one side.
        """
        cut = round(len(text) * (1 - valid_fraction))
        if not 0 < cut < len(text):
            raise UsageError(
                f"{len(text)} bytes of text cannot hold out a fraction of {valid_fraction}; give more text or a "
                "fraction between 0 and 1"
            )
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        return cls(data[:cut], data[cut:])

    def batch(
        self, batch_size: int, seq_len: int, generator: torch.Generator | None = None, split: Split = "train"
    ) -> tuple[Tensor, Tensor]:
        """Random windows and the byte that follows each position: two int64 tensors `(batch_size, seq_len)`.

        Raises:
            UsageError: the split is not longer than `seq_len`.
        """
        data = {"train": self.train, "valid": self.valid}[split]
        if len(data) <= seq_len:
            raise UsageError(
                f"the {split} split has {len(data)} bytes, a window of {seq_len} needs one more than that; "
                "give more text or a shorter sequence"
            )
        starts = torch.randint(len(data) - seq_len, (batch_size, 1), generator=generator)
        windows = data[starts + torch.arange(seq_len + 1)].long()
        return windows[:, :-1], windows[:, 1:]


def bigram_loss(dataset: ByteDataset) -> float:
    """Held-out loss, nats a byte, of a table of which byte follows which: what a model has to beat."""
    counts = torch.bincount(_pairs(dataset.train), minlength=256 * 256).view(256, 256).double() + 1
    log_probs = (counts / counts.sum(1, keepdim=True)).log().flatten()
    return round(-log_probs[_pairs(dataset.valid)].mean().item(), 6)  # the same for any number of threads


def _pairs(data: Tensor, limit: int = 1 << 24) -> Tensor:
    """Each byte and its successor as one number; a table has settled long before `limit` bytes."""
    data = data[:limit].long()
    return data[:-1] * 256 + data[1:]
