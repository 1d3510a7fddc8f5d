"""The deep check: the real TPU compiler compiles a small program on this machine."""

from collections.abc import Iterator

from ...errors import MissingExtraError
from ...hardware import Slice
from ...hardware.catalog import SLICE_FOR_LIBTPU
from ..child import ChildError, run_child
from .finding import Check, DoctorFinding, Site

COMPILE_TIMEOUT_S = 180.0


def check_offline_compile(site: Site) -> Iterator[DoctorFinding]:
    """Check that a sharded matmul compiles for a slice that is not attached."""
    if not site.deep:
        return
    target = Slice.parse(SLICE_FOR_LIBTPU)
    request = {
        "task": "compile",
        "topology": target.libtpu_topology,
        "options": dict(target.libtpu_options),
    }
    try:
        reply = run_child("tpukit.runtime.doctor.children", request, timeout_s=COMPILE_TIMEOUT_S)
    except MissingExtraError as missing:
        seen = "the offline TPU compiler is not installed"
        yield DoctorFinding("offline_compile", "compiler", "warning", seen, str(missing))
        return
    except ChildError as error:
        yield DoctorFinding(
            "offline_compile",
            "compiler",
            "error",
            f"the TPU compiler failed on a matmul: {error}",
            "Install a matching pair: pip install 'tpukit[tpu]'.",
        )
        return
    yield DoctorFinding(
        "offline_compile",
        "compiler",
        "ok",
        f"the TPU compiler built a sharded matmul for {reply['devices']} x {reply['kind']} in "
        f"{reply['compile_s']:.1f} s (measured), with no TPU",
    )


CHECKS: tuple[Check, ...] = (check_offline_compile,)
