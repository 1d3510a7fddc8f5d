"""Compiles a forward function, in this process or in a child that can be killed.

A compile in XLA cannot be interrupted. Small programs are compiled in this process, because an
upper bound of their compile time, by the number of operations, is below the time-out. A larger
program is compiled by a child, this module run by `python -m`, into jax's disk cache, where this
process finds it; the child is killed at the time-out. The child's start takes 1.5 s, several times
a small compile, so not every program uses one (measured on two busy cores: 0.1 to 3 s per compile,
at most 10 ms per operation).
"""

import os
import time
from concurrent.futures import Future, TimeoutError
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any, Literal

import jax
import numpy as np

from ...errors import TPUModelError, XLACompilationError
from ...plain_data import JsonMapping, JsonObject
from ...runtime.child import ChildError, serve_request, watch_child
from ...runtime.files import temporary_folder
from ...training.recompile import counting_cache_hits, enable_compilation_cache, options_here
from .call import ForwardFunction, Result, is_needed

# Upper bound of a compile: twice the slowest measured, plus the start of XLA's threads.
_BOUND_S, _BOUND_PER_OPERATION_S = 5.0, 0.02
_CHILD_START_S = 120.0  # to import jax on a busy machine; not part of the time-out
Where = Literal["here", "child", "thread"]


@dataclass(frozen=True, kw_only=True)
class ForwardProgram:
    """A compiled forward, valid for every module of one structure.

    Attributes:
        run: (trained, carried, seed, tensors) -> (output tensors, changed state).
        result: Structure of the outputs.
        draws_random: Whether the results depend on the seed.
        operations: Number of StableHLO operations.
        compile_s: Seconds of tracing and compiling (measured).
        where: Compiled "here", in a "child", or in a "thread" of this process.
        from_disk: Whether it was found in jax's disk cache, as after a child's compile.
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
    options: JsonMapping,
) -> ForwardProgram:
    """Trace and compile a forward function.

    Args:
        function: The function.
        arguments: Arrays or shapes of (trained, carried, seed, tensors).
        name: The name in errors.
        timeout_s: The compile is stopped after this time.
        options: Options for the TPU compiler.

    Raises:
        TPUModelError: The module cannot become one program.
        XLACompilationError: The compiler refused the program, or took too long.
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
            handed_over = _compile_in_child(jitted, arguments, name, timeout_s, chosen)
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
        given = ", ".join(f"{path} {text}" for path, text in function.kind.describe().items())
        raise TPUModelError(f"{error} It was called with {given}.") from error
    result = function.result
    if result is None:  # cannot happen: jax traces a new function
        raise TPUModelError(
            f"{name} was not traced, because its forward never ran; call it with other inputs."
        )
    return traced, result


def _choose(operations: int, timeout_s: float) -> Where:
    if _BOUND_S + _BOUND_PER_OPERATION_S * operations <= timeout_s:
        return "here"
    # A TPU and the memory of a GPU belong to this process, so no child could compile there.
    return "child" if jax.default_backend() == "cpu" else "thread"


def _compile_in_child(
    jitted: Any,
    arguments: tuple[Any, ...],
    name: str,
    timeout_s: float,
    options: JsonMapping | None,
) -> Any:
    """Let a child compile; return the lowered program, or None if it cannot be exported."""
    try:
        exported = jax.export.export(jitted)(*arguments)
        serialized = bytes(exported.serialize())
    except ValueError:  # it has calls without jax.export's stability guarantee
        return None
    with temporary_folder("tpukit-forward-") as folder:
        path, begun = folder / "program.bin", folder / "begun"
        path.write_bytes(serialized)
        request = {"program": str(path), "begun": str(begun), "options": options}
        try:
            reply = watch_child(
                "tpukit.torch.compiling.building",
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
    """Lower a serialized program; parent and child do the same, so the cache entry is the same."""
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


def _compile(lowered: Any, name: str, options: JsonMapping | None, limit_s: float | None) -> Any:
    try:
        if limit_s is None:
            return lowered.compile(compiler_options=options)
        return _within(lowered, options, limit_s)
    except TimeoutError:
        raise _late(name, limit_s or 0.0, goes_on=True) from None
    except jax.errors.JaxRuntimeError as error:
        raise _refused(name, str(error)) from error


def _within(lowered: Any, options: JsonMapping | None, limit_s: float) -> Any:
    """Compile in a thread, and wait for at most `limit_s`."""
    answer: Future[Any] = Future()

    def compile_it() -> None:
        try:
            answer.set_result(lowered.compile(compiler_options=options))
        except BaseException as error:  # noqa: BLE001  raised again by result()
            answer.set_exception(error)

    Thread(target=compile_it, name="tpukit-compile", daemon=True).start()
    return answer.result(limit_s)


def _late(name: str, timeout_s: float, *, goes_on: bool = False) -> XLACompilationError:
    ended = "is still running in a thread that cannot be stopped" if goes_on else "was stopped"
    return XLACompilationError(
        f"compiling {name} took longer than {timeout_s:g} s and {ended}; raise "
        "config.hardware.tpu.compilation_timeout_seconds, or compile less at once."
    )


def _refused(name: str, message: str) -> XLACompilationError:
    first = next((line for line in message.splitlines() if line.strip()), "no message")
    return XLACompilationError(f"the compiler refused {name}: {first}")


def seed_shape() -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of a program's seed."""
    return jax.ShapeDtypeStruct((), np.dtype("uint32"))


def compile_request(request: JsonObject) -> JsonObject:
    """Compile one program in the child, into jax's disk cache."""
    lowered = lower_exported(Path(request["program"]).read_bytes())
    Path(request["begun"]).touch()  # the time-out begins here
    lowered.compile(compiler_options=request["options"])
    return {}


if __name__ == "__main__":
    serve_request(compile_request)
