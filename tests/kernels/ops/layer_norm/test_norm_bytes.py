"""The compiled norm reads each row once and writes it once; what XLA makes of it does not."""

import pytest

from tpukit.compiler.timeline.machine import work_of
from tpukit.kernels.ops.rms_norm.api import OP, case
from tpukit.kernels.timing.profile import profile_kernel

CASE = case(2048, 2048)
FLOOR = 2 * CASE.arguments[0].size * CASE.arguments[0].dtype.itemsize


def moved_bytes(implementation):
    profile = profile_kernel(OP.implementations[implementation], CASE.arguments, "v5e")
    assert not profile.reasons
    module = profile.compiled.module
    return sum(
        profile.calls[one.name].hbm_bytes
        if one.name in profile.calls
        else work_of(one, module.entry, module).hbm_bytes
        for one in module.entry
    )


@pytest.mark.libtpu
@pytest.mark.xdist_group("libtpu")
def test_one_read_and_one_write():
    assert FLOOR <= moved_bytes("pallas_tpu") <= 1.1 * FLOOR
    assert moved_bytes("reference") > 1.4 * FLOOR
