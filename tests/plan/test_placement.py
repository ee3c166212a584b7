"""Placements: every expert somewhere, equal places, loads that are even, against brute force where that is possible."""

import itertools
import random

import pytest

from deepseek_lab.plan import placement


def cases(n, seed=0):
    """Random (load_E, n_places, R), with ties, zeros and loads as skewed as routers leave them."""
    rng = random.Random(seed)
    for _ in range(n):
        n_ranks, here = rng.randint(2, 6), rng.randint(1, 5)
        n_places = n_ranks * here
        n_experts = rng.randint(max(here, -(-n_places // n_ranks)), n_places)
        yield [rng.choice([0, 1, 1, 2, 5, rng.lognormvariate(0, 1)]) for _ in range(n_experts)], n_places, n_ranks


def all_copies(n_experts, n_places, n_ranks):
    for copies in itertools.product(range(1, n_ranks + 1), repeat=n_experts):
        if sum(copies) == n_places:
            yield copies


def all_packings(copies_E, n_ranks, n_places):
    """Every way of giving expert after expert `copies_E[e]` different ranks."""

    def extend(e, held):
        if e == len(copies_E):
            yield [list(h) for h in held]
            return
        for ranks in itertools.combinations(range(n_ranks), copies_E[e]):
            if all(len(held[r]) < n_places for r in ranks):
                yield from extend(e + 1, [(*h, e) if r in ranks else h for r, h in enumerate(held)])

    yield from extend(0, [()] * n_ranks)


def test_every_expert_is_somewhere_and_no_rank_holds_one_twice():
    for load_E, n_places, n_ranks in cases(2000):
        copies_E = placement.copies_for(load_E, n_places, n_ranks)
        assert sum(copies_E) == n_places
        assert max(copies_E) <= n_ranks
        expert_RS = placement.pack(load_E, copies_E, n_ranks)
        placement.check(expert_RS, len(load_E), n_ranks)
        assert all(len(set(held)) == len(held) == n_places // n_ranks for held in expert_RS)
        held = [e for rank in expert_RS for e in rank]
        assert [held.count(e) for e in range(len(load_E))] == copies_E
        assert sum(placement.rank_loads(load_E, expert_RS)) == pytest.approx(sum(load_E))


def test_no_other_numbers_of_copies_have_a_lighter_heaviest_one():
    rng = random.Random(1)
    for n_experts, n_places, n_ranks in ((3, 6, 3), (4, 6, 2), (4, 8, 4), (5, 8, 4)):
        for _ in range(20):
            load_E = [rng.lognormvariate(0, 1) for _ in range(n_experts)]
            heaviest = [
                max(load / c for load, c in zip(load_E, copies, strict=True))
                for copies in (
                    placement.copies_for(load_E, n_places, n_ranks),
                    *all_copies(n_experts, n_places, n_ranks),
                )
            ]
            assert heaviest[0] == min(heaviest)


def test_the_packing_is_near_the_best_there_is():
    """Longest first is within 4/3 of the best (Graham, without a limit of places); on these cases with one, too."""
    rng = random.Random(2)
    for n_experts, n_places, n_ranks in ((6, 6, 2), (6, 6, 3), (4, 6, 2), (5, 6, 3), (6, 8, 4)):
        for _ in range(15):
            load_E = [rng.lognormvariate(0, 1) for _ in range(n_experts)]
            copies_E = placement.copies_for(load_E, n_places, n_ranks)
            busiest = max(placement.rank_loads(load_E, placement.pack(load_E, copies_E, n_ranks)))
            best = min(
                max(placement.rank_loads(load_E, expert_RS))
                for expert_RS in all_packings(copies_E, n_ranks, n_places // n_ranks)
            )
            assert best <= busiest * (1 + 1e-12)
            assert busiest <= best * 4 / 3


def test_a_new_placement_is_never_worse_than_the_current_one():
    rng = random.Random(3)
    for n_experts, n_places, n_ranks in ((8, 8, 2), (8, 10, 2), (16, 20, 4), (64, 72, 8)):
        current_RS = placement.contiguous(n_experts, n_ranks)
        for _ in range(50):
            load_E = [rng.lognormvariate(0, 0.7) for _ in range(n_experts)]
            new_RS = placement.rebalance(load_E, n_places, current_RS)
            before, after = (max(placement.rank_loads(load_E, p)) for p in (current_RS, new_RS))
            assert after <= before


def test_one_busy_expert_is_held_by_all():
    """12 visits of 15 go to expert 0: with 4 copies on 4 ranks each has 3, beside one of the others' 1."""
    load_E = [12, 1, 1, 1, 0]
    assert placement.copies_for(load_E, 8, 4) == [4, 1, 1, 1, 1]
    expert_RS = placement.pack(load_E, [4, 1, 1, 1, 1], 4)
    assert expert_RS == [[0, 1], [0, 2], [0, 3], [0, 4]]
    assert placement.rank_loads(load_E, expert_RS) == [4, 4, 4, 3]
    assert placement.rank_loads(load_E, [[0, 1], [2, 3], [4, 4], [4, 4]]) == [13, 2, 0, 0]


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="use 4 to 8"):
        placement.copies_for([1, 1, 1, 1], 9, 2)
    with pytest.raises(ValueError, match="do not divide"):
        placement.pack([1, 1], [2, 1], 2)
    with pytest.raises(ValueError, match="equal numbers of places"):
        placement.check([[0, 1], [2]], 3, 2)
    with pytest.raises(ValueError, match="missing or unknown: \\[2\\]"):
        placement.check([[0, 1], [1, 0]], 3, 2)
