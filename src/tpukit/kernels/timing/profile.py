"""Compile Pallas kernels for one chip, follow their programs, and count their bundles."""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from ...compiler.aot import DEFAULT_TIMEOUT_S, run_request
from ...compiler.bundles import CallTrace, parse_listing, trace_call, words_of
from ...compiler.cache import CompileCache
from ...compiler.compiled import CompiledStep
from ...compiler.hlo import Computation, Instruction
from ...compiler.kernel_traces import kernel_calls, one_device_slice
from ...compiler.program.request import make_request
from ...compiler.timeline.kernels import RaggedDotTimer
from ...errors import TPUKernelError, TPUOutOfMemoryError, XLACompilationError
from ...hardware import Chip, get_chip
from ...hardware.target import target_chip
from ...runtime.progress import Progress, silent
from ..registry.op import Direction, KernelCase, Op
from .prefetched import PallasCall, find_pallas_calls

FORMAT = 7  # raise it when the stored results, or how a program is followed, change
_NUMBERED = re.compile(r"\.\d+$")


@dataclass(frozen=True)
class KernelProfile:
    """What a function executes on a chip; `time_profile` in `estimating.py` times it.

    Attributes:
        calls: What each kernel call of the compiled program executes, by the call's name.
        reasons: Why a call could not be followed, by its name.
    """

    chip: Chip
    compiled: CompiledStep = field(repr=False)
    calls: Mapping[str, CallTrace] = field(repr=False)
    reasons: Mapping[str, str]

    @property
    def bundle_count(self) -> int:
        """Number of bundles of all its kernels' programs."""
        return sum(call.bundle_count for call in self.calls.values())


def profile_kernel(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    chip: str,
    *,
    scalar_inputs: Mapping[int, Any] | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    progress: Progress = silent,
    use_cache: bool = True,
) -> KernelProfile:
    """Compile a function for one device of a chip and follow its kernels' programs.

    Args:
        function: Any function that jax can trace.
        arguments: Shapes, or arrays where the values decide what a kernel does (group sizes).
        chip: A generation: "v5e", "v5p", "v6e", "7x".
        scalar_inputs: Values of flat arguments by position, for those given as shapes.
        timeout_s: Time limit of the compile.
        progress: Called with each stage of the compile.
        use_cache: Whether to read and keep results on disk.

    Raises:
        TPUOutOfMemoryError: The program does not fit.
        XLACompilationError: The compiler refused it.
    """
    target = get_chip(chip)
    leaves = jax.tree.leaves(tuple(arguments))
    known = {
        index: leaf
        for index, leaf in enumerate(leaves)
        if not isinstance(leaf, jax.ShapeDtypeStruct)
    }
    known.update(scalar_inputs or {})
    shapes = jax.tree.map(_shape, tuple(arguments))
    with target_chip(target.name):
        request = make_request(function, one_device_slice(target), *shapes, progress=progress)
        pallas = find_pallas_calls(function, shapes, known)
        # XLA's own ops are timed by their schedule; generating their code would take longer than
        # the rest.
        compiled = run_request(
            request,
            until="codegen" if pallas else "schedule",
            timeout_s=timeout_s,
            progress=progress,
            use_cache=use_cache,
            bundles=bool(pallas),
        )
    if not compiled.fits:
        raise TPUOutOfMemoryError(compiled.memory.refusal)
    traces: dict[str, CallTrace] = {}
    reasons: dict[str, str] = {}
    for call, parent in kernel_calls(compiled.module):
        if RaggedDotTimer.knows(call):
            continue  # XLA makes it from `lax.ragged_dot`; its tables are not in the trace
        try:
            tables = _tables(call, parent, pallas)
            traces[call.name] = _trace(call, compiled, target.name, tables, use_cache)
        except XLACompilationError as error:
            reasons[call.name] = str(error)
    return KernelProfile(target, compiled, traces, reasons)


def _shape(leaf: Any) -> jax.ShapeDtypeStruct:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    array = np.asarray(leaf) if not hasattr(leaf, "dtype") else leaf
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def _tables(
    call: Instruction, parent: Computation, pallas: Sequence[PallasCall]
) -> dict[int, tuple[int, ...]]:
    """Return the words of a call's known integer operands."""
    operands = [parent.by_name[name].shapes[0] for name in call.operands]
    dims = tuple(shape.dims for shape in operands)
    alike = [call for call in pallas if call.shapes == dims]
    tables: dict[int, tuple[int, ...]] = {}
    for index in alike[0].integers if alike else ():
        values = [call.integers.get(index) for call in alike]
        first = values[0]
        # Calls with the same shapes may have different values, and the compiled program does not
        # tell which is which.
        if first is not None and all(
            value is not None and np.array_equal(first, value) for value in values
        ):
            tables[index] = words_of(first, operands[index])
    return tables


def _trace(
    call: Instruction,
    compiled: CompiledStep,
    chip: str,
    tables: Mapping[int, tuple[int, ...]],
    use_cache: bool,
) -> CallTrace:
    text = compiled.kernel_listings.get(call.name)
    if text is None:
        raise XLACompilationError(
            f"{call.name}: the compiler wrote no listing of this kernel, so it cannot be timed."
        )
    cache = CompileCache.default() if use_cache else None
    identity = json.dumps([FORMAT, chip, text, sorted(tables.items())])
    key = f"{hashlib.sha256(identity.encode()).hexdigest()[:40]}-trace"
    kept = cache.load_json(key) if cache is not None else None
    if kept is not None:
        return CallTrace.from_data(kept)
    trace = trace_call(call.name, text, chip, tables=tables)
    if cache is not None:
        cache.store_json(key, trace.to_data())
    return trace


def count_bundles(
    op: Op, case: KernelCase, chip: str, *, direction: Direction = "forward", use_cache: bool = True
) -> dict[str, int]:
    """Compile a case of an op for a generation; return the bundles of each kernel by name.

    Raises:
        TPUKernelError: The compiled program has no kernel.
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
