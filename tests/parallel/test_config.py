"""What cannot be laid out is refused, naming what can; what can has a name for every axis."""

import dataclasses

import pytest

from deepseek_lab.learn import run_ranks
from deepseek_lab.model import DeepSeekConfig
from deepseek_lab.parallel import collectives
from deepseek_lab.parallel.config import ParallelConfig, divisors
from deepseek_lab.parallel.mesh import build_mesh

TINY = DeepSeekConfig.preset("tiny")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tp": 0}, "parallel.tp=0 must be at least 1"),
        ({"zero_stage": 4}, "use 0, 1, 2 or 3"),
        ({"recompute": "all"}, "use one of none, selective, full"),
        ({"compression": "fp8"}, "use one of none, int8, topk"),
        ({"schedule": "2f2b"}, "is not known"),
        ({"bucket_mb": 0.0}, "more than 0"),
        ({"compression": "topk", "zero_stage": 1}, "use zero_stage 0"),
        ({"dp": 4, "ep": 3}, "ep=3 does not divide parallel.dp=4; use 1, 2 or 4"),
    ],
)
def test_settings_that_cannot_be(settings, message):
    with pytest.raises(ValueError, match=message):
        ParallelConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "world_size", "message"),
    [
        ({"dp": 3}, 4, "dp=3 x tp=1 x pp=1 = 3 does not match the 4 ranks"),
        ({"dp": 2, "tp": 4}, 4, "--num_processes 8"),
        ({"tp": 3}, 4, "must be one of 1, 2 or 4"),
        ({"ep": 3}, 4, "ep=3 does not divide the 4 data-parallel ranks"),
        ({"pp": 3}, 4, "does not divide the 4 ranks"),
    ],
)
def test_layouts_that_do_not_fit_the_ranks(settings, world_size, message):
    with pytest.raises(ValueError, match=message):
        ParallelConfig(**settings).check(world_size)


@pytest.mark.parametrize(
    ("change", "settings", "message"),
    [
        ({"num_attention_heads": 6}, {"tp": 4}, "num_attention_heads=6; use 1, 2, 3 or 6"),
        ({"vocab_size": 4098}, {"tp": 4}, "vocab_size=4098; use 1, 2, 3"),
        ({"moe_intermediate_size": 42}, {"tp": 4}, "moe_intermediate_size=42"),
        ({"intermediate_size": 42}, {"tp": 4}, "intermediate_size=42"),
        ({}, {"tp": 4, "sequence_parallel": True}, "data.seq_len=126"),
        ({}, {"ep": 3}, "n_routed_experts=8; use 1, 2, 4 or 8"),
    ],
)
def test_models_that_cannot_be_split(change, settings, message):
    with pytest.raises(ValueError, match=message):
        ParallelConfig(**settings).check_model(dataclasses.replace(TINY, **change), seq_len=126)


def test_divisors_read_like_a_sentence():
    assert [divisors(n) for n in (1, 2, 12)] == ["1", "1 or 2", "1, 2, 3, 4, 6 or 12"]


def neighbours(parallel):
    mesh = build_mesh(parallel, "cpu")
    axes = ("pp", "dp", "tp", "ep", "world")
    return {axis: (mesh.rank(axis), mesh.size(axis), collectives.ranks_of(mesh.group(axis))) for axis in axes}


@pytest.mark.ranks
def test_neighbouring_ranks_share_layers_and_distant_ones_the_batch():
    every = run_ranks(neighbours, 4, ParallelConfig(tp=2))
    assert [rank["tp"][2] for rank in every] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert [rank["dp"][2] for rank in every] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    assert [(rank["dp"][:2], rank["tp"][:2]) for rank in every] == [
        ((0, 2), (0, 2)),
        ((0, 2), (1, 2)),
        ((1, 2), (0, 2)),
        ((1, 2), (1, 2)),
    ]
    assert all(rank["pp"][1] == rank["ep"][1] == 1 and rank["world"][1] == 4 for rank in every)


def test_one_process_needs_no_group():
    mesh = build_mesh(ParallelConfig(), "cpu")
    assert [(mesh.group(axis), mesh.rank(axis), mesh.size(axis)) for axis in ("dp", "tp", "world")] == [
        (None, 0, 1)
    ] * 3
