import json

from hypothesis import given
from hypothesis import strategies as st

from tpukit.pods import report_step
from tpukit.records.reporting import MARK, ProcessReport, read_report, report_stop


def test_steps_are_told_where_somebody_listens(capfd, monkeypatch):
    report_step(1, 2.5)
    monkeypatch.setenv("TPUKIT_PROGRESS", "lines")
    report_step(2, 0.1)
    report_step(3, float("nan"))
    report_stop(3, "preempted")
    output = capfd.readouterr().out
    assert output.startswith('@tpukit {"step": 2, "loss": 0.1}\n')
    assert [read_report(line) for line in output.splitlines()] == [
        ProcessReport(2, 0.1),
        ProcessReport(3),
        ProcessReport(3, None, "preempted"),
    ]


@given(st.text() | st.text().map(lambda text: MARK + text))
def test_any_line_is_a_report_or_none(line):
    assert read_report(line) is None or json.loads(line[len(MARK) :])["step"] >= 0


leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
values = st.recursive(
    leaves, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=5
)


@given(st.dictionaries(st.sampled_from(["step", "loss", "stopped", "x"]), values))
def test_reports_hold_numbers_whatever_was_said(said):
    report = read_report(MARK + json.dumps(said))
    if report is not None:
        assert type(report.step) is int
        assert report.loss is None or abs(report.loss) < float("inf")
        assert isinstance(report.stopped, str)
