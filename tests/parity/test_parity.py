"""Parity is the law: every layout gives the serial run, and planted mistakes are seen.

`make test` runs a design in which every pair of settings occurs, `make parity` one in which every three do.
"""

import pytest

from deepseek_lab.learn.ranks import RankError
from tests.parity import checks, mistakes
from tests.parity.design import AXES, covering, of_sixteen
from tests.parity.harness import run_cells

pytestmark = pytest.mark.ranks

PAIRS = covering(AXES, 2)
TORCH_AXES = AXES | {
    "engine": ("torch",),
    "ep": (1,),
    "schedule": ("1f1b", "gpipe", "interleaved"),
    "zero_stage": (0, 2, 3),
    "collectives": ("gloo",),
    "overlap": (True,),
}
BASE = {name: values[0] for name, values in AXES.items()} | {"dp": 2, "accumulation": 3, "uneven": True}


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """A report of every cell of the pairwise design."""
    return run_cells(PAIRS, tmp_path_factory.mktemp("cells"))


@pytest.mark.parametrize("number", range(len(PAIRS)))
@pytest.mark.parametrize("check", checks.CHECKS, ids=lambda check: check.__name__)
def test_every_cell_is_the_serial_run(check, number, reports, record_property):
    if check is checks.CHECKS[0]:
        record_property("parity", str(reports[number]))
    check(reports[number])


@pytest.mark.parity_full
@pytest.mark.parametrize("axes", [AXES, TORCH_AXES], ids=["lab", "torch"])
def test_every_three_settings_together_are_the_serial_run(axes, tmp_path, record_property):
    assert not failing(covering(axes, 3), tmp_path, record_property)


@pytest.mark.parity_full
def test_ten_layouts_of_sixteen_ranks_are_the_serial_run(tmp_path, record_property):
    assert not failing(covering(AXES, 2, of_sixteen)[:10], tmp_path, record_property)


def failing(cells, out, record_property):
    """What does not hold of which of `cells`, one line each."""
    failures = []
    for report in run_cells(cells, out, timeout=3600):
        record_property("parity", str(report))
        for check in checks.CHECKS:
            try:
                check(report)
            except AssertionError:
                failures.append(f"{check.__name__}: {report}")
    return "\n".join(failures)


ON_TP = {"dp": 1, "tp": 2}
ON_PP = {"dp": 1, "pp": 2}
SEEN_BY = [
    (mistakes.gradients_not_divided_by_passes, {}, checks.gradients_are_serial),
    (mistakes.gradients_averaged_over_ranks, {"zero_stage": 2}, checks.gradients_are_serial),
    (mistakes.mean_of_means_in_the_gradient, {}, checks.gradients_are_serial),
    (mistakes.mean_of_means_in_the_loss, {}, checks.loss_is_weighted_by_tokens),
    (mistakes.norm_of_a_shard, {"zero_stage": 2}, checks.norm_is_global),
    (mistakes.norm_of_a_shard, ON_TP, checks.norm_is_global),
    (mistakes.copies_counted_twice_in_the_norm, ON_TP, checks.norm_is_global),
    (mistakes.partial_gradients_not_summed, {**ON_TP, "sequence_parallel": True}, checks.copies_stay_equal),
    (mistakes.visits_counted_again_in_recomputation, {"recompute": "full"}, checks.visits_are_counted_once),
    (mistakes.nothing_is_sharded, {"zero_stage": 1}, checks.state_is_sharded),
    (mistakes.nothing_is_sharded, {"zero_stage": 2}, checks.state_is_sharded),
    (mistakes.nothing_is_sharded, {"zero_stage": 3}, checks.state_is_sharded),
    (mistakes.shards_are_strided, ON_TP, checks.gradients_are_serial),
    (mistakes.norm_of_a_shard, ON_PP, checks.norm_is_global),
    (mistakes.loss_divided_by_micro_batches, ON_PP, checks.gradients_are_serial),
    (mistakes.ends_keep_their_own_gradient, {**ON_PP, "tied": True}, checks.gradients_are_serial),
    (mistakes.ends_keep_their_own_gradient, {**ON_PP, "tied": True}, checks.copies_stay_equal),
    (mistakes.weight_parts_replace_gradients, {**ON_PP, "schedule": "zb_h1"}, checks.gradients_are_serial),
    (mistakes.expert_gradients_times_ep, {"ep": 2}, checks.gradients_are_serial),
    (mistakes.copies_counted_twice_in_the_norm, {"dp": 4, "ep": 2}, checks.norm_is_global),
    (mistakes.auxiliary_loss_on_every_tensor_rank, ON_TP, checks.gradients_are_serial),
    (mistakes.bias_from_this_ranks_visits, {}, checks.visits_are_counted_once),
    (mistakes.bias_moved_every_pass, {}, checks.visits_are_counted_once),
    (mistakes.capacity_taken_by_padding, {"capacity_factor": 1.0}, checks.gradients_are_serial),
]


@pytest.mark.parametrize(
    ("plant", "settings", "check"), SEEN_BY, ids=[f"{n}-{plant.__name__}" for n, (plant, *_) in enumerate(SEEN_BY)]
)
def test_a_planted_mistake_is_seen(plant, settings, check, tmp_path):
    (report,) = run_cells([{**BASE, **settings}], tmp_path, plant=plant)
    with pytest.raises(AssertionError):
        check(report)


def test_a_rank_that_stops_when_its_own_rows_end_is_seen(tmp_path):
    cell = {**BASE, "dp": 4, "zero_stage": 3}  # 3, 3, 3 and 2 rows, one a pass
    with pytest.raises(RankError):
        run_cells([cell], tmp_path, plant=mistakes.ranks_stop_when_their_own_rows_end, timeout=10)
