from hypothesis import given
from hypothesis import strategies as st

from farl.runtime.timing import Timeline, common, length

intervals = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 10)).map(lambda x: (float(x[0]), float(x[0] + x[1]))), max_size=8
)


@given(intervals, intervals)
def test_lengths_equal_counting_unit_cells(a, b):
    cells_a = {i for s, e in a for i in range(int(s), int(e))}
    cells_b = {i for s, e in b for i in range(int(s), int(e))}
    assert length(a) == len(cells_a)
    assert common(a, b) == len(cells_a & cells_b)


def test_report_by_hand():
    timeline = Timeline()
    timeline.train = [(0, 4), (6, 10)]
    timeline.generate = [(2, 7), (9, 14)]
    report = timeline.report(0, 12)
    assert (report.train_s, report.generate_s, report.both_s) == (8, 8, 4)
    assert report.overlap_fraction == 4 / 12
    assert report.step_ratio == 12 / 8
