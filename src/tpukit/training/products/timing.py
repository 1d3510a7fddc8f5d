"""The child process that times cuBLAS's algorithms for matrix products under load.

It is asked for products and a file to write: XLA's autotuning results with the fastest algorithm
of each. XLA reads such results once in a process, so all
algorithms are given in one file: a product with another precision attribute, which narrow
operands ignore, has a key of its own.
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

from ...hardware import parse_format
from ...runtime.child import serve_request
from ..recompile import compiler_options
from .product import (
    Matrix,
    Product,
    blocks_of,
    chosen_algorithm,
    key_of,
    products_in,
    with_algorithm,
)

SECONDS = 0.15  # of one measurement: the power limit is felt after 20 ms
WARM_SECONDS = 0.5
HOPELESS = 0.95  # of the fastest in the first round: not timed a second time
_LEVELS = (jax.lax.Precision.DEFAULT, jax.lax.Precision.HIGH, jax.lax.Precision.HIGHEST)
# The first is the one that models have. cuBLAS gives eight algorithms.
PRECISIONS = tuple(every_pair(_LEVELS, _LEVELS))[:8]

CompiledProduct = Callable[[jax.Array, jax.Array], jax.Array]


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Time the products that the request names, write XLA's results, and report every rate."""
    products = [Product.from_dict(one) for one in request["products"]]
    return {"report": choose_algorithms(products, Path(request["results"]))}


def choose_algorithms(products: list[Product], results: Path) -> list[dict[str, Any]]:
    """Write the results with the fastest algorithm of each product; report every rate."""
    blocks, usual = _blocks(products, results.with_stem(f"{results.stem}_dump"))
    forced = results.with_stem(f"{results.stem}_forced")
    forced.write_text(
        "\n".join(with_algorithm(block, place) for (_, place), block in blocks.items())
    )
    report, best_blocks = [], []
    for product, chosen in usual.items():
        rates = _rates(product, forced)
        if rates:
            best = max(rates, key=lambda place: rates[place])
            best_blocks.append(with_algorithm(blocks[product, 0], best))
            report.append(
                {"product": product.to_dict(), "usual": chosen, "best": best, "tflops": rates}
            )
    results.write_text("\n".join(best_blocks))
    return report


def _blocks(
    products: list[Product], dump: Path
) -> tuple[dict[tuple[Product, int], str], dict[Product, int | None]]:
    """XLA's own results for each product in each precision, and what it chose in the usual one."""
    blocks: dict[tuple[Product, int], str] = {}
    usual: dict[Product, int | None] = {}
    seen: set[str] = set()
    for product in products:
        for place, precision in enumerate(PRECISIONS):
            made = _compiled(product, precision, xla_gpu_dump_autotune_results_to=str(dump))
            if made is None:
                break
            keyed = ((key_of(block), block) for block in blocks_of(dump.read_text()))
            new = {key: block for key, block in keyed if key is not None and key not in seen}
            seen |= set(new)
            if len(new) != 1:
                break
            blocks[product, place] = next(iter(new.values()))
            if place == 0:
                usual[product] = chosen_algorithm(made[1])
    return blocks, usual


def _compiled(
    product: Product, precision: Any, **options: Any
) -> tuple[CompiledProduct, str] | None:
    """A program of that product alone, and its text; None where XLA makes another one of it."""

    def multiply(left: jax.Array, right: jax.Array) -> jax.Array:
        of_left, of_right = product.contracting
        return jax.lax.dot_general(
            left,
            right,
            (((of_left,), (of_right,)), ((), ())),
            precision=precision,
            preferred_element_type=jnp.dtype(parse_format(product.out.dtype).name),
        )

    operands = (product.left, product.right)
    shapes = (jax.ShapeDtypeStruct(one.shape, parse_format(one.dtype).name) for one in operands)
    step: Any = jax.jit(multiply, in_shardings=tuple(map(_format, operands)))
    options = {**options, **(compiler_options() or {})}
    program = step.lower(*shapes).compile(
        compiler_options=options if jax.default_backend() == "gpu" else None
    )
    text = program.as_text()
    return (program, text) if set(products_in(text)) == {product} else None


def _rates(product: Product, forced: Path) -> dict[int, float]:
    """TFLOP/s of each algorithm, alternating, on a chip that never rests."""
    operands = (_filled(product.left, 1), _filled(product.right, 2))
    programs: dict[int, CompiledProduct] = {}
    for place, precision in enumerate(PRECISIONS):
        made = _compiled(product, precision, xla_gpu_load_autotune_results_from=str(forced))
        if made is None or chosen_algorithm(made[1]) != place:
            continue
        try:
            jax.block_until_ready(made[0](*operands))
        except jax.errors.JaxRuntimeError:  # fewer algorithms than we have places for
            continue
        programs[place] = made[0]
    if not programs:
        return {}
    _rate(next(iter(programs.values())), operands, product.flops, WARM_SECONDS)
    first = {n: _rate(one, operands, product.flops, SECONDS) for n, one in programs.items()}
    hopeful = [n for n, rate in first.items() if rate >= HOPELESS * max(first.values())]
    again = {n: _rate(programs[n], operands, product.flops, SECONDS) for n in reversed(hopeful)}
    return {n: statistics.mean([rate, again.get(n, rate)]) for n, rate in first.items()}


def _rate(
    program: CompiledProduct, operands: tuple[jax.Array, jax.Array], flops: int, seconds: float
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
    """Random numbers, since products of zeros need less power; a short stretch, repeated."""

    def fill() -> jax.Array:
        stretch = jax.random.normal(
            jax.random.key(seed), (1 << 20,), parse_format(matrix.dtype).name
        )
        return jnp.resize(stretch, matrix.shape)

    return jax.jit(fill, out_shardings=_format(matrix))()


if __name__ == "__main__":
    serve_request(answer)
