"""The parity suite on late devices, once more with AdamW on the device. A part of it is in `test_device_updates.py`."""

# ruff: noqa: F401 (pytest collects what is imported)
from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.scheduler.test_bfloat16 import (
    test_any_budget_delay_and_share_in_memory,
    test_clipping,
    test_states_in_memory,
)
from tests.scheduler.test_clip import test_any_delay_and_mode_give_the_same_bits, test_one_norm_over_tied_weights
from tests.scheduler.test_delay import (
    test_a_commit_at_the_turn_has_the_step_before_and_nothing_of_this_one,
    test_also_for_tied_idle_and_unused_weights,
    test_any_delay_gives_the_same_bits,
    test_steps_of_different_numbers_of_micro_batches,
)
from tests.scheduler.test_kept_states import test_the_result_does_not_depend_on_what_is_kept
from tests.scheduler.test_parity import *  # noqa: F403  (the whole module)
from tests.scheduler.test_speculative import (
    test_borrowers_and_idle_tensors_get_what_was_made_again,
    test_guessing_gives_the_bits_of_exact_clipping,
)
from tests.scheduler.test_tied import (
    test_a_layer_used_three_times_sums_its_gradients_and_is_updated_once,
    test_many_micro_batches_equal_sums_made_apart,
)
from tests.support.late_runs import on_late_devices

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _late(request: pytest.FixtureRequest) -> Iterator[None]:
    with on_late_devices(sum(request.node.name.encode()), optim_device="device"):
        yield
