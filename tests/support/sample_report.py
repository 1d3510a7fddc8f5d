"""What a check of a training step gives, with every part, small enough to reckon by hand."""

from tpukit.checker.report.build import roofs_of
from tpukit.checker.report.schema import SCHEMA
from tpukit.compiler.memory import ArgumentFinding, Buffer, MemoryReport, Peak
from tpukit.compiler.timeline import StepPrediction, TrackSpan
from tpukit.hardware import Figure, Slice

MEMORY = MemoryReport(
    program="tiny",
    slice=Slice.parse("v6e-8"),
    fits=True,
    total_bytes=3 * 2**30,
    usable_bytes=33_554_432_000,
    host_bytes=2**20,
    argument_bytes=2**30,
    temp_bytes=2 * 2**30,
    result_bytes=0,
    alias_bytes=2**30,
    purposes={"parameters": 2**30, "activations": 2**30, "temporaries": 2**30},
    buffers=tuple(
        Buffer("activations", f"bf16[{size},128]", "{1,0:T(8,128)(2,1)}", size * 256, 256, "HBM",
               "jvp()/while/body/dot_general", f"model.py:{size}", True)
        for size in range(40, 0, -1)
    ),
    peak=Peak(2, "fusion.2", "jvp()/while/body/dot_general", "model.py:40"),
    curve=((0, 2**30), (1, 2 * 2**30), (2, 3 * 2**30), (3, 2**30)),
    schedule_length=4,
    findings=(ArgumentFinding("not donated", "[0].params['w'] f32[8]", 2**20, "donate it."),),
)  # fmt: skip
# A loop of four turns whose body is shown once, two copies side by side, a collective waited for.
SPANS = (
    TrackSpan("core", "embed", 0.0, 0.010, "hbm", "jit(f)/embed", 0.0, 1e9, 1),
    TrackSpan("core", "while.1", 0.010, 0.080, "loop", "jit(f)/while", 0.0, 0.0, 1),
    TrackSpan(
        "core", "fusion.2", 0.010, 0.015, "matrix", "jit(f)/while/body/dot_general", 8e12, 1e9, 4
    ),
    TrackSpan(
        "core", "all-gather-done.3", 0.025, 0.005, "ici", "jit(f)/while/body/gather", times=4
    ),
    TrackSpan(
        "ici", "all-gather-start.3", 0.010, 0.020, "ici", "jit(f)/while/body/gather", 0, 2e8, 4
    ),
    TrackSpan("hbm", "copy-start.4", 0.010, 0.004, "hbm", "", 0.0, 6e9, 4),
    TrackSpan("hbm", "copy-start.5", 0.012, 0.004, "hbm", "", 0.0, 6e9, 4),
    TrackSpan("core", "adam", 0.090, 0.010, "hbm", "jit(f)/optimizer/mul", 1e9, 12e9, 1),
)
PREDICTION = StepPrediction(
    slice=Slice.parse("v6e-8"),
    step_time_s=0.100,
    low_s=0.090,
    high_s=0.112,
    seconds_by_cause={"matrix": 0.060, "hbm": 0.020, "ici": 0.020},
    transfer_s={"ici": 0.080},
    hardware_flops=Figure(3.2e13, "FLOP", "compiler", "the program"),
    spans=SPANS,
    tokens_per_step=16_384,
    model_flops=2.2032e14,
)


def sample_report():
    """A new report, for a test to change."""
    return {
        "schema": SCHEMA,
        "verdict": "fits",
        "program": "tiny",
        "job": {"model": "tiny", "on": "v6e-8", "batch_size": 8, "options": {}},
        "slice": Slice.parse("v6e-8").to_dict(),
        "chip": roofs_of(Slice.parse("v6e-8")),
        "memory": MEMORY.to_dict(),
        "live_memory": [[0.0, 2.0**30], [0.010, 3.0 * 2**30], [0.090, 2.0**30]],
        "prediction": PREDICTION.to_dict(),
        "no_prediction": "",
        "spans": [span.to_dict() for span in SPANS],
        "collectives": [
            {
                "kind": "all-gather",
                "group_size": 8,
                "bytes": 200_000_000,
                "times": 4,
                "seconds": 0.080,
                "exposed_s": 0.020,
                "op_name": "jit(f)/while/body/gather",
            }
        ],
        "compile": {"compile_s": {"value": 7.5, "origin": "measured"}, "from_cache": False},
        "operations": {"fusions": 120, "kernels": 2, "loops": 1, "copies": 14},
        "versions": {"jax": "0.10.2", "libtpu": "0.0.42.1"},
        "options": {"xla_tpu_x": True},
        "fixes": [
            {
                "changes": {"remat": "full"},
                "cost": "recomputes each layer",
                "estimate": {"value": 2**31, "origin": "model", "reason": ""},
                "verified": {"value": None, "origin": "compiler"},
                "fits": None,
                "failure": "",
            }
        ],
        "next": "tpukit train tiny.yaml",
    }
