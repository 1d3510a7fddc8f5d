"""Speed on a chip that is not here: an estimate with its origin, or the reason there is none."""

import pytest

from tpukit.quantization.measures.speed import estimated_speedup


def test_formats_without_a_kernel_have_no_speed():
    found = estimated_speedup([((256, 256), "trellis2:256")], "v6e")
    assert found.value is None
    assert "decoded first" in found.reason
    assert estimated_speedup([], "v6e").value is None


@pytest.mark.slow
def test_few_bits_are_read_faster_than_many_where_there_are_many():
    shape, said = (4096, 4096), []
    found = estimated_speedup([(shape, "int4"), (shape, "skip")], "v6e", progress=said.append)
    assert found.origin == "model"
    assert "run through by bundles" in found.source
    assert 1.1 < found.value < 4
    assert said == ["int4 4096×4096 on v6e", "skip 4096×4096 on v6e"]
    # Of a small matrix the kernel's beginning takes longer than the bytes it saves.
    assert estimated_speedup([((1024, 2048), "int4")], "v6e").value < 1
