"""The page: what it says, that nothing in it can break out, and how it looks in a browser."""

import json

import pytest
from page_reader import PageReader
from sample_report import sample_report
from xplanes import Event, Plane, xspace

from tpukit.observe import TPUProfiler
from tpukit.observe.profiling.page import PageContent, render_page, step_traces, write_page
from tpukit.observe.profiling.profile import read_profile
from tpukit.observe.profiling.steps import predicted_step
from tpukit.observe.profiling.xprof import XprofFigures, xprof_figures


@pytest.fixture(scope="module")
def written(recorded, tmp_path_factory):
    profiler = recorded("communication")
    folder = tmp_path_factory.mktemp("page")
    return write_page(profiler.profiles(), predicted_step(sample_report()), folder / "report.html")


def test_the_page_says_what_the_analysis_says(recorded, written):
    analysis = recorded("communication").analyze_bottlenecks()
    page = PageReader(written.read_text())
    for kind, share in analysis.shares.items():
        assert f"{kind} {share:.1%}" in page.text
    assert "communication step on 8 x cpu" in page.text
    assert "model against a measurement on another device" in page.text
    assert "benchmarks/bound_programs.py:" in page.text
    for line in analysis.recommendations:
        assert " ".join(line.split()) in page.text
    assert "XProf supports TPUs and GPUs, and this ran on a CPU" in page.text
    assert "jax reports no memory of cpu devices" in page.text


def test_the_page_needs_nothing_else(written):
    page = PageReader(written.read_text())
    assert page.policy["default-src"] == {"'none'"}
    assert page.policy["script-src"] == page.digests("script")
    assert page.policy["style-src"] == page.digests("style")


def test_both_steps_have_the_same_lanes(written):
    page = PageReader(written.read_text())
    labels = [attrs["aria-label"] for tag, attrs in page.elements
              if tag == "svg" and attrs.get("class") == "lane"]  # fmt: skip
    measured = {one.split(", ", 1)[1].split(":")[0] for one in labels if one.startswith("measured")}
    predicted = {one.split(", ", 1)[1].split(":")[0]
                 for one in labels if one.startswith("predicted")}  # fmt: skip
    assert "Core (MXU and VPU)" in measured & predicted


def test_json_beside_it_holds_the_same(recorded, written):
    data = json.loads(written.with_suffix(".json").read_text())
    analysis = recorded("communication").analyze_bottlenecks()
    assert data["analysis"]["communication_bound"] == analysis["communication_bound"]
    assert data["comparison"]["is_same_hardware"] is False
    assert data["predicted"]["compute_bound"] == pytest.approx(0.6)


def test_without_a_prediction_there_is_no_second_lane(recorded, tmp_path):
    path = recorded("input").generate_report(tmp_path / "own name.html")
    page = PageReader(path.read_text())
    assert "Predicted and measured" not in page.text
    assert "next_batch" in page.text
    assert path.with_suffix(".pftrace").exists()


def hostile(tmp_path, attack):
    """A recording in which every name is an attack."""
    op = Event(attack, 10, 20, {"hlo_op": attack, "hlo_module": attack})
    host = Plane("/host:CPU", {"python": [
        Event("tpukit.profile", 0, 100, {"label": "a%3Cb%3E", "device_kind": "NVIDIA X"}),
        Event(f"${attack}.py:1 {attack}", 40, 50)]})  # fmt: skip
    path = tmp_path / "hostile.xplane.pb"
    path.write_bytes(xspace(Plane("/device:GPU:0", {"Stream #1": [op]}), host))
    return read_profile(path)


def test_no_name_in_a_file_breaks_out_of_the_page(tmp_path):
    attack = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'"
    calm = PageReader(render_page(PageContent([hostile(tmp_path, "plain")], None, XprofFigures())))
    text = render_page(PageContent([hostile(tmp_path, attack)], None, XprofFigures()))
    page = PageReader(text)
    assert page.structure == calm.structure
    assert "<img src=x" in page.text
    assert page.policy["script-src"] == page.digests("script")


def test_xprof_is_asked_where_it_has_something_to_say(tmp_path):
    pytest.importorskip("xprof")
    # 60 us of ops in 100 us.
    module, ops = Event("jit_f(1)", 0, 100), [Event("%add.1 = f32[8] add(%a)", 0, 60)]
    path = tmp_path / "host.xplane.pb"
    lines = {"XLA Modules": [module], "XLA Ops": ops}
    path.write_bytes(xspace(Plane("/device:TPU:0", lines)))
    figures = xprof_figures(read_profile(path).recording)
    assert figures.reason == ""
    assert "%" in figures.figures["device duty cycle"]
    assert [one.name for one in tmp_path.iterdir()] == ["host.xplane.pb"]  # nothing beside it


def test_without_xprof_the_extra_is_named(tmp_path, monkeypatch):
    from tpukit.observe.profiling import xprof as module

    monkeypatch.setattr(module, "find_spec", lambda name: None)
    reason = xprof_figures(hostile(tmp_path, "fusion").recording).reason
    assert "tpukit[profile]" in reason


def test_traces_leave_out_what_is_not_there(recorded):
    profile = recorded("compute").profiles()[-1]
    assert [trace.origin for trace in step_traces(profile, None)] == ["measured"]
    assert [trace.origin for trace in step_traces(None, predicted_step(sample_report()))] == [
        "model"
    ]


@pytest.mark.browser
@pytest.mark.xdist_group("browser")
@pytest.mark.parametrize("width", [1400, 500])
@pytest.mark.parametrize("dark", [False, True])
def test_in_a_browser(browser, written, width, dark):
    browser.open(written, width=width, dark=dark)
    assert browser.requests == []
    assert browser.complaints == []
    assert browser.run("document.documentElement.scrollWidth") <= width
    assert browser.run("document.querySelectorAll('.lane rect').length") > 10


def test_a_report_of_nothing_says_so(tmp_path):
    from tpukit.errors import TPUValidationError

    with pytest.raises(TPUValidationError, match=r"does not exist|contains no profile"):
        TPUProfiler(tmp_path / "none").generate_report()
