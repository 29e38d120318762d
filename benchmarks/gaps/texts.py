"""What is trained on: texts that every installation of Python and PyTorch brings along."""

import hashlib
import random
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from benchmarks.lm.data import ByteDataset, docstrings, load_text, number_words
from benchmarks.lm.model import CONFIGS

_DOCUMENTED = ("nn", "optim", "distributions", "distributed")


def source() -> ByteDataset:
    """The source of Python's standard library, as bytes."""
    return ByteDataset.from_text(load_text())


def docs() -> ByteDataset:
    """The docstrings of `torch.nn`, `torch.optim`, `torch.distributions` and `torch.distributed`, as bytes."""
    root = Path(torch.__file__).parent
    paths = sorted(path for name in _DOCUMENTED for path in (root / name).rglob("*.py"))
    documents = [docstring for path in paths for docstring in docstrings(path)]
    random.Random(0).shuffle(documents)
    return ByteDataset.from_text("\n".join(documents).encode())


def words() -> ByteDataset:
    """The source of Python's standard library, as the numbers of its words: those of the model `words`."""
    numbers = number_words(load_text().decode(errors="replace"), CONFIGS["words"].vocab)
    cut = len(numbers) * 9 // 10
    return ByteDataset(numbers[:cut], numbers[cut:])


TEXTS: dict[str, Callable[[], ByteDataset]] = {"source": source, "docs": docs, "words": words}


def prepare(names: Iterable[str], folder: Path) -> dict[str, dict[str, Any]]:
    """Write texts to `folder`, for :func:`load`.

    Returns:
        For each text the number of its tokens (bytes or words) and a digest of them: the sources differ a little
        between versions.
    """
    about = {}
    for name in names:
        dataset = TEXTS[name]()
        tokens = torch.cat([dataset.train, dataset.valid])
        torch.save([dataset.train.clone(), dataset.valid.clone()], _path(folder, name))
        about[name] = {"tokens": len(tokens), "sha256": hashlib.sha256(memoryview(tokens.numpy())).hexdigest()[:16]}
    return about


@cache
def load(name: str, folder: Path) -> ByteDataset:
    return ByteDataset(*torch.load(_path(folder, name)))


def _path(folder: Path, name: str) -> Path:
    return folder / f"{name}.pt"
