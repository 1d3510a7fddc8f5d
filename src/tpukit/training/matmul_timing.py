"""The child process that times cuBLAS's algorithms for matmuls under load.

Its request names matmuls and a file, into which it writes XLA's autotuning results with the fastest
algorithm of each matmul. XLA reads such results once per process, so one file must give it all
algorithms: a matmul with another precision attribute, which 16-bit operands ignore, has another
key.
"""

import statistics
import time
from collections.abc import Callable
from itertools import product as every_pair
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format, Layout

from ..hardware import parse_format
from ..runtime.child import serve_request
from .matmul_tuning import (
    Matmul,
    Matrix,
    chosen_algorithm,
    matmuls_in,
    result_key,
    split_results,
    with_algorithm,
)
from .recompile import compiler_options

SECONDS = 0.15  # per measurement: the power limit acts after 20 ms
WARM_SECONDS = 0.5
HOPELESS = 0.95  # of the fastest rate: slower algorithms are not timed a second time
_LEVELS = (jax.lax.Precision.DEFAULT, jax.lax.Precision.HIGH, jax.lax.Precision.HIGHEST)
# Models use the first. cuBLAS offers eight algorithms.
PRECISIONS = tuple(every_pair(_LEVELS, _LEVELS))[:8]

CompiledMatmul = Callable[[jax.Array, jax.Array], jax.Array]


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Time the matmuls that the request names, write XLA's results, and return every rate."""
    matmuls = [Matmul.from_dict(matmul) for matmul in request["products"]]
    return {"report": choose_algorithms(matmuls, Path(request["results"]))}


def choose_algorithms(matmuls: list[Matmul], results: Path) -> list[dict[str, Any]]:
    """Write the results with the fastest algorithm of each matmul; return every rate."""
    entries, usual = _entries(matmuls, results.with_stem(f"{results.stem}_dump"))
    forced = results.with_stem(f"{results.stem}_forced")
    forced.write_text(
        "\n".join(with_algorithm(entry, number) for (_, number), entry in entries.items())
    )
    report, best_entries = [], []
    for matmul, chosen in usual.items():
        rates = _rates(matmul, forced)
        if rates:
            best = max(rates, key=lambda number: rates[number])
            best_entries.append(with_algorithm(entries[matmul, 0], best))
            report.append(
                {"product": matmul.to_dict(), "usual": chosen, "best": best, "tflops": rates}
            )
    results.write_text("\n".join(best_entries))
    return report


def _entries(
    matmuls: list[Matmul], dump: Path
) -> tuple[dict[tuple[Matmul, int], str], dict[Matmul, int | None]]:
    """Return XLA's own entry per matmul and precision, and its choice in the usual precision."""
    entries: dict[tuple[Matmul, int], str] = {}
    usual: dict[Matmul, int | None] = {}
    seen: set[str] = set()
    for matmul in matmuls:
        for number, precision in enumerate(PRECISIONS):
            made = _compiled(matmul, precision, xla_gpu_dump_autotune_results_to=str(dump))
            if made is None:
                break
            keyed = ((result_key(entry), entry) for entry in split_results(dump.read_text()))
            new = {key: entry for key, entry in keyed if key is not None and key not in seen}
            seen |= set(new)
            if len(new) != 1:
                break
            entries[matmul, number] = next(iter(new.values()))
            if number == 0:
                usual[matmul] = chosen_algorithm(made[1])
    return entries, usual


def _compiled(
    matmul: Matmul, precision: tuple[jax.lax.Precision, jax.lax.Precision], **options: Any
) -> tuple[CompiledMatmul, str] | None:
    """Return a program of that matmul alone and its text; None if XLA rewrites the matmul."""

    def multiply(left: jax.Array, right: jax.Array) -> jax.Array:
        of_left, of_right = matmul.contracting
        return jax.lax.dot_general(
            left,
            right,
            (((of_left,), (of_right,)), ((), ())),
            precision=precision,
            preferred_element_type=jnp.dtype(parse_format(matmul.out.dtype).name),
        )

    operands = (matmul.left, matmul.right)
    shapes = (
        jax.ShapeDtypeStruct(matrix.shape, parse_format(matrix.dtype).name) for matrix in operands
    )
    step: Any = jax.jit(multiply, in_shardings=tuple(map(_format, operands)))
    options = {**options, **(compiler_options() or {})}
    program = step.lower(*shapes).compile(
        compiler_options=options if jax.default_backend() == "gpu" else None
    )
    text = program.as_text()
    return (program, text) if set(matmuls_in(text)) == {matmul} else None


def _rates(matmul: Matmul, forced: Path) -> dict[int, float]:
    """Measure the TFLOP/s of each algorithm, in turns, on a chip that never idles."""
    operands = (_filled(matmul.left, 1), _filled(matmul.right, 2))
    programs: dict[int, CompiledMatmul] = {}
    for number, precision in enumerate(PRECISIONS):
        made = _compiled(matmul, precision, xla_gpu_load_autotune_results_from=str(forced))
        if made is None or chosen_algorithm(made[1]) != number:
            continue
        try:
            jax.block_until_ready(made[0](*operands))
        except jax.errors.JaxRuntimeError:  # cuBLAS has fewer algorithms than PRECISIONS
            continue
        programs[number] = made[0]
    if not programs:
        return {}
    _rate(next(iter(programs.values())), operands, matmul.flops, WARM_SECONDS)
    first = {n: _rate(program, operands, matmul.flops, SECONDS) for n, program in programs.items()}
    hopeful = [n for n, rate in first.items() if rate >= HOPELESS * max(first.values())]
    again = {n: _rate(programs[n], operands, matmul.flops, SECONDS) for n in reversed(hopeful)}
    return {n: statistics.mean([rate, again.get(n, rate)]) for n, rate in first.items()}


def _rate(
    program: CompiledMatmul, operands: tuple[jax.Array, jax.Array], flops: int, seconds: float
) -> float:
    count = max(3, int(seconds * 600e12 / flops))
    out = jax.block_until_ready(program(*operands))
    began = time.perf_counter()
    for _ in range(count):
        out = program(*operands)
    jax.block_until_ready(out)
    return flops * count / (time.perf_counter() - began) / 1e12


def _format(matrix: Matrix) -> Format:
    order = (0, 1) if matrix.by_rows else (1, 0)
    return Format(Layout(major_to_minor=order), jax.sharding.SingleDeviceSharding(jax.devices()[0]))


def _filled(matrix: Matrix, seed: int) -> jax.Array:
    """Return a matrix of repeated random numbers: zeros would need less power."""

    def fill() -> jax.Array:
        values = jax.random.normal(
            jax.random.key(seed), (1 << 20,), parse_format(matrix.dtype).name
        )
        return jnp.resize(values, matrix.shape)

    return jax.jit(fill, out_shardings=_format(matrix))()


if __name__ == "__main__":
    serve_request(answer)
