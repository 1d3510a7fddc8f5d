"""What tests of kernels share: an example of every op, and a race detector that fails."""

import contextlib
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from tpukit.kernels import quantize_weight

ROWS = P("data", "model")


@dataclass(frozen=True)
class Example:
    """How one op is tried.

    Attributes:
        arrays: (dtype) -> arguments of which the named dimensions divide by the mesh.
        odd: (dtype) -> arguments whose sizes are no multiples of anything.
        specs: How the arguments are split over a mesh of data=2 and model=4; nothing of it need
            be gathered.
        options: Static keyword arguments.
        exact: Whether a float32 kernel multiplies float32 in full.
        batched: The arguments that `vmap` maps over.
        gathered: What is gathered all the same: a number for each token or expert.
        bad: What the public function refuses: (options, change of the arguments, what it says).
    """

    arrays: Callable[[Any], tuple[Any, ...]]
    odd: Callable[[Any], tuple[Any, ...]]
    specs: tuple[P, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    exact: bool = True
    batched: tuple[int, ...] = (0,)
    gathered: tuple[str, ...] = ()
    bad: tuple[tuple[Mapping[str, Any], Callable[..., Any], str], ...] = ()


def draw(dtype, *shapes, scale=1.0):
    keys = jax.random.split(jax.random.key(len(shapes)), len(shapes))
    return tuple(
        (scale * jax.random.normal(key, shape, jnp.float32)).astype(dtype)
        for key, shape in zip(keys, shapes, strict=True)
    )


def same(*arrays):
    return arrays


def without_a_column(at):
    return lambda *arrays: (*arrays[:at], arrays[at][..., :-1], *arrays[at + 1 :])


def rows(shape, dtype, *, lines):
    """Arrays of `shape`, and float32 ones of its last dimension, as training keeps them."""
    return (*draw(dtype, shape), *draw(jnp.float32, *[shape[-1:]] * lines))


def attention(batch, tokens, queries, keys, width, dtype):
    return draw(dtype, *((batch, tokens, n, width) for n in (queries, keys, keys)))


def delta_rule(batch, tokens, key_heads, value_heads, width, value_width, dtype):
    keys, values = (batch, tokens, key_heads, width), (batch, tokens, value_heads, value_width)
    rates = draw(jnp.float32, values[:3], values[:3])
    return *draw(dtype, keys, keys, values), -jnp.exp(rates[0] - 3), jax.nn.sigmoid(rates[1])


def groups(row_count, width, columns, sizes, dtype):
    lhs, rhs = draw(dtype, (row_count, width), (len(sizes), width, columns))
    return lhs, rhs, jnp.asarray(sizes, jnp.int32)


def quantized(row_count, width, columns, dtype):
    x, weight = draw(dtype, (row_count, width), (width, columns))
    packed = quantize_weight(weight, "int8")
    return x, packed.data, packed.scales


def tokens_and_head(tokens, width, vocab, dtype):
    x, w = draw(dtype, (tokens, width), (width, vocab), scale=0.3)
    labels = jnp.arange(tokens, dtype=jnp.int32) * 37 % vocab
    return x, w, labels, jnp.linspace(0.0, 1.5, tokens)


NORM_BAD = (
    ({}, without_a_column(1), r"takes parameters of the shape \(256,\), but got \(255,\)"),
    ({"implementation": "palas_tpu"}, same, "Did you mean 'pallas_tpu'"),
)
EXAMPLES = {
    "rms_norm": Example(
        partial(rows, (8, 4, 256), lines=1),
        partial(rows, (3, 7, 200), lines=1),
        (ROWS, P()),
        bad=NORM_BAD,
    ),
    "layer_norm": Example(
        partial(rows, (8, 4, 256), lines=2),
        partial(rows, (3, 7, 200), lines=2),
        (ROWS, P(), P()),
        bad=NORM_BAD,
    ),
    "flash_attention": Example(
        partial(attention, 2, 128, 8, 4, 64),
        partial(attention, 1, 100, 2, 1, 40),
        (P("data", None, "model"),) * 3,
        options={"causal": True},
        bad=(
            ({}, without_a_column(1), r"queries \(2, 128, 8, 64\) and keys \(2, 128, 4, 63\)"),
            ({"window": 0}, same, "window=0 must be at least 1"),
        ),
    ),
    "gated_delta": Example(
        partial(delta_rule, 2, 160, 4, 8, 32, 32),
        partial(delta_rule, 3, 70, 1, 2, 24, 40),
        (P("data", None, "model"),) * 5,
        bad=(
            ({}, without_a_column(3), r"v's shape without its last axis, .* \(2, 160, 7\)"),
            ({"implementation": "palas_tpu"}, same, "Did you mean 'pallas_tpu'"),
        ),
    ),
    "grouped_matmul": Example(
        partial(groups, 256, 128, 256, [100, 0, 90, 30]),
        partial(groups, 93, 70, 130, [20, 33, 0]),
        (P("data"), P(None, None, "model"), P()),
        bad=(
            ({}, without_a_column(0), r"lhs \(256, 127\) by rhs \(4, 128, 256\)"),
            ({}, without_a_column(2), r"group_sizes are int32\[3\]; expected 4 integers"),
        ),
    ),
    "quantized_matmul": Example(
        partial(quantized, 32, 256, 512),
        partial(quantized, 21, 128, 200),
        (P("data"), P(None, "model"), P(None, "model")),
        options={"format": "int8", "activations": "bfloat16"},
        exact=False,
        bad=(
            ({}, without_a_column(0), r"x is \(32, 255\), but the weight is \(256, 512\)"),
            ({"activations": "int4"}, same, "known are bfloat16, int8"),
        ),
    ),
    "cross_entropy": Example(
        partial(tokens_and_head, 64, 128, 512),
        partial(tokens_and_head, 37, 100, 300),
        (P("data"), P(None, "model"), P("data"), P("data")),
        gathered=("f32[4,32]",),
        bad=(
            ({}, without_a_column(0), r"x \(64, 127\) by w \(128, 512\)"),
            ({"reduction": "maen"}, same, "Did you mean 'mean'"),
        ),
    ),
}


@pytest.fixture(scope="session")
def examples():
    """An `Example` of every op, by name."""
    return EXAMPLES


@pytest.fixture
def example(name):
    """The `Example` of the op that a test is parametrised with."""
    return EXAMPLES[name]


@pytest.fixture
def no_races():
    """`with no_races(): ...` fails if the TPU interpreter reported a race meanwhile.

    The detector of each kernel is gone when the next one starts; what it printed stays.
    """

    @contextlib.contextmanager
    def watch():
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            yield
            jax.effects_barrier()
        assert "RACE DETECTED" not in said.getvalue(), said.getvalue()

    return watch
