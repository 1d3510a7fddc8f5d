"""The compiler's own errors as a user is shown them; the texts are those that it wrote."""

import pytest

from tpukit.compiler.aot import explain_failure, ran_out_of_hbm
from tpukit.errors import FlagError, TPUOutOfMemoryError, XLACompilationError
from tpukit.hardware import Slice
from tpukit.runtime.child import ChildError

ON = Slice.parse("v6e-1")
# As published for a kernel of megablox in float32; the first line has no figure.
SCOPED = """RESOURCE_EXHAUSTED: E1001: CompileTimeScopedVmemOom:
Ran out of memory in memory space vmem while allocating on stack for %gmm.1 = f32[16384,512]{1,0}
Scoped allocation with size 18.00M and limit 16.00M exceeded scoped vmem limit by 2.00M."""
# Of libtpu 0.0.42.1: a kernel with two buffers of 2048 x 4096 float32, and one of 16384 x 4096.
WHOLE = (
    "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space vmem. "
    "Used 128.00M of 127.94M vmem. Exceeded vmem capacity by 64.0K."
)
WINDOW = (
    "RESOURCE_EXHAUSTED: Allocation (size=268435456) would exceed memory (size=134217728) :: "
    "#allocation2 [shape = 'u8[268435456]{0}', space=vmem, size = 0x10000000, scoped, tag = 'input "
    "window allocation for operator input 0. The window shape is f32[16384,4096], while the full "
    "shape is f32[16384,4096]. The u8 shape/size shown above represents the raw byte size of this "
    "window in VMEM. This allocation is single buffered.'] :: double.1"
)
BARE = "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem. It should not be possible."


def explained(text):
    return explain_failure(ChildError(text, kind="JaxRuntimeError"), "gmm", ON)


@pytest.mark.parametrize(
    ("text", "figures", "advice"),
    [
        (SCOPED, "needs 18 MiB of VMEM, but has 16 MiB (128 MiB on each core", "vmem_limit_bytes"),
        (WHOLE, "needs 128 MiB of VMEM, but has 127.9 MiB (128 MiB on each core of v6e)", "blocks"),
        (WINDOW, "needs 256 MiB of VMEM, but has 128 MiB", "its input is f32[16384,4096]"),
        (BARE, "needs more VMEM than there is (128 MiB on each core of v6e)", "blocks smaller."),
    ],
)
def test_a_kernel_too_large_for_vmem_has_its_figures(text, figures, advice):
    error = explained(text)
    assert isinstance(error, XLACompilationError)
    assert str(error).startswith("a kernel of gmm ")
    assert figures in str(error)
    assert advice in str(error)
    assert "\n" not in str(error)
    assert not ran_out_of_hbm(ChildError(text, kind="JaxRuntimeError"))


def test_a_limit_is_not_to_be_raised_above_what_the_chip_has():
    assert "vmem_limit_bytes" not in str(explained(WHOLE)) + str(explained(WINDOW))


def test_other_failures_stay_what_they_were():
    hbm = explained("RESOURCE_EXHAUSTED: Used 40.1G of 31.25G hbm. Exceeded hbm capacity.")
    assert isinstance(hbm, TPUOutOfMemoryError)
    assert "needs 40.1G of HBM per device, but has 31.25G" in str(hbm)
    assert isinstance(explained("No such compile option: 'xla_tpu_nope'"), FlagError)
    assert str(explained("INTERNAL: what\nmore")).endswith(
        "failed (JaxRuntimeError): INTERNAL: what"
    )


def test_a_program_that_another_jax_exported_names_the_toolchain_that_reads_it():
    # Of jax 0.10.2, for a kernel that jax 0.12.0.1 exported.
    error = ChildError("INVALID_ARGUMENT: Failed to deserialize StableHLO", kind="JaxRuntimeError")
    told = explain_failure(error, "step", ON, exported_by="0.12.0.1")
    assert isinstance(told, XLACompilationError)
    assert "which jax 0.12.0.1 exported" in str(told)
    assert "--toolchain jax-0.12.0.1" in str(told)
