"""Breaks key lines of the package one at a time, in a copy, and shows which test notices.

    python test/robustness/mutations.py                      # each with the tests that are to catch it
    python test/robustness/mutations.py test/robustness      # all with these tests instead

Prints a table. Exits 1 if a mutation survives or its line is no longer in the code.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent.parent
NOT_COPIED = shutil.ignore_patterns(".git", ".venv*", "*cache*", "build", "dist", "runs")
TIMEOUT = 900  # seconds, for the tests of one mutation


class Mutation(NamedTuple):
    """``line``, which occurs once in ``file``, is replaced by ``broken``; one of ``tests`` must fail."""

    what: str
    file: str
    line: str
    broken: str
    tests: str


MUTATIONS = [
    Mutation(
        "codes are cut off instead of rounded to nearest",
        "codec.py",
        "(y.view(torch.int32) - (ONE_BITS - (1 << (CODE_SHIFT - 1)))) >> CODE_SHIFT",
        "(y.view(torch.int32) - ONE_BITS) >> CODE_SHIFT",
        "test/test_codec.py",
    ),
    Mutation(
        "the sign of 0 is 1",
        "lion.py",
        "torch.where(x.abs() > 0, signed.view(torch.float32), 0.0)",
        "torch.where(x.abs() >= 0, signed.view(torch.float32), 0.0)",
        "test/test_lion.py",
    ),
    Mutation(
        "weights decay after the update",
        "lion.py",
        "    p = p - decay * p\n    p = p - _times_sign(lr, beta1 * m + grad_weight1 * g)\n",
        "    p = p - _times_sign(lr, beta1 * m + grad_weight1 * g)\n    p = p - decay * p\n",
        "test/test_lion.py",
    ),
    Mutation(
        "NaN and Inf gradients reach the momentum",
        "lion.py",
        "torch.where(g.abs() < math.inf, m + grad_weight2 * g, m)",
        "m + grad_weight2 * g",
        "test/test_lion.py",
    ),
    Mutation(
        "a block's scale is its largest value, not magnitude",
        "codec.py",
        "_to_blocks(x, block_size).abs().amax(-1, keepdim=True)",
        "_to_blocks(x, block_size).amax(-1, keepdim=True).abs()",
        "test/test_codec.py",
    ),
    Mutation(
        "rounding noise is the same in every step",
        "codec.py",
        "(step * MIX_STEP + key_high)",
        "(0 * step * MIX_STEP + key_high)",
        "test/test_codec.py",
    ),
    Mutation(
        "the scale's upper bit is taken for a sign",
        "codec.py",
        "((stored.to(torch.int32) & 0xFFFF) << SCALE_SHIFT)",
        "((stored.to(torch.int32)) << SCALE_SHIFT)",
        "test/test_codec.py",
    ),
    Mutation(
        "a checkpoint's dtypes are not checked",
        "formats.py",
        "if value.dtype not in dtypes:",
        "if False:",
        "test/test_checkpoint.py",
    ),
    Mutation(
        "a shard's noise begins as the whole parameter's",
        "shards.py",
        "return _position(self.first, None) if self.first else None",
        "return None",
        "test/test_shards.py",
    ),
    Mutation(
        "the kernel writes beyond a row's short last block",
        "fused/kernel.py",
        "mask = has_block[:, None] & (lanes < length[:, None])",
        "mask = has_block[:, None] & (lanes < BLOCK)",
        "test/fused/test_kernel.py",
    ),
    Mutation(
        "a step at lr 0 counts",
        "hyperparameters.py",
        "    elif lr == 0.0:\n        return False\n",
        "",
        "test/test_optimizer.py",
    ),
    Mutation(
        "what a master weight has beyond 16 bits is dropped",
        "codec.py",
        "residual = ordinal - nearest",
        "residual = 0 * ordinal",
        "test/test_master_weights.py",
    ),
]


def apply(mutation: Mutation, root: Path) -> None:
    file = root / "lowbit_optim" / mutation.file
    text = file.read_text()
    if text.count(mutation.line) != 1:
        raise ValueError(f"{mutation.file} has {text.count(mutation.line)} times, not once: {mutation.line!r}")
    file.write_text(text.replace(mutation.line, mutation.broken))


def first_failure(root: Path, tests: list[str]) -> str | None:
    """The name of the first test that fails, None if all pass."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    result = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=TIMEOUT)
    if result.returncode == 0:
        return None
    failed = re.search(r"^(?:FAILED|ERROR) \S*?([\w./]+\.py(?:::\w+)?)", result.stdout, re.MULTILINE)
    return failed[1] if failed else f"{' '.join(tests)}: exit status {result.returncode}"


def main() -> int:
    survived = []
    print("| broken | in | caught by |\n|---|---|---|")
    for mutation in MUTATIONS:
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder) / "copy"
            shutil.copytree(ROOT, root, ignore=NOT_COPIED)
            apply(mutation, root)
            caught = first_failure(root, sys.argv[1:] or mutation.tests.split())
        survived += [] if caught else [mutation]
        print(f"| {mutation.what} | `{mutation.file}` | {f'`{caught}`' if caught else '**nothing**'} |", flush=True)
    return len(survived) > 0


if __name__ == "__main__":
    sys.exit(main())
