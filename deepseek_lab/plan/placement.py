"""Which ranks hold which experts: copies for the busy ones, and a packing that keeps the ranks' loads even.

All ranks of an all-to-all wait for the one with the most rows.  So where loads are known from the recent past, the
busiest experts are held twice or more, their visits shared among the copies, and the copies packed onto ranks so that
each has about the same to do (DeepSeek-V3, arXiv 2412.19437, section 3.4.1, "redundant experts").

A placement is `expert_RS`: for each of R ranks the experts in its S places, the same S on all ranks.  `load_E` are
the experts' loads: visits, or any measure that adds up.  A copy's load is the expert's, divided by the number of its
copies.
"""

from collections import Counter
from collections.abc import Sequence

Placement = Sequence[Sequence[int]]


def contiguous(n_experts: int, n_ranks: int) -> tuple[tuple[int, ...], ...]:
    """The placement of training: rank r holds the r-th E/R experts."""
    here = n_experts // n_ranks
    return tuple(tuple(range(r * here, (r + 1) * here)) for r in range(n_ranks))


def copies_for(load_E, n_places, n_ranks):
    """How many copies each expert gets, so that together they fill `n_places`: a list of E numbers.

    One each; then, one at a time, another for the expert whose copies have the most to do; if several have as much, for
    the one with the lowest number.  No other numbers make the heaviest copy lighter.  An expert gets at most `n_ranks`
    copies: a second one on the same rank would take nothing off it.

    Raises:
        ValueError: when the places are fewer than the experts, or more than E·R.
    """
    n_experts = len(load_E)
    if not n_experts <= n_places <= n_experts * n_ranks:
        raise ValueError(
            f"{n_places} places for {n_experts} experts on {n_ranks} ranks: use {n_experts} to {n_experts * n_ranks}"
        )
    copies_E = [1] * n_experts
    for _ in range(n_places - n_experts):
        free = [e for e in range(n_experts) if copies_E[e] < n_ranks]
        copies_E[max(free, key=lambda e: load_E[e] / copies_E[e])] += 1
    return copies_E


def pack(load_E, copies_E, n_ranks):
    """Put the copies on R = `n_ranks` ranks, S = sum(copies_E) / R places on each: a list of R lists of S experts.

    The heaviest copies first, each on the least loaded rank that has a free place and does not hold that expert; if
    several ranks have as little, on the one with the lowest number.  (Longest processing time first: Graham, "Bounds on
    multiprocessing timing anomalies", 1969, with places as a limit.)  Only where every rank with a free place holds the
    expert does one get it twice; with the copies of `copies_for` that has not been seen.

    Raises:
        ValueError: when the ranks do not divide the copies.
    """
    if sum(copies_E) % n_ranks:
        raise ValueError(f"{n_ranks} ranks do not divide {sum(copies_E)} copies: give every rank as many places")
    n_places = sum(copies_E) // n_ranks
    share_E = [load / copies for load, copies in zip(load_E, copies_E, strict=True)]
    expert_RS = [[] for _ in range(n_ranks)]
    load_R = [0.0] * n_ranks
    for e in sorted(range(len(load_E)), key=lambda e: -share_E[e]):
        for _ in range(copies_E[e]):
            free = [r for r in range(n_ranks) if len(expert_RS[r]) < n_places]
            new = [r for r in free if e not in expert_RS[r]]
            r = min(new or free, key=lambda r: load_R[r])
            expert_RS[r].append(e)
            load_R[r] += share_E[e]
    return expert_RS


def rebalance(load_E: Sequence[float], n_places: int, current_RS: Placement) -> Placement:
    """A placement of `n_places` in all for these loads; the current one where that leaves no busier rank."""
    n_ranks = len(current_RS)
    new_RS = pack(load_E, copies_for(load_E, n_places, n_ranks), n_ranks)
    return min(current_RS, new_RS, key=lambda expert_RS: max(rank_loads(load_E, expert_RS)))


def rank_loads(load_E: Sequence[float], expert_RS: Placement) -> list[float]:
    """What each of the R ranks has to do: the sum over its places of an expert's load, divided by its copies."""
    copies = Counter(e for held in expert_RS for e in held)
    return [sum(load_E[e] / copies[e] for e in held) for held in expert_RS]


def check(expert_RS: Placement, n_experts: int, n_ranks: int) -> None:
    """Raises ValueError unless all ranks have the same number of places and every expert has at least one."""
    places = [len(held) for held in expert_RS]
    if len(places) != n_ranks or len(set(places)) > 1:
        raise ValueError(f"a placement needs {n_ranks} ranks with equal numbers of places, not {places}")
    found = {e for held in expert_RS for e in held}
    if found != set(range(n_experts)):
        wrong = sorted(found ^ set(range(n_experts)))
        raise ValueError(f"a placement holds each of the experts 0 to {n_experts - 1}; missing or unknown: {wrong}")
