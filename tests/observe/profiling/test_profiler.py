"""`TPUProfiler` and `profile_tpu_usage` in the shapes of documents 000 and 001, and misused."""

import json
import re
import threading

import jax
import jax.numpy as jnp
import pytest
from sample_report import PREDICTION, sample_report

from tpukit import TPUProfiler, profile_tpu_usage
from tpukit.errors import TPUValidationError
from tpukit.hardware.missing import Missing
from tpukit.observe.profiling.judging import KINDS
from tpukit.observe.profiling.profile import DeviceMemory, MemoryRecord
from tpukit.observe.profiling.tracing import folder_of


@pytest.fixture(scope="module")
def train_step():
    step = jax.jit(lambda params, batch: jnp.tanh(params @ batch).sum())
    params = batch = jnp.ones((128, 128))
    jax.block_until_ready(step(params, batch))
    return lambda: step(params, batch)


def test_document_000_runs_as_it_stands(train_step, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    params = batch = jnp.ones((64, 64))
    train_step = jax.jit(lambda params, batch: (params @ batch).sum())

    # Profiler TPU
    profiler = TPUProfiler(
        output_dir="profiles/",
        capture_memory=True,
        capture_compute=True
    )  # fmt: skip

    # Profile training step
    with profiler.profile("train_step"):
        loss = train_step(params, batch)

    # Generar reporte
    profiler.generate_report()

    # Analizar bottlenecks
    analysis = profiler.analyze_bottlenecks()

    print(f"Compute bound: {analysis['compute_bound']:.1%}")  # noqa: T201
    print(f"Memory bound: {analysis['memory_bound']:.1%}")  # noqa: T201
    print(f"Communication bound: {analysis['communication_bound']:.1%}")  # noqa: T201

    # Recomendaciones
    for recommendation in analysis['recommendations']:  # fmt: skip
        print(f"- {recommendation}")  # noqa: T201

    printed = capsys.readouterr().out
    assert re.findall(r"^(\w+) bound: \d+\.\d%$", printed, re.MULTILINE) == [
        *("Compute", "Memory", "Communication"),
    ]
    assert float(loss) == 64.0**3
    assert (tmp_path / "profiles/report.html").exists()
    # The step was compiled inside the block: that is left out of the shares, and said.
    assert analysis.compile_s > 0
    assert sum(analysis[f"{kind}_bound"] for kind in KINDS) == pytest.approx(1.0)
    assert any("compiling" in line for line in analysis["recommendations"])


def test_the_layout_is_that_of_tensorboard(train_step, tmp_path):
    profiler = TPUProfiler(tmp_path)
    for _ in range(2):  # in one second: neither replaces the other
        with profiler.profile("step"):
            train_step()
    sessions = sorted((tmp_path / "step/plugins/profile").iterdir())
    assert len(sessions) == 2
    for session in sessions:
        assert len(list(session.glob("*.xplane.pb"))) == 1
        assert (session / "memory.prof").stat().st_size
        assert json.loads((session / "tpukit_memory.json").read_text())["after"]
    assert len(profiler.profiles()) == 2


@pytest.mark.parametrize(
    "name", ["a/b", "../up", "", "  ", "x" * 300, "ünïcode ✓", "a#b=c,d", "a\nb", "\udcff", "."]
)
def test_any_name_is_safe_and_comes_back(train_step, tmp_path, name):
    profiler = TPUProfiler(tmp_path / "out", capture_memory=False)
    with profiler.profile(name):
        train_step()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    (only,) = profiler.profiles()
    expected = name.encode(errors="replace").decode()
    if name.strip():
        assert only.recording.label == expected
        assert profiler.analyze_bottlenecks(expected).label == expected


def test_names_that_look_alike_have_folders_of_their_own():
    names = ["a b", "a_b", "a/b", "a#b", "A_b"]
    assert len({folder_of(name) for name in names}) == len(names)


def test_a_second_profile_inside_is_refused_and_the_first_goes_on(train_step, tmp_path):
    profiler = TPUProfiler(tmp_path)
    with profiler.profile("outer"):
        with (
            pytest.raises(TPUValidationError, match=r"'inner' cannot begin: 'outer' is being"),
            profiler.profile("inner"),
        ):
            pass
        train_step()
    assert profiler.analyze_bottlenecks().label == "outer"


def test_a_second_thread_is_refused_too(train_step, tmp_path):
    refused = []

    def record():
        try:
            with TPUProfiler(tmp_path / "two").profile("second"):
                pass
        except TPUValidationError as error:
            refused.append(str(error))

    with TPUProfiler(tmp_path / "one").profile("first"):
        thread = threading.Thread(target=record)
        thread.start()
        thread.join()
        train_step()
    assert "one at a time" in refused[0]


def test_a_trace_of_somebody_else_is_named(train_step, tmp_path):
    with jax.profiler.trace(str(tmp_path / "theirs")):
        with (
            pytest.raises(TPUValidationError, match="end the other trace"),
            TPUProfiler(tmp_path / "ours").profile("mine"),
        ):
            pass
        train_step()
    with TPUProfiler(tmp_path / "ours").profile("mine"):
        train_step()


def test_an_error_in_the_block_ends_the_trace(train_step, tmp_path):
    profiler = TPUProfiler(tmp_path)

    def failing():
        with profiler.profile("fails"):
            train_step()
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        failing()
    with profiler.profile("goes on"):
        train_step()
    assert profiler.analyze_bottlenecks().label == "goes on"


def test_memory_alone_records_no_trace(train_step, tmp_path):
    profiler = TPUProfiler(tmp_path, capture_compute=False)
    with profiler.profile("memory only"):
        train_step()
    assert not list(tmp_path.rglob("*.xplane.pb"))
    assert list(tmp_path.rglob("memory.prof"))
    with pytest.raises(TPUValidationError, match="contains no profile"):
        profiler.analyze_bottlenecks()
    with pytest.raises(TPUValidationError, match="nothing to record"):
        TPUProfiler(tmp_path, capture_memory=False, capture_compute=False)


def test_a_folder_that_cannot_be_written_is_an_error_before_the_work(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(TPUValidationError), TPUProfiler(tmp_path / "file").profile("x"):
        pytest.fail("the block ran")


def test_an_unknown_recording_names_the_known(recorded):
    with pytest.raises(TPUValidationError, match=r"no recording is called 'x'.*compute step"):
        recorded("compute").analyze_bottlenecks("x")


@pytest.mark.parametrize("given", ["report", "file", "prediction"])
def test_when_nothing_ran_the_timeline_of_the_compiler_speaks(tmp_path, given):
    (tmp_path / "check.json").write_text(json.dumps(sample_report()))
    predicted = {
        "report": sample_report(),
        "file": tmp_path / "check.json",
        "prediction": PREDICTION,
    }[given]
    profiler = TPUProfiler(tmp_path / "none", predicted=predicted)
    analysis = profiler.analyze_bottlenecks()
    assert analysis.origin == "model"
    # 60 ms of products, 20 of HBM, 20 of ICI.
    assert analysis["compute_bound"] == pytest.approx(0.6)
    assert analysis["memory_bound"] == pytest.approx(0.2)
    assert analysis["communication_bound"] == pytest.approx(0.2)
    assert analysis["input_bound"] == analysis["overhead_bound"] == 0.0
    assert any("wait for each other 20% of 100 ms (model)" in line
               for line in analysis["recommendations"])  # fmt: skip
    assert profiler.generate_report().exists()


def test_what_is_no_prediction_is_refused(tmp_path):
    with pytest.raises(TPUValidationError, match="int is no predicted step"):
        TPUProfiler(tmp_path, predicted=3)
    with pytest.raises(TPUValidationError, match="predicts no step"):
        TPUProfiler(tmp_path, predicted={**sample_report(), "prediction": None})
    with pytest.raises(TPUValidationError, match=r"contains no profile|does not exist"):
        TPUProfiler(tmp_path / "nothing").analyze_bottlenecks()


def test_usage_of_document_001(train_step):
    usage = profile_tpu_usage(lambda: [train_step() for _ in range(20)])
    assert set(usage) == {
        *("memory_allocated", "memory_peak", "device_count", "device_utilization"),
    }
    assert usage["device_count"] == 8
    assert 0.0 < usage["device_utilization"] <= 1 / 8  # one of eight devices worked
    # A CPU device reports no memory: a dash that says why, and null in JSON.
    assert f"{usage['memory_peak']:.1f}" == "–"
    assert "no memory of cpu" in usage["memory_allocated"].reason
    assert usage.to_dict()["memory_allocated"] is None
    with pytest.raises(KeyError):
        usage["nothing"]


def test_usage_while_nothing_runs_and_while_a_trace_does(tmp_path):
    assert profile_tpu_usage(seconds=0.05)["device_utilization"] == 0.0
    with pytest.raises(TPUValidationError, match="is not valid"):
        profile_tpu_usage(seconds=0)
    with TPUProfiler(tmp_path).profile("other"):
        busy = profile_tpu_usage(seconds=0.01)["device_utilization"]
    assert isinstance(busy, Missing)
    assert "is being recorded" in busy.reason


def test_memory_of_devices_that_report_it(tmp_path):
    devices = tuple(DeviceMemory(f"TPU:{i}", 2**30, 2**31, 2**35) for i in range(2))
    record = MemoryRecord(devices, devices)
    assert MemoryRecord.from_dict(json.loads(json.dumps(record.to_dict()))) == record


def test_the_hook_of_a_run_leaves_what_can_be_read(train_step, tmp_path):
    from tpukit.observe.profiling.profile import read_newest
    from tpukit.records.hooks import SKIPPED, TRACED, ProfileHook

    hook = ProfileHook()
    hook.on_start(tmp_path / "run", {})
    for step in range(SKIPPED + TRACED + 2):
        jax.block_until_ready(train_step())
        hook.on_record({"step": step})
    hook.on_end(None)
    profile = read_newest(tmp_path / "run")
    assert sum(profile.analysis.shares.values()) == pytest.approx(1.0)
    assert profile.step.steps == TRACED
    assert profile.recording.label == "run"
    assert profile.recording.device_kind == "cpu"


def test_steps_are_counted_by_their_own_program_where_others_have_its_name(train_step, tmp_path):
    """Functions without a name of their own make programs of one name."""
    from tpukit.observe.profiling.profile import read_newest
    from tpukit.records.hooks import SKIPPED, TRACED, ProfileHook

    vector = jnp.ones(8)
    others = [jax.jit(lambda x, by=by: jnp.sin(x) + by) for by in range(3)]
    for other in others:
        other(vector).block_until_ready()
    hook = ProfileHook()
    hook.on_start(tmp_path / "run", {})
    for step in range(SKIPPED + TRACED + 2):
        for other in others if step == SKIPPED else ():
            other(vector).block_until_ready()
        jax.block_until_ready(train_step())
        hook.on_record({"step": step})
    hook.on_end(None)
    assert read_newest(tmp_path / "run").step.steps == TRACED
