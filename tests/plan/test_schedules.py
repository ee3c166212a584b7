"""Schedules: sound on a grid, equal to published bubble rates and formulas, and to torch's own orders."""

import itertools

import pytest

from deepseek_lab.learn.chapters.c06_pipeline import messages_beside_work
from deepseek_lab.plan.schedules import (
    SCHEDULES,
    Action,
    Schedule,
    build_schedule,
    rendezvous,
    simulate,
    staleness,
    validate,
)

GRID = [
    (name, ranks, micro_batches, chunks)
    for name, many in [
        ("gpipe", (1,)),
        ("1f1b", (1,)),
        ("zb_h1", (1,)),
        ("zb_h2", (1,)),
        ("interleaved", (2, 3)),
        ("pipedream", (1,)),
    ]
    for ranks, micro_batches, chunks in itertools.product((1, 2, 3, 4, 8), (1, 2, 3, 4, 8, 12, 24), many)
    if name != "interleaved" or micro_batches % ranks == 0
] + [("dualpipe_v", ranks, m, 2) for ranks in (1, 2, 3, 4, 8) for m in (2 * ranks, 2 * ranks + 1, 24) if m >= 2 * ranks]


def most_allowed(name, ranks, micro_batches, chunks):
    """Activations of single chunks that a rank may hold, by the papers."""
    if name == "gpipe":
        return micro_batches
    if name == "interleaved":  # p (1 + (p - 1) / (p v)) micro-batches of v chunks
        return ranks * chunks + ranks - 1
    most = {"1f1b": ranks, "zb_h1": ranks, "zb_h2": 2 * ranks - 1, "dualpipe_v": 2 * ranks + 1, "pipedream": ranks}
    return most[name]


@pytest.mark.parametrize(("name", "ranks", "micro_batches", "chunks"), GRID)
def test_every_schedule_runs_within_its_memory(name, ranks, micro_batches, chunks):
    schedule = build_schedule(name, ranks, micro_batches, chunks)
    validate(schedule, most_kept=most_allowed(name, ranks, micro_batches, chunks))
    assert max(simulate(schedule).peak_activations) <= most_allowed(name, ranks, micro_batches, chunks)


# Zero Bubble Pipeline Parallelism, arXiv 2401.10241: times of table 9, ms, and rates of table 5 (1F1B, ZB-H1, ZB-H2)
PUBLISHED = [
    (8, 24, 18.522, 18.086, 9.337, 0.601, 0.2431, 0.1585, 0.1083),
    (8, 32, 18.513, 18.086, 9.331, 0.626, 0.1985, 0.1242, 0.0837),
    (8, 64, 18.546, 18.097, 9.321, 0.762, 0.1240, 0.0674, 0.0444),
    (8, 24, 29.718, 29.444, 19.927, 0.527, 0.2347, 0.1323, 0.0698),
    (8, 32, 29.802, 29.428, 19.530, 0.577, 0.1898, 0.1045, 0.0559),
    (8, 64, 29.935, 29.621, 19.388, 0.535, 0.1091, 0.0554, 0.0294),
    (16, 48, 11.347, 11.248, 8.132, 0.377, 0.2552, 0.1397, 0.0672),
    (16, 64, 11.307, 11.254, 8.101, 0.379, 0.2082, 0.1088, 0.0516),
    (16, 128, 11.325, 11.308, 8.109, 0.378, 0.1251, 0.0576, 0.0266),
    (32, 96, 10.419, 10.207, 7.715, 0.408, 0.2646, 0.1421, 0.0641),
    (32, 128, 10.408, 10.204, 7.703, 0.408, 0.2168, 0.1106, 0.0490),
    (32, 256, 10.402, 10.248, 7.698, 0.460, 0.1352, 0.0594, 0.0257),
]


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: f"{row[0]}-{row[1]}")
def test_bubble_rates_are_the_published_ones(row):
    ranks, micro_batches, t_f, t_b, t_w, t_comm, *rates = row
    for name, rate in zip(("1f1b", "zb_h1", "zb_h2"), rates, strict=True):
        timeline = simulate(build_schedule(name, ranks, micro_batches), t_f=t_f, t_b=t_b, t_w=t_w, t_comm=t_comm)
        assert round(timeline.bubble_rate, 4) == rate, name


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 12), (8, 32)])
def test_bubbles_are_the_papers_formulas(p, m):
    """GPipe and 1F1B: (p-1)/m of the ideal time; interleaved: (p-1)/(v m); zero bubble with T_F = T_B = T_W."""
    for name, chunks, bubble in [
        ("gpipe", 1, (p - 1) / m),
        ("1f1b", 1, (p - 1) / m),
        ("interleaved", 2, (p - 1) / (2 * m)),
    ]:
        timeline = simulate(build_schedule(name, p, m, chunks), t_f=1 / chunks, t_b=1 / chunks, t_w=1 / chunks)
        assert timeline.makespan / timeline.work - 1 == pytest.approx(bubble)
    for t_w in (1.0, 0.5):
        assert bubble_time("zb_h1", p, m, 1.0, 1.0, t_w) == pytest.approx((p - 1) * (2 - t_w))
        assert bubble_time("zb_h2", p, m, 1.0, 1.0, t_w) == pytest.approx((p - 1) * (2 - 2 * t_w))


def bubble_time(name, p, m, t_f, t_b, t_w):
    timeline = simulate(build_schedule(name, p, m), t_f=t_f, t_b=t_b, t_w=t_w)
    return timeline.makespan - timeline.work


@pytest.mark.parametrize("p", [2, 4, 8])
def test_dualpipe_v_has_its_authors_bubble(p):
    """(PP/2 - 1)(F&B + B - 3W) for PP = 2p stages: T_F = T_W = 1, T_I = 1, an overlap as long as its parts."""
    schedule = build_schedule("dualpipe_v", p, 4 * p, 2)
    timeline = simulate(schedule)
    assert timeline.makespan - timeline.work == pytest.approx((p - 1) * (3 + 2 - 3 * 1))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_pipedream_is_as_stale_as_its_paper_says(ranks):
    """Forward of m meets the weights of version m - (ranks - 1 - rank), and its gradient updates version m."""
    for rank, actions in enumerate(build_schedule("pipedream", ranks, 12).compute):
        updates, met = 0, {}
        for action in actions:
            if action.kind == "F":
                met[action.micro_batch] = updates
            if action.kind == "U":
                assert updates == action.micro_batch
                assert updates - met[updates] == staleness(rank, ranks, updates) == min(ranks - 1 - rank, updates)
                updates += 1


def test_updates_take_no_time_and_follow_their_backward():
    stale, flushed = (simulate(build_schedule(name, 4, 8)) for name in ("pipedream", "1f1b"))
    assert stale.makespan == flushed.makespan
    assert stale.work == flushed.work
    early = Schedule("by hand", 1, 1, 1, (tuple(Action(kind, 0) for kind in "FUB"),))
    with pytest.raises(ValueError, match="waits for another"):
        validate(early)


def test_those_that_a_step_ends_with_are_listed():
    assert all(build_schedule(name, 2, 4, chunks_of(name)).name == name for name in SCHEDULES)


def chunks_of(name):
    return 2 if name in ("interleaved", "dualpipe_v") else 1


def torch_order(name, p, m, v):
    """torch.distributed.pipelining's order of computations, as our actions."""
    from torch.distributed.pipelining import schedules as theirs

    kinds = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}

    def action(a):
        return Action(kinds[a.computation_type.name], a.microbatch_index, a.stage_index // p)

    class Stage:
        """As much of a stage as a schedule asks for before it runs."""

        def __init__(self, index):
            self.stage_index, self.num_stages, self.group_size, self.group_rank = index, p * v, p, 0
            self.is_first, self.is_last, self.has_backward, self.submod = index == 0, index == p * v - 1, True, None
            self.group, self.device = None, "cpu"

        def __getattr__(self, name):
            return lambda *args, **kwargs: None

    cls = {"gpipe": theirs.ScheduleGPipe, "1f1b": theirs.Schedule1F1B, "interleaved": theirs.ScheduleInterleaved1F1B}[
        name
    ]
    if v == 1:
        order = {}
        for rank in range(p):
            schedule = cls(Stage(rank), m, loss_fn=lambda *_: None)
            order |= {rank: schedule._get_pipeline_order()[rank]}
    else:
        order = cls([Stage(chunk * p) for chunk in range(v)], m, loss_fn=lambda *_: None).pipeline_order
    return [[action(a) for a in order[rank] if a is not None and a.computation_type.name in kinds] for rank in range(p)]


@pytest.mark.parametrize(("name", "p", "m", "v"), [("gpipe", 4, 6, 1), ("1f1b", 4, 6, 1), ("interleaved", 4, 8, 2)])
def test_the_order_is_torchs(name, p, m, v):
    ours = [list(actions) for actions in build_schedule(name, p, m, v).compute]
    theirs = torch_order(name, p, m, v)
    if name == "1f1b":  # torch 2.13's table counts the forwards of the last rank from 1, which its executor does not
        assert [a.kind for a in ours[-1]] == [a.kind for a in theirs[-1]]
        ours, theirs = ours[:-1], theirs[:-1]
    assert ours == theirs


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("2f2b", 2, 2), "use one of gpipe"),
        (("1f1b", 0, 2), "at least 1"),
        (("interleaved", 4, 6, 2), "multiple of ranks=4"),
        (("interleaved", 4, 8, 1), "use 2 or more"),
        (("dualpipe_v", 4, 7, 2), "at least 8 micro-batches"),
        (("1f1b", 4, 8, 2), "use interleaved"),
    ],
)
def test_what_cannot_be_scheduled_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        build_schedule(*arguments)


def schedule_of(*lists):
    return Schedule(
        "by hand", len(lists), 2, 1, tuple(tuple(Action(w[0], int(w[1])) for w in words.split()) for words in lists)
    )


def test_the_validator_sees_what_is_wrong():
    validate(schedule_of("F0 F1 B0 B1", "F0 B0 F1 B1"), most_kept=2)
    with pytest.raises(ValueError, match="every rank waits"):
        validate(schedule_of("F0 B0 F1 B1", "F0 F1 B1 B0"))
    with pytest.raises(ValueError, match="rank 1 does"):
        validate(schedule_of("F0 F1 B0 B1", "F0 B0 F1 B0"))
    with pytest.raises(ValueError, match="keeps the activations of 2"):
        validate(schedule_of("F0 F1 B0 B1", "F0 B0 F1 B1"), most_kept=1)


def test_crossed_messages_are_a_deadlock():
    """Both ranks send first: right if sends return at once, a deadlock where they wait for their receivers."""
    schedule = build_schedule("1f1b", 2, 3)
    rendezvous(schedule, schedule.actions)
    with pytest.raises(ValueError, match=r"deadlock: \{0: 'SEND F1.0 1', 1: 'SEND B0.0 0'\}"):
        rendezvous(schedule, messages_beside_work(schedule))
