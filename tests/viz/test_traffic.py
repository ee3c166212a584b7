"""The traffic picture counts what events measured, once, and says what is modelled."""

import pytest

from deepseek_lab.parallel.meter import Event, Trace
from deepseek_lab.viz import theme, traffic


def event(op, rank, peer, payload, wire, within=None, group=(0, 1, 2, 3)):
    return Event(op, group, rank, peer, payload, wire, 0.0, 0.001, within)


MESSAGES = [
    Trace([event("exchange", 0, 1, 10, 10), event("exchange", 0, 1, 5, 5), event("send", 0, 3, 7, 7)]),
    Trace([event("recv", 1, 0, 10, 0)]),
    Trace([event("exchange", 2, 3, 8, 8, "all_reduce"), event("all_reduce", 2, None, 8, 8)]),
    Trace([event("all_reduce", 3, None, 400, None), event("barrier", 3, None, 0, None)]),
]


def test_matrix_counts_every_sent_byte_once():
    expected = [[0, 15, 0, 7], [0, 0, 0, 0], [0, 0, 0, 8], [0, 0, 0, 0]]
    assert traffic.traffic_matrix(MESSAGES, 4) == expected


def test_modelled_matrix_holds_only_what_could_not_be_measured():
    modelled = traffic.modelled_matrix(MESSAGES, 4)
    assert modelled[3] == [600, 0, 0, 0]  # 2 · 3/4 · 400 bytes, to the right neighbour of rank 3
    assert sum(map(sum, modelled)) == 600


def test_modelled_matrix_follows_the_ring_of_the_group():
    gather = Trace([event("all_gather", 3, None, 100, None, group=(1, 3, 5))])
    scatter = Trace([event("reduce_scatter", 5, None, 300, None, group=(1, 3, 5))])
    modelled = traffic.modelled_matrix([gather, scatter], 6)
    assert modelled[3][5] == 200
    assert modelled[5][1] == pytest.approx(200)


def test_table_has_a_row_per_operation():
    rows = {row[0]: row[1:] for row in traffic.traffic_table(MESSAGES)}
    assert rows["exchange"] == ("2", "15 B", "15 B", "2.0")
    assert rows["all_reduce › exchange"] == ("1", "8 B", "8 B", "1.0")
    assert rows["all_reduce"][1:3] == ("400 B", "8 B")  # the largest of any rank
    assert rows["barrier"] == ("1", "–", "not seen", "1.0")


@pytest.mark.parametrize(
    "traces", [MESSAGES, MESSAGES[:2], MESSAGES[3:], [Trace(), Trace()], [None, MESSAGES[1], None]]
)
def test_picture_is_drawn_for_any_traces(traces):
    figure = traffic.draw_traffic(traces)
    titles = [ax.get_title() for ax in figure.axes]
    assert any(t.startswith("modelled") for t in titles) == (MESSAGES[3] in traces)
    assert theme.png(figure).startswith(b"\x89PNG")


def test_bytes_are_written_for_a_person():
    assert [traffic.n_bytes(n) for n in (0, 1023, 1536, 3 * 2**20, 2**31)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "3 MiB",
        "2 GiB",
    ]


def test_a_cell_is_filled_only_where_something_was_sent():
    figure = traffic.draw_traffic([Trace([event("send", r, (r + 1) % 4, 9, 9)]) for r in range(4)])
    opaque = figure.axes[0].images[0].get_array()[..., 3]
    assert (opaque > 0).tolist() == [[receiver == (sender + 1) % 4 for receiver in range(4)] for sender in range(4)]
