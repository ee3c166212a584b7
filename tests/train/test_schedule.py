"""Warm-up and cosine, worked out by hand."""

import pytest

from deepseek_lab.train.schedule import warmup_cosine

RUN = {"peak": 1e-4, "floor": 1e-6, "warmup_steps": 10, "total_steps": 100}


def rate(step):
    return warmup_cosine(step, **RUN)


def test_warm_up_starts_above_zero_and_ends_at_the_peak():
    assert rate(0) == pytest.approx(1e-5)
    assert rate(4) == pytest.approx(5e-5)
    assert rate(9) == 1e-4


def test_the_cosine_goes_on_from_the_peak_and_ends_at_the_floor():
    assert rate(10) < 1e-4
    assert rate(10) == pytest.approx(1e-4, rel=1e-3)
    assert rate(54) == pytest.approx((1e-4 + 1e-6) / 2)
    assert rate(99) == rate(1000) == pytest.approx(1e-6)
    assert all(rate(step) > rate(step + 1) for step in range(9, 99))


def test_no_warm_up_and_only_warm_up():
    assert warmup_cosine(0, peak=1.0, floor=0.0, warmup_steps=0, total_steps=1) == pytest.approx(0)
    assert warmup_cosine(4, peak=1.0, floor=0.0, warmup_steps=5, total_steps=5) == 1.0
