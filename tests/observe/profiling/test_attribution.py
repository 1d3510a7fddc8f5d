"""Recordings made by hand, as TPUs and GPUs write them: every share is reckoned by hand."""

import pytest
from jaxlib import _hlo
from xplanes import Event, Plane, xspace

from tpukit.observe.profiling.analysis import analyze
from tpukit.observe.profiling.attribution import attribute
from tpukit.observe.profiling.profile import read_profile
from tpukit.observe.profiling.reading import read_recording

PROGRAM = """HloModule jit_step, is_scheduled=true

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %s = f32[] add(%x, %y)
}

%fused (p: f32[4096,4096], q: f32[4096,4096]) -> f32[4096,4096] {
  %p = f32[4096,4096]{1,0} parameter(0)
  %q = f32[4096,4096]{1,0} parameter(1)
  ROOT %d = f32[4096,4096]{1,0} dot(%p, %q), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (a: f32[4096,4096]) -> f32[4096,4096] {
  %a = f32[4096,4096]{1,0} parameter(0)
  %fusion.1 = f32[4096,4096]{1,0} fusion(%a, %a), kind=kOutput, calls=%fused, metadata={op_name="jit(step)/layer/dot" source_file="model.py" source_line=7}
  %multiply.2 = f32[4096,4096]{1,0} multiply(%fusion.1, %a), metadata={op_name="jit(step)/layer/mul" source_file="model.py" source_line=9}
  %all-reduce.3 = f32[4096,4096]{1,0} all-reduce(%multiply.2), replica_groups={}, to_apply=%add, metadata={op_name="jit(step)/psum" source_file="train.py" source_line=3}
  ROOT %copy.4 = f32[4096,4096]{1,0} copy(%all-reduce.3)
}
"""  # noqa: E501
HLO = _hlo.hlo_module_from_text(PROGRAM).as_serialized_hlo_module_proto()
METADATA = Plane("/host:metadata", programs={"jit_step(7)": HLO})


def saved(tmp_path, *planes):
    path = tmp_path / "host.xplane.pb"
    path.write_bytes(xspace(*planes))
    return path


def tpu_op(name, start, duration):
    return Event(f"%{name} = f32[4096,4096]{{1,0}} op(...)", start, duration)


@pytest.fixture
def tpu(tmp_path):
    """Two runs of 100 us, 50 us apart, on one TPU; the block lasts from 0 to 300 us."""
    ops, modules = [], []
    for at in (0, 150):
        modules.append(Event("jit_step(7)", at, 100))
        ops += [
            tpu_op("fusion.1", at, 40),
            tpu_op("multiply.2", at + 40, 20),
            tpu_op("all-reduce.3", at + 60, 30),  # 10 us to the end of the run: nothing runs
        ]
    device = Plane(
        "/device:TPU:0",
        {"XLA Modules": modules, "XLA Ops": ops,
         "Async XLA Ops": [Event("%copy-start.9 = f32[8] copy-start(...)", 40, 60)]},
        {"device_type_string": "TPU v6 lite"},
    )  # fmt: skip
    host = Plane(
        "/host:CPU",
        {"python": [
            Event("tpukit.profile", 0, 300, {"label": "by hand", "device_kind": "TPU v6 lite"}),
            Event("$loader.py:12 next_batch", 100, 48),
            Event("PjitFunction(step)", 148, 4),
            Event("backend_compile_and_load", 260, 30),
            Event("BufferFromHostBuffer", 290, 10),
        ]},
    )  # fmt: skip
    return saved(tmp_path, METADATA, device, host)


def test_every_microsecond_of_a_tpu_has_one_kind(tpu):
    (times,) = attribute(read_recording(tpu))
    (device,) = times.devices
    micro = {kind: round(1e6 * seconds, 6) for kind, seconds in device.seconds.items()}
    assert micro == {
        "compute": 80,
        "memory": 40 + 10,  # of the first run's rest, the copy beside it covers 10 us
        "communication": 60,
        # From 100 to 148 and 250 to 260 nothing happens, from 290 to 300 the host copies.
        "input": 48 + 10 + 10,
        # The second run's rest and the launch before it.
        "overhead": 10 + 2,
    }
    assert round(1e6 * device.compile_s, 6) == 30
    assert device.counted_s + device.compile_s == pytest.approx(300e-6)
    assert round(1e6 * device.copy_s, 6) == 10


def test_shares_names_and_lines_of_a_tpu(tpu):
    analysis = analyze(read_recording(tpu))
    assert analysis.label == "by hand"
    assert analysis.where == "1 x TPU v6 lite"
    assert analysis["compute_bound"] == pytest.approx(80 / 270)
    assert analysis.roof == "catalog: v6e (datasheet)"
    ops = {op.name: op for op in analysis.ops}
    assert ops["fusion.1"].flops == 2 * 4096**3
    assert ops["fusion.1"].source == "model.py:7"
    assert ops["all-reduce.3"].kind == "communication"
    assert "copy-start.9" not in ops  # it runs beside the core
    assert [(one.what, one.where) for one in analysis.findings.unfused] == [
        ("multiply.2 (multiply)", "model.py:9")
    ]
    assert analysis.findings.waits[0].where == "loader.py:12 next_batch"
    assert analysis.findings.transfers[0].what == "BufferFromHostBuffer"


def test_a_step_is_one_run_of_the_main_program(tpu):
    step = read_profile(tpu).step
    assert step.steps == 2
    assert [span.name for span in step.spans if span.track == "core"] == [
        *("fusion.1", "multiply.2", "all-reduce.3"),
    ]
    assert {op.name: round(op.seconds * 1e6, 6) for op in step.ops} == {
        "fusion.1": 40, "multiply.2": 20, "all-reduce.3": 30,
    }  # fmt: skip


def kernel(name, start, duration, op="", **stats):
    about = {"hlo_op": op, "hlo_module": "jit_step", "program_id": 7} if op else {}
    return Event(name, start, duration, {**about, **stats})


@pytest.fixture
def gpu(tmp_path):
    """One step on a GPU: products on one stream, NCCL on another, half of it hidden."""
    device = Plane(
        "/device:GPU:0",
        {
            "Stream #13(Compute)": [
                kernel("nvjet_sm90_tst_128x64", 0, 50, "fusion.1"),
                kernel("multiply_2", 50, 10, "command_buffer"),  # captured in a graph
                # Of the same graph, by a library: nothing but its name says what it is.
                kernel("sm90_xmma_gemm_bf16", 85, 5, "command_buffer"),
                kernel("loop_unknown_kernel", 90, 5),
            ],
            "Stream #14(Memcpy)": [kernel("MemcpyH2D", 95, 5)],
            "Stream #15(NCCL)": [kernel("ncclDevKernel_AllReduce_Sum_f32", 40, 40, "all-reduce.3")],
            # A viewer's line, which repeats the streams.
            "XLA Ops": [kernel("fusion.1", 0, 50, "fusion.1")],
        },
        {"compute_cap_major": 9, "compute_cap_minor": 0, "clock_rate": 1_830_000,
         "core_count": 132, "memory_bandwidth": 4_800_000_000_000},
    )  # fmt: skip
    return saved(tmp_path, METADATA, device, Plane("/host:CPU"))


def test_a_gpu_counts_what_nothing_hides(gpu):
    (times,) = attribute(read_recording(gpu))
    (device,) = times.devices
    micro = {kind: round(1e6 * seconds, 6) for kind, seconds in device.seconds.items()}
    assert micro == {
        "compute": 50 + 5,
        "memory": 10 + 5,
        "communication": 20,  # from 60 to 80
        "input": 5 + 5,  # nothing from 80 to 85, the copy at the end
        "overhead": 0,
    }
    assert times.roof.source.startswith("driver: compute capability 9.0")
    # 989 TFLOP/s over 4.8 TB/s.
    assert times.roof.matrix_ridge == pytest.approx(206, rel=0.01)
    judged = {op.name: op.judged.by for op in times.ops}
    assert judged["fusion.1"] == judged["multiply.2"] == "intensity"
    assert judged["loop_unknown_kernel"] == judged["sm90_xmma_gemm_bf16"] == "name"


def test_nccl_and_copies_have_rows_of_their_own(gpu):
    tracks = {span.name: span.track for span in read_profile(gpu).step.spans}
    assert tracks["fusion.1"] == "core"
    assert tracks["all-reduce.3"] == "ici"


def test_ops_of_an_unrecorded_program_are_judged_by_their_text(tmp_path):
    device = Plane(
        "/device:TPU:0",
        {"XLA Ops": [
            Event("%convolution.1 = bf16[8,8]{1,0} convolution(%a, %b)", 0, 10),
            Event("%all-gather-done.2 = bf16[8]{0} all-gather-done(%x)", 10, 10),
            Event("%while.3 = (s32[], f32[8]) while(%t), body=%b", 20, 20),
            Event("%add.4 = f32[8]{0} add(%a, %b)", 20, 5),
        ]},
    )  # fmt: skip
    analysis = analyze(read_recording(saved(tmp_path, device)))
    shares = {kind: round(40 * share) for kind, share in analysis.shares.items()}
    assert shares == {
        "compute": 10, "memory": 5, "communication": 10, "input": 0, "overhead": 15,
    }  # fmt: skip
    assert any("no recorded program" in note for note in analysis.notes)
    assert any("without TPUProfiler" in note for note in analysis.notes)


def test_annotated_steps_are_the_window_without_a_block(tmp_path):
    ops = [tpu_op("fusion.1", at, 10) for at in (0, 20, 40)]
    modules = [Event("jit_step(7)", at, 10) for at in (0, 20, 40)]
    device = Plane("/device:TPU:0", {"XLA Ops": ops, "XLA Modules": modules})
    host = Plane(
        "/host:CPU",
        {"python": [Event("train", at, 20, {"step_num": at // 20}) for at in (20, 40)]},
    )
    recording = read_recording(saved(tmp_path, METADATA, device, host))
    assert recording.duration_s == pytest.approx(40e-6)
    assert recording.hosts[0].steps == 2
    assert analyze(recording)["compute_bound"] == pytest.approx(0.5)


def test_all_hosts_of_a_recording_count(tmp_path):
    """Two hosts with a device each: one computes all the time, one half of it."""
    modules, window = [Event("jit_step(7)", 0, 100)], {"label": "two", "device_kind": "TPU v6 lite"}
    for name, busy in (("a", 100), ("b", 50)):
        lines = {"XLA Modules": modules, "XLA Ops": [tpu_op("fusion.1", 0, busy)]}
        host = Plane("/host:CPU", {"python": [Event("tpukit.profile", 0, 100, window)]})
        content = xspace(METADATA, Plane("/device:TPU:0", lines), host)
        (tmp_path / f"{name}.xplane.pb").write_bytes(content)
    analysis = analyze(read_recording(tmp_path))
    assert analysis.devices == 2
    assert analysis.where == "2 x TPU v6 lite"
    assert analysis["compute_bound"] == pytest.approx(0.75)
    assert analysis["overhead_bound"] == pytest.approx(0.25)


def test_ids_with_and_without_a_sign_are_one_program(tmp_path):
    """A fingerprint above 2**63 is negative in some events."""
    number = 2**64 - 5
    plane = Plane("/host:metadata", programs={f"jit_step({number})": HLO})
    about = {"hlo_op": "fusion.1", "hlo_module": "renamed", "program_id": -5}
    device = Plane("/device:GPU:0", {"Stream #1": [Event("k", 0, 10, about)]})
    (times,) = attribute(read_recording(saved(tmp_path, plane, device)))
    assert times.ops[0].judged.by == "intensity"
