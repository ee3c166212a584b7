"""Places in the grid are those of torch's DeviceMesh, and groups are its groups."""

import math

import pytest
import torch

from deepseek_lab.learn import run_ranks
from deepseek_lab.parallel import collectives
from deepseek_lab.parallel.config import ParallelConfig
from deepseek_lab.parallel.mesh import AXES, build_mesh
from deepseek_lab.plan import grid

SIZES = {"pp": 2, "edp": 3, "ep": 1, "tp": 4}


def test_every_rank_has_a_place_of_its_own():
    table = torch.arange(math.prod(SIZES.values())).view(*SIZES.values())
    for rank in range(table.numel()):
        place = grid.coordinates(rank, SIZES)
        assert list(place) == list(SIZES)
        assert table[tuple(place.values())] == rank


@pytest.mark.parametrize("rank", [-1, 24])
def test_there_is_no_such_rank(rank):
    with pytest.raises(ValueError, match=f"rank={rank} is not in a grid .* ranks 0 to 23"):
        grid.coordinates(rank, SIZES)


def test_groups_along_all_axes_and_along_none():
    assert grid.members(5, SIZES, SIZES) == list(range(24))
    assert grid.members(5, (), SIZES) == [5]


def place(parallel):
    mesh = build_mesh(parallel, "cpu")
    sizes = {axis: mesh.size(axis) for axis in AXES}
    groups = {axis: list(collectives.ranks_of(mesh.group(axis))) for axis in (*AXES, "dp") if mesh.size(axis) > 1}
    return sizes, {axis: mesh.rank(axis) for axis in AXES}, groups


@pytest.mark.ranks
@pytest.mark.parametrize("settings", [{"tp": 2, "ep": 2, "pp": 2}, {"tp": 2, "ep": 2}, {"pp": 4}])
def test_places_and_groups_are_those_of_the_mesh(settings):
    for rank, (sizes, place_there, groups) in enumerate(run_ranks(place, 8, ParallelConfig(**settings))):
        assert grid.coordinates(rank, sizes) == place_there
        for axis, ranks in groups.items():
            assert grid.members(rank, ("edp", "ep") if axis == "dp" else (axis,), sizes) == ranks
