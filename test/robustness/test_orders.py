"""In whatever order things happen to an optimizer, each step is the paper's, and the same in every mode.

Lives that go on from a checkpoint, a copy or a pickle happen to one of two optimizers, and the other shows what would
have been without.
"""

from typing import Any

import pytest
import strategies
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from twins import POISONS, Twins

pytestmark = pytest.mark.filterwarnings(
    "ignore:no parameter has a gradient", "ignore:the checkpoint has no state for parameter"
)
indices = st.integers(0, 100)


class Life(RuleBasedStateMachine):
    mode: str

    @initialize(
        shape=strategies.shapes(),
        dtype=strategies.dtypes,
        seed=strategies.seeds,
        options=strategies.group_options(st.just(True)),
    )
    def begin(self, shape: tuple[int, ...], dtype: torch.dtype, seed: int, options: dict[str, Any]) -> None:
        self.twins = Twins(self.mode, seed=seed % 3)
        self.twins.add_group([shape], dtype, seed, **options)

    @precondition(lambda self: self.twins.count < 4)
    @rule(
        shape=strategies.shapes(),
        dtype=strategies.dtypes,
        seed=strategies.seeds,
        options=strategies.group_options(st.just(True)),
    )
    def add_group(self, shape: tuple[int, ...], dtype: torch.dtype, seed: int, options: dict[str, Any]) -> None:
        self.twins.add_group([shape], dtype, seed, **options)

    @rule(
        seed=strategies.seeds,
        without=st.frozensets(st.integers(0, 3), max_size=2),
        poison=st.sampled_from([None, *POISONS]),
        steps=st.integers(1, 3),
    )
    def step(self, seed: int, without: frozenset[int], poison: float | None, steps: int) -> None:
        for number in range(steps):
            self.twins.set_grads(seed + 1000 * number, without, poison)
            self.twins.step()

    @rule()
    def step_again_with_the_same_gradients(self) -> None:
        self.twins.step()

    @rule(lr=strategies.lrs, as_tensor=st.booleans(), index=indices)
    def set_lr(self, lr: float, as_tensor: bool, index: int) -> None:
        self._set(index, lr=torch.tensor(lr) if as_tensor else lr)

    @rule(weight_decay=strategies.weight_decays, betas=strategies.betas, maximize=st.booleans(), index=indices)
    def set_options(self, index: int, **options: Any) -> None:
        self._set(index, **options)

    def _set(self, index: int, **options: Any) -> None:
        self.twins.set_option(index % len(self.twins.eager.groups), **options)

    @rule(index=indices, required=st.booleans())
    def freeze_or_not(self, index: int, required: bool) -> None:
        self.twins.require_grad(index % self.twins.count, required)

    @rule(set_to_none=st.booleans())
    def zero_grad(self, set_to_none: bool) -> None:
        self.twins.zero_grad(set_to_none)

    @rule(which=st.integers(0, 1), how=st.sampled_from(["save_and_load", "deepcopy", "pickle"]))
    def live_again(self, which: int, how: str) -> None:
        getattr(self.twins.twins[which], how)()

    @invariant()
    def twins_are_equal(self) -> None:
        if hasattr(self, "twins"):
            self.twins.check_equal()


@pytest.mark.parametrize("mode", ["eager", "fused"])
def test_any_order_of_events(mode: str) -> None:
    if mode == "fused":
        pytest.importorskip("triton")
    machine = type(f"Life{mode}", (Life,), {"mode": mode})
    run_state_machine_as_test(machine, settings=settings(stateful_step_count=20))
