import pytest
from hypothesis import given
from hypothesis import strategies as st

from farl.runtime.timing import Timeline, common, length, merged

intervals = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 10)).map(lambda x: (float(x[0]), float(x[0] + x[1]))), max_size=8
)


@given(intervals, intervals)
def test_lengths_equal_counting_unit_cells(a, b):
    cells_a = {i for s, e in a for i in range(int(s), int(e))}
    cells_b = {i for s, e in b for i in range(int(s), int(e))}
    assert length(a) == len(cells_a)
    assert common(a, b) == len(cells_a & cells_b)


def test_merged_joins_touching_and_nested_intervals():
    assert merged([(5, 6), (0, 2), (1, 3), (3, 4), (1.5, 1.6)]) == [(0, 4), (5, 6)]


def test_report_counts_from_first_update_to_last_and_leaves_evaluations_out():
    timeline = Timeline()
    timeline.train = [(10, 14), (20, 24)]
    timeline.generate = [(0, 12), (13, 22)]
    timeline.left_out = [(15, 19)]
    report = timeline.report()
    assert report.wall_s == 10
    assert report.train_s == 8
    assert report.generate_s == 2 + 2 + 3
    assert report.both_s == 2 + 1 + 2
    assert report.overlap_fraction == pytest.approx(0.5)
    assert report.step_ratio == pytest.approx(10 / 8)


def test_report_of_nothing():
    assert Timeline().report().step_ratio == 1.0
