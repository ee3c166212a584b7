"""What must hold of every cell, by name: each says which published mistake it would have seen."""

from tests.parity.harness import Report

TOLERANCE = 1e-9  # relative, norm-wise, in fp64: round-off leaves about 1e-13 after five steps of Adam


def loss_is_weighted_by_tokens(report: Report) -> None:
    """Not a mean of means (torchtitan#1842, transformers#34191)."""
    assert report.loss <= TOLERANCE, report


def norm_is_global(report: Report) -> None:
    """Not that of a shard (torchtitan#596, #649), nor copies counted twice (Megatron-LM#5916, #6099), nor scaled."""
    assert report.norm <= TOLERANCE, report


def gradients_are_serial(report: Report) -> None:
    """Not scaled per rank or pass (torchtitan#1733, DeepSpeed#8152), nor permuted by strided shards."""
    assert report.gradients <= TOLERANCE, report


def parameters_are_serial(report: Report) -> None:
    """After five steps with clipping, which amplify whatever else is wrong."""
    assert report.parameters <= TOLERANCE, report


def copies_stay_equal(report: Report) -> None:
    """Norm weights do not drift apart under sequence parallelism (Megatron-LM#1446, gpt-neox#1257): bit for bit."""
    assert not report.drift, report


def visits_are_counted_once(report: Report) -> None:
    """Neither twice when activations are recomputed, nor in idle passes (torchtitan#1304, #1506)."""
    assert max(report.visits, report.bias) == 0, report


def state_is_sharded(report: Report) -> None:
    """What a rank holds is what ZeRO's table 1 says: nothing passes by sharding nothing.

    A tenth more is for padding; to forget one kind of state costs 1/4 or more.
    """
    assert report.too_many_bytes <= 0.1, report


CHECKS = [
    loss_is_weighted_by_tokens,
    norm_is_global,
    gradients_are_serial,
    parameters_are_serial,
    copies_stay_equal,
    visits_are_counted_once,
    state_is_sharded,
]
