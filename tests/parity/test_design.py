"""Covering designs cover, and stay small."""

import os
import subprocess
import sys
from itertools import combinations, product

import pytest

from tests.parity import design
from tests.parity.design import AXES, completions, covering, possible, world_size


@pytest.mark.parametrize("strength", [2, 3])
def test_every_possible_combination_occurs_in_a_possible_cell(strength):
    cells = covering(AXES, strength)
    assert all(possible(cell) and list(cell) == list(AXES) for cell in cells)
    for names in combinations(AXES, strength):
        for values in product(*(AXES[name] for name in names)):
            wanted = dict(zip(names, values, strict=True))
            if any(True for _ in completions(wanted, AXES, possible)):
                assert any(wanted.items() <= cell.items() for cell in cells), wanted


def test_the_larger_design_holds_every_mesh_with_every_stage():
    found = {(cell["dp"], cell["tp"], cell["zero_stage"]) for cell in covering(AXES, 3)}
    assert found == {(d, t, z) for d, t, z in product((1, 2, 4), (1, 2, 4), range(4)) if d * t <= design.MOST_RANKS}


def test_a_design_is_the_same_each_time_and_far_smaller_than_the_product():
    assert covering(AXES, 2) == covering(AXES, 2)
    everything = sum(possible(dict(zip(AXES, values, strict=True))) for values in product(*AXES.values()))
    assert len(covering(AXES, 2)) < 36 < 10_000 < everything  # 6 schedules with 4 stages of ZeRO are 24 at least
    assert len(covering(AXES, 3)) < 150
    assert max(world_size(cell) for cell in covering(AXES, 3)) <= design.MOST_RANKS


def test_a_design_does_not_depend_on_the_process():
    """Strings are hashed differently in each process, and pytest's workers must all collect the same cells."""
    script = "from tests.parity.design import AXES, covering; print(covering(AXES, 2))"
    printed = [
        subprocess.check_output([sys.executable, "-c", script], env={**os.environ, "PYTHONHASHSEED": seed})
        for seed in ("1", "2")
    ]
    assert printed[0] == printed[1]


def test_another_axis_is_one_more_line():
    wider = {**AXES, "pp": (1, 2)}
    assert {cell["pp"] for cell in covering(wider, 2)} == {1, 2}


def test_combinations_that_only_impossible_cells_hold_are_left_out():
    cells = covering({"a": (1, 2), "b": (1, 2), "c": (1, 2)}, 2, lambda cell: cell.get("a") != 2 or cell.get("b") != 2)
    assert cells
    assert not any(cell["a"] == cell["b"] == 2 for cell in cells)
