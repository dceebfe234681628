"""The parity suite once more, on devices with memory of their own whose streams run late and in an unlucky order.

What waits for what is then decided by marks alone: one that is missing shows as wrong numbers, or as a move that the
residency table refuses. The tests are those of the modules named here, as they are.
"""

# ruff: noqa: F401 (pytest collects what is imported)
from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.scheduler.test_bfloat16 import test_any_budget_delay_and_share_in_memory as test_bfloat16_any_budget
from tests.scheduler.test_bfloat16 import test_frozen_weights as test_bfloat16_frozen_weights
from tests.scheduler.test_bfloat16 import test_losses_weights_and_moments_equal_the_plain_loop as test_bfloat16_parity
from tests.scheduler.test_clip import test_any_delay_and_mode_give_the_same_bits, test_one_norm_over_tied_weights
from tests.scheduler.test_delay import (
    test_a_commit_at_the_turn_has_the_step_before_and_nothing_of_this_one,
    test_also_for_tied_idle_and_unused_weights,
    test_any_delay_gives_the_same_bits,
    test_steps_of_different_numbers_of_micro_batches,
)
from tests.scheduler.test_kept_states import test_the_result_does_not_depend_on_what_is_kept
from tests.scheduler.test_parity import *  # noqa: F403  (the whole module)
from tests.scheduler.test_parity import _one_thread  # its fixture: references are of one thread
from tests.scheduler.test_speculative import (
    test_borrowers_and_idle_tensors_get_what_was_made_again,
    test_guessing_gives_the_bits_of_exact_clipping,
)
from tests.scheduler.test_tied import (
    test_a_layer_used_three_times_sums_its_gradients_and_is_updated_once,
    test_many_micro_batches_equal_sums_made_apart,
)
from tests.support.late_runs import on_late_devices


@pytest.fixture(autouse=True)
def _late(request: pytest.FixtureRequest) -> Iterator[None]:
    with on_late_devices(hash_of(request.node.name)):
        yield


def hash_of(name: str) -> int:
    """A seed for each case, the same in every run."""
    return sum(name.encode())
