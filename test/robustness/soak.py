"""Thousands of steps between random events: two optimizers, one of which steps eagerly, stay equal in every bit.

    TRITON_INTERPRET=1 PYTHONPATH=.:test python test/robustness/soak.py --steps 10000 --mode compiled

Each eager step is held to the paper, too. Prints how often each event happened; raises at the first difference.
"""

import argparse
import collections
import random
import time
from collections.abc import Callable

import torch
from twins import MODES, POISONS, Twins

SHAPES = [(8, 128), (5, 75), (64, 64), (100,), (9, 3, 3, 3), (3, 2, 130), (40, 16), (), (0, 64), (1, 64)]
MAX_PARAMETERS = 16
Event = Callable[[Twins, random.Random], None]


def soak(steps: int, mode: str, seed: int = 0) -> dict[str, int]:
    """How often each event happened."""
    rng = random.Random(seed)
    twins = Twins(mode, lr=1e-3, weight_decay=0.1, min_quantized_numel=256, seed=seed)
    _add_group(twins, rng)
    happened = collections.Counter(steps=0)
    while happened["steps"] < steps:
        poison = rng.choice(POISONS) if rng.random() < 0.05 else None
        without = frozenset(i for i in range(twins.count) if rng.random() < 0.05)
        twins.set_grads(rng.randrange(2**31), without, poison)
        happened["steps with poisoned gradients"] += poison is not None
        for name, (chance, event) in EVENTS.items():
            if rng.random() < chance:
                event(twins, rng)
                happened[name] += 1
        twins.step()
        happened["steps"] += 1
    return {**happened, "parameters": twins.count}


def _add_group(twins: Twins, rng: random.Random) -> None:
    if twins.count >= MAX_PARAMETERS:
        return
    options = {
        "block_size": rng.choice([64, 64, 32]),
        "quantize": rng.random() < 0.9,
        "decouple_lr": rng.random() < 0.2,
    }
    dtype = rng.choice([torch.bfloat16, torch.float32])
    twins.add_group(rng.sample(SHAPES, 4), dtype, rng.randrange(2**31), **options)


def _set_lr(twins: Twins, rng: random.Random) -> None:
    lr = rng.choice([0.0, 1e-6, 1e-4, 1e-3, 1e-2])
    twins.set_option(rng.randrange(len(twins.eager.groups)), lr=rng.choice([lr, torch.tensor(lr)]))


def _set_betas(twins: Twins, rng: random.Random) -> None:
    twins.set_option(rng.randrange(len(twins.eager.groups)), betas=(rng.uniform(0.8, 0.99), rng.uniform(0.9, 0.999)))


def _freeze_or_not(twins: Twins, rng: random.Random) -> None:
    twins.require_grad(rng.randrange(twins.count), rng.random() < 0.6)


def _live_again(how: str) -> Event:
    return lambda twins, rng: getattr(rng.choice(twins.twins), how)()


# between the gradients and the step, with this chance each
EVENTS: dict[str, tuple[float, Event]] = {
    "rate changed": (0.05, _set_lr),
    "betas changed": (0.02, _set_betas),
    "frozen or thawed": (0.05, _freeze_or_not),
    "group added, up to 16 parameters": (0.005, _add_group),
    "saved and loaded": (0.02, _live_again("save_and_load")),
    "copied": (0.01, _live_again("deepcopy")),
    "pickled": (0.01, _live_again("pickle")),
    "gradients zeroed": (0.02, lambda twins, rng: twins.zero_grad(rng.random() < 0.5)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--mode", choices=list(MODES), default="compiled")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    start = time.perf_counter()
    for name, count in soak(args.steps, args.mode, args.seed).items():
        print(f"{count:8} {name}")
    print(f"all equal, in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
