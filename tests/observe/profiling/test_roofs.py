"""Where the corner of a device's roofline comes from, the surest source first."""

import pytest

from tpukit.observe.profiling.judging import CPU_RIDGE, roof_of
from tpukit.observe.profiling.recording import DeviceTrack

H200 = {
    "compute_cap_major": 9,
    "compute_cap_minor": 0,
    "clock_rate": 1_830_000,
    "core_count": 132,
    "memory_bandwidth": 4_800_000_000_000,
}


@pytest.mark.parametrize(
    ("name", "kind", "properties", "ridge", "origin"),
    [
        # 918 TFLOP/s over 1640 GB/s; 459 over 2765.
        ("TPU:0", "TPU v6 lite", {}, 560, "datasheet"),
        ("TPU:0", "", {"device_type_string": "TPU v5p"}, 166, "datasheet"),
        # 989 TFLOP/s over 4.8 TB/s, NVIDIA's data sheet.
        ("GPU:0", "NVIDIA H200", H200, 206, "datasheet"),
        (
            "GPU:0",
            "",
            {"peak_teraflops_per_second": 300.0, "peak_hbm_bw_gigabytes_per_second": 2000.0},
            150,
            "datasheet",
        ),
        ("GPU:0", "", {"compute_cap_major": 42}, 200, "model"),
        ("TPU:0", "TPU v99", {}, 240, "model"),
        ("CPU:0", "cpu", {}, CPU_RIDGE, "model"),
    ],
)
def test_a_roof_by_its_source(name, kind, properties, ridge, origin):
    roof = roof_of(DeviceTrack(name, (), (), properties), kind)
    assert roof.matrix_ridge == pytest.approx(ridge, rel=0.01)
    assert roof.origin == origin
    assert roof.source


def test_an_op_is_bound_by_what_takes_longer():
    roof = roof_of(DeviceTrack("GPU:0", (), (), H200), "")
    assert roof.is_compute_bound(matrix_flops=207.0, vector_flops=0.0, moved=1.0)
    assert not roof.is_compute_bound(matrix_flops=205.0, vector_flops=0.0, moved=1.0)
    # 61.8 fp32 TFLOP/s over 4.8 TB/s at this clock.
    assert roof.is_compute_bound(matrix_flops=0.0, vector_flops=13.0, moved=1.0)
    assert not roof.is_compute_bound(matrix_flops=0.0, vector_flops=12.0, moved=1.0)
