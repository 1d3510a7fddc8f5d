"""From a forward function to a program: compiled here, or in a child that can be killed.

XLA cannot be stopped once it compiles. Small programs are compiled in this process, because their
bound, from the number of operations, lies below the time-out. Where it does not, a child compiles
the same program into jax's cache on disk and is killed at the time-out; this process then finds
the program there. The child costs 1.5 s of start, several times a small compile, so it is not for
every program (measured on two busy cores: 0.1 to 3 s a compile, at most 10 ms an operation).
"""

import os
import time
from collections.abc import Mapping
from concurrent.futures import Future, TimeoutError
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any, Literal

import jax
import numpy as np

from ...errors import TPUModelError, XLACompilationError
from ...runtime.child import ChildError, watch_child
from ...runtime.files import temporary_folder
from ...training.recompile import counting_cache_hits, enable_compilation_cache, options_here
from .forward import ForwardFunction, Result, is_needed

# A compile here takes less than this: twice the slowest seen, and the start of XLA's own threads.
_BOUND_S, _BOUND_PER_OPERATION_S = 5.0, 0.02
_CHILD_START_S = 120.0  # to import jax on a busy machine; it is no part of the time-out
Where = Literal["here", "child", "thread"]


@dataclass(frozen=True, kw_only=True)
class ForwardProgram:
    """A compiled forward, for every module of one structure.

    Attributes:
        run: (trained, carried, seed, tensors) -> (tensors of the outputs, what was written to).
        result: How the outputs nest.
        draws_random: Whether the results depend on the seed.
        operations: Of the program that was compiled (StableHLO).
        compile_s: Seconds from the start of the trace (measured).
        where: Compiled "here", in a "child", or in a "thread" of this process.
        from_disk: Whether this process found it in jax's cache on disk, as it does after a child.
    """

    run: Any
    result: Result
    draws_random: bool
    operations: int
    compile_s: float
    where: Where
    from_disk: bool


def build_program(
    function: ForwardFunction,
    arguments: tuple[Any, ...],
    *,
    name: str,
    timeout_s: float,
    options: Mapping[str, Any],
) -> ForwardProgram:
    """Trace and compile.

    Args:
        function: What is compiled.
        arguments: Arrays or shapes of (trained, carried, seed, tensors).
        name: What errors call it.
        timeout_s: After this long the compile is stopped.
        options: For the compiler of a TPU.

    Raises:
        TPUModelError: The module cannot be one program.
        XLACompilationError: The compiler refused it, or the time was up.
    """
    enable_compilation_cache()
    began = time.perf_counter()
    jitted = jax.jit(function)
    traced, result = _trace(jitted, function, arguments, name)
    lowered = traced.lower()
    operations = lowered.as_text().count("stablehlo.")
    chosen = options_here(options)
    with counting_cache_hits() as hits:
        where = _choose(operations, timeout_s)
        if where == "child":
            handed_over = _by_child(jitted, arguments, name, timeout_s, chosen)
            where = "thread" if handed_over is None else where
            lowered = handed_over or lowered
        limit_s = timeout_s if where == "thread" else None
        compiled = _compile(lowered, name, chosen, limit_s)
    seed = len(jax.tree.leaves(arguments[:2]))
    return ForwardProgram(
        run=compiled,
        result=result,
        draws_random=is_needed(traced.jaxpr.jaxpr, seed),
        operations=operations,
        compile_s=time.perf_counter() - began,
        where=where,
        from_disk=bool(hits),
    )


def _trace(
    jitted: Any, function: ForwardFunction, arguments: tuple[Any, ...], name: str
) -> tuple[Any, Result]:
    try:
        traced = jitted.trace(*arguments)
    except TPUModelError as error:
        given = ", ".join(f"{path} {words}" for path, words in function.kind.describe().items())
        raise TPUModelError(f"{error} It was called with {given}.") from error
    result = function.result
    if result is None:  # jax traces a new function at least once
        raise TPUModelError(f"{name} was not traced: its forward never ran.")
    return traced, result


def _choose(operations: int, timeout_s: float) -> Where:
    if _BOUND_S + _BOUND_PER_OPERATION_S * operations <= timeout_s:
        return "here"
    # A TPU belongs to one process, and a GPU's memory is this one's: no child could compile there.
    return "child" if jax.default_backend() == "cpu" else "thread"


def _by_child(
    jitted: Any,
    arguments: tuple[Any, ...],
    name: str,
    timeout_s: float,
    options: Mapping[str, Any] | None,
) -> Any:
    """Return the program as the child compiled it, lowered; None where it cannot be handed over."""
    try:
        exported = jax.export.export(jitted)(*arguments)
        serialized = bytes(exported.serialize())
    except ValueError:  # it calls what jax.export does not vouch for in a later version
        return None
    with temporary_folder("tpukit-forward-") as folder:
        path, begun = folder / "program.bin", folder / "begun"
        path.write_bytes(serialized)
        request = {"program": str(path), "begun": str(begun), "options": options}
        try:
            reply = watch_child(
                "tpukit.torch.compiling.worker",
                request,
                timeout_s=_CHILD_START_S + timeout_s,
                environment=_child_environment(),
                stop_when=lambda: _is_late(begun, timeout_s),
            )
        except ChildError as error:
            if error.kind == "timeout":
                raise _late(name, timeout_s) from None
            raise _refused(name, str(error)) from None
    if reply is None:
        raise _late(name, timeout_s)
    return lower_exported(serialized)


def lower_exported(serialized: bytes) -> Any:
    """Lower a program from its bytes; parent and child do the same, and so find the same entry."""
    exported = jax.export.deserialize(bytearray(serialized))
    flat = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in exported.in_avals]
    arguments, options = jax.tree.unflatten(exported.in_tree, flat)
    return jax.jit(exported.call).lower(*arguments, **options)


def _child_environment() -> dict[str, str]:
    return {
        **os.environ,
        "JAX_COMPILATION_CACHE_DIR": str(enable_compilation_cache()),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PLATFORMS": jax.default_backend(),
    }


def _is_late(begun: Path, timeout_s: float) -> bool:
    return begun.exists() and time.time() - begun.stat().st_mtime > timeout_s


def _compile(
    lowered: Any, name: str, options: Mapping[str, Any] | None, limit_s: float | None
) -> Any:
    try:
        if limit_s is None:
            return lowered.compile(compiler_options=options)
        return _within(lowered, options, limit_s)
    except TimeoutError:
        raise _late(name, limit_s or 0.0, goes_on=True) from None
    except jax.errors.JaxRuntimeError as error:
        raise _refused(name, str(error)) from error


def _within(lowered: Any, options: Mapping[str, Any] | None, limit_s: float) -> Any:
    """Compile in a thread, and wait for it only so long."""
    answer: Future[Any] = Future()

    def compile_it() -> None:
        try:
            answer.set_result(lowered.compile(compiler_options=options))
        except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
            answer.set_exception(error)

    Thread(target=compile_it, name="tpukit-compile", daemon=True).start()
    return answer.result(limit_s)


def _late(name: str, timeout_s: float, *, goes_on: bool = False) -> XLACompilationError:
    ended = (
        "is not waited for any longer, though this process cannot stop it"
        if goes_on
        else "was stopped"
    )
    return XLACompilationError(
        f"compiling {name} took longer than {timeout_s:g} s and {ended}; raise "
        "config.hardware.tpu.compilation_timeout_seconds, or compile less at once."
    )


def _refused(name: str, said: str) -> XLACompilationError:
    first = next((line for line in said.splitlines() if line.strip()), "no message")
    return XLACompilationError(f"the compiler refused {name}: {first}")


def seed_shape() -> jax.ShapeDtypeStruct:
    """Shape and format of the seed that a program takes."""
    return jax.ShapeDtypeStruct((), np.dtype("uint32"))
