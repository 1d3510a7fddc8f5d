"""How many bundles the compiler makes of an op's kernels: whether a change made them longer."""

import re
from collections import Counter

from ...compiler.aot import run_request
from ...compiler.bundles import parse_listing
from ...compiler.kernel_traces import one_device_slice
from ...compiler.program.request import make_request
from ...errors import TPUKernelError
from ...hardware import get_chip
from ...hardware.target import target_chip
from ..registry.op import Direction, KernelCase, Op

_NUMBERED = re.compile(r"\.\d+$")


def count_bundles(
    op: Op, case: KernelCase, chip: str, *, direction: Direction = "forward", use_cache: bool = True
) -> dict[str, int]:
    """Compile a case of an op for a generation; bundles of each kernel, by the kernel's name.

    Raises:
        TPUKernelError: The compiled program holds no kernel.
        XLACompilationError: The compiler refused it.
    """
    target = get_chip(chip)
    with target_chip(target.name):
        function = op.bind(case, direction=direction)
        request = make_request(function, one_device_slice(target), *case.arguments)
        compiled = run_request(request, use_cache=use_cache, bundles=True)
    counts: Counter[str] = Counter()
    for name, text in compiled.kernel_listings.items():
        counts[_NUMBERED.sub("", name)] += len(parse_listing(text).bundles)
    if not counts:
        raise TPUKernelError(
            f"{op.name} {case.name} compiled for {target.name} without a kernel; "
            "its blocks may have made it fall back to XLA."
        )
    return dict(sorted(counts.items()))
