"""Small training steps whose every large array is known: what it is for, written down by hand.

An array is known by its shape and by the operation that makes it. Sizes are such that nothing of
interest fits in VMEM, and gradients are kept apart from the update, which may be fused with them.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

WIDTH, HIDDEN, TOKENS, VOCABULARY, LAYERS = 8192, 20480, 6144, 40960, 3
FLOAT, NARROW = jnp.float32, jnp.bfloat16
GRADIENT, COPY, KEPT, BRIEF = "gradients", "weight copies", "activations", "temporaries"
BACKWARD, FORWARD, ANY = "transpose(jvp())", "jvp()", ""


@dataclass(frozen=True)
class KnownProgram:
    """A step and the truth about its memory.

    Attributes:
        truth: Purpose of temporaries by shape ("bf16 8192x20480", dimensions in any order) and by a
            part of the name of what makes them; the first that fits counts.
            Where two arrays share both, the purposes of both are given, with a bar between them.
        must_hold: Of these, (shape, purpose) that have to be there.
    """

    name: str
    step: Callable[..., Any]
    arguments: tuple[Any, ...]
    truth: Sequence[tuple[str, str, str]]
    must_hold: Sequence[tuple[str, str]]
    slice: str = "v6e-1"

    def purpose(self, shape: str, name: str) -> str | None:
        """What a temporary is for; None if nobody knows of it."""
        copied = re.fullmatch(r"args\[(\d+)\]", name)
        if copied is not None:  # an argument in another layout
            path = jax.tree_util.keystr(self._paths[int(copied[1])])
            kinds = {"params": COPY, "opt_state": "state copies"}
            return next((kind for part, kind in kinds.items() if part in path), BRIEF)
        rules = [(part, purpose) for key, part, purpose in self.truth if in_order(key) == shape]
        return next((purpose for part, purpose in rules if part in name), None)

    @property
    def _paths(self):
        return [path for path, _ in jax.tree_util.tree_flatten_with_path(self.arguments)[0]]


def in_order(key: str) -> str:
    """A shape's key with its dimensions in ascending order, those of one left out."""
    dtype, _, dims = key.partition(" ")
    return f"{dtype} {'x'.join(sorted((d for d in dims.split('x') if d != '1'), key=int))}"


def array(*sizes, dtype=FLOAT, sharding=None):
    return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)


def like(tree, dtype=None):
    return jax.tree.map(
        lambda one: jax.ShapeDtypeStruct(one.shape, dtype or one.dtype, sharding=one.sharding), tree
    )


def adam(state, gradients):
    """Adam without its corrections: both moments, then the weights."""

    def moment(old, new, share):
        return (share * old.astype(FLOAT) + (1 - share) * new).astype(old.dtype)

    gradients = jax.lax.optimization_barrier(gradients)
    old, square = state["opt_state"]["mu"], jax.tree.map(jnp.square, gradients)
    mean = jax.tree.map(lambda m, g: moment(m, g, 0.9), old, gradients)
    spread = jax.tree.map(lambda v, g: moment(v, g, 0.95), state["opt_state"]["nu"], square)
    params = jax.tree.map(
        lambda p, m, v: p - 1e-3 * m.astype(FLOAT) / (jnp.sqrt(v.astype(FLOAT)) + 1e-8),
        state["params"], mean, spread,
    )  # fmt: skip
    return {"params": params, "opt_state": {"mu": mean, "nu": spread}}


def state_of(params, moments=None):
    both = {"mu": like(params, moments), "nu": like(params, moments)}
    return {"params": params, "opt_state": both}


def mlp_loss(params, x):
    hidden = jnp.tanh(x.astype(NARROW) @ params["up"].astype(NARROW))
    return jnp.mean((hidden @ params["down"].astype(NARROW)).astype(FLOAT) ** 2)


def mlp(**options):
    return {"up": array(WIDTH, HIDDEN, **options), "down": array(HIDDEN, WIDTH + 512, **options)}


def plain_step(state, x):
    return adam(state, jax.grad(mlp_loss)(state["params"], x))


MLP_TRUTH = [
    ("bf16 8192x20480", BACKWARD, GRADIENT),  # as the product gives it, before it is widened
    ("bf16 8704x20480", BACKWARD, GRADIENT),
    ("bf16 8192x20480", ANY, COPY),  # cast for the products
    ("bf16 8704x20480", ANY, COPY),
    ("f32 8192x20480", BACKWARD, GRADIENT),
    ("f32 8704x20480", BACKWARD, GRADIENT),
    ("f32 8192x20480", ANY, BRIEF),  # of the update
    ("f32 8704x20480", ANY, BRIEF),
    ("bf16 6144x20480", BACKWARD, BRIEF),  # the gradient by the hidden layer
    ("bf16 6144x20480", FORWARD, KEPT),  # the hidden layer: tanh and "down" need it again
    ("bf16 6144x8704", BACKWARD, BRIEF),
    ("bf16 6144x8704", FORWARD, KEPT),  # the result: the gradient of its square is twice it
    ("bf16 6144x8192", ANY, BRIEF),  # the batch, cast
    ("bf16 4x6144x8192", ANY, BRIEF),
]
PLAIN = KnownProgram(
    "one step of Adam",
    plain_step,
    (state_of(mlp()), array(TOKENS, WIDTH)),
    truth=MLP_TRUTH,
    must_hold=[("f32 8704x20480", GRADIENT), ("bf16 6144x20480", KEPT)],
)


def accumulating_step(state, batches):
    def piece(total, x):
        gradients = jax.grad(mlp_loss)(state["params"], x)
        return jax.tree.map(jnp.add, total, gradients), None

    zeros = jax.tree.map(jnp.zeros_like, state["params"])
    total, _ = jax.lax.scan(piece, zeros, batches)
    return adam(state, jax.tree.map(lambda one: one / 4, total))


ACCUMULATING = KnownProgram(
    "gradients of four pieces of a batch, added up in a loop",
    accumulating_step,
    (state_of(mlp()), array(4, TOKENS, WIDTH)),
    truth=[
        ("f32 8192x20480", "div", GRADIENT),  # their mean
        ("f32 8704x20480", "div", GRADIENT),
        *MLP_TRUTH,
    ],
    must_hold=[("f32 8192x20480", GRADIENT), ("f32 8704x20480", GRADIENT)],
)


def chunked_loss_step(state, batch):
    """The head's gradient is added up during the forward pass, chunk by chunk of tokens."""

    @jax.custom_vjp
    def loss(head, x):
        return forward(head, x)[0]

    def forward(head, x):
        def chunk(carry, one):
            total, of_head = carry
            narrow = head.astype(NARROW)
            logits = (one @ narrow).astype(FLOAT)
            weights = jax.nn.softmax(logits).astype(NARROW)
            added = jax.lax.dot_general(
                one, weights, (((0,), (0,)), ((), ())), preferred_element_type=FLOAT
            )
            return (total + jax.nn.logsumexp(logits, -1).sum(), of_head + added), weights @ narrow.T

        start = (jnp.zeros(()), jnp.zeros(head.shape))
        chunks = x.reshape(4, TOKENS // 4, WIDTH)
        (total, of_head), of_x = jax.lax.scan(chunk, start, chunks)
        return total, (of_head, of_x.reshape(x.shape))

    def backward(kept, scale):
        of_head, of_x = kept
        return scale * of_head, (scale * of_x).astype(NARROW)

    loss.defvjp(forward, backward)

    def whole(params):
        return loss(params["head"], (batch.astype(NARROW) @ params["in"].astype(NARROW)))

    return adam(state, jax.grad(whole)(state["params"]))


CHUNKED = KnownProgram(
    "a loss in chunks that makes the head's gradient as it goes",
    chunked_loss_step,
    (
        state_of({"head": array(WIDTH, VOCABULARY), "in": array(WIDTH + 512, WIDTH)}),
        array(TOKENS, WIDTH + 512),
    ),
    truth=[
        ("f32 8192x40960", FORWARD, GRADIENT),  # added up in the loop
        ("bf16 8192x40960", ANY, COPY),
        ("bf16 8192x8704", BACKWARD, GRADIENT),
        ("f32 8192x8704", BACKWARD, GRADIENT),
        ("f32 8192x8704", "sub", BRIEF),  # new weights, in the layout they are updated in
        ("bf16 8192x8704", ANY, COPY),
        ("f32 1536x40960", ANY, BRIEF),  # logits of a chunk
        ("bf16 1536x40960", ANY, BRIEF),
        ("bf16 4x1536x8192", FORWARD, KEPT),  # the gradient by x, until the backward pass
        ("bf16 6144x8192", FORWARD, BRIEF),  # x itself: the loss needs it no more
        ("bf16 6144x8704", ANY, BRIEF),  # the batch, cast
        ("bf16 1536x8192", ANY, BRIEF),
    ],
    must_hold=[("f32 8192x40960", GRADIENT), ("bf16 4x1536x8192", KEPT)],
)


def scanned_step(state, x):
    def layer(hidden, params):
        inner = jnp.tanh(hidden @ params["up"].astype(NARROW))
        return hidden + inner @ params["down"].astype(NARROW), None

    def loss(params):
        out, _ = jax.lax.scan(jax.checkpoint(layer), x.astype(NARROW), params)
        return jnp.mean(out.astype(FLOAT) ** 2)

    return adam(state, jax.grad(loss)(state["params"]))


SCANNED_TRUTH = [
    ("bf16 3x6144x8192", FORWARD, KEPT),  # the input of every layer
    ("f32 3x8192x20480", BACKWARD, GRADIENT),
    ("bf16 3x8192x20480", ANY, COPY),
    ("bf16 8192x20480", "dynamic_index_in_dim", COPY),  # one layer of them
    ("bf16 8192x20480", "rematted_computation", COPY),
    ("bf16 8192x20480", BACKWARD, GRADIENT),
    ("bf16 8192x20480", ANY, COPY),
    ("f32 8192x20480", BACKWARD, GRADIENT),
    ("bf16 6144x20480", ANY, BRIEF),  # made again in the backward pass, and used up there
    ("f32 6144x20480", ANY, BRIEF),
    ("bf16 6144x8192", BACKWARD, BRIEF),
    ("bf16 6144x8192", FORWARD, KEPT),  # the last layer's result, for the loss
    ("bf16 6144x8192", ANY, BRIEF),
]
SCANNED = KnownProgram(
    "layers in a scan whose insides are computed again",
    scanned_step,
    (
        state_of({"up": array(LAYERS, WIDTH, HIDDEN), "down": array(LAYERS, HIDDEN, WIDTH)}),
        array(TOKENS, WIDTH),
    ),
    truth=SCANNED_TRUTH,
    must_hold=[("bf16 3x6144x8192", KEPT), ("f32 3x8192x20480", GRADIENT)],
)

NARROW_MOMENTS = KnownProgram(
    "Adam with moments in bfloat16",
    plain_step,
    (state_of(mlp(), NARROW), array(TOKENS, WIDTH)),
    truth=[("bf16 8192x20480", "sub", BRIEF), *MLP_TRUTH],  # a new moment, made with the weights
    must_hold=PLAIN.must_hold,
)


def int8_step(state, x):
    """Momentum in int8 with a scale for every row."""
    gradients = jax.lax.optimization_barrier(jax.grad(mlp_loss)(state["params"], x))

    def update(p, m, g):
        moment = 0.9 * m["values"].astype(FLOAT) * m["scales"] + 0.1 * g
        scales = jnp.max(jnp.abs(moment), axis=1, keepdims=True) / 127
        rounded = jnp.round(moment / scales).astype(jnp.int8)
        return p - 1e-3 * moment, {"values": rounded, "scales": scales}

    pairs = {
        name: update(state["params"][name], state["opt_state"]["mu"][name], gradients[name])
        for name in gradients
    }
    return {
        "params": {name: pair[0] for name, pair in pairs.items()},
        "opt_state": {"mu": {name: pair[1] for name, pair in pairs.items()}},
    }


INT8_MOMENTS = KnownProgram(
    "momentum in int8",
    int8_step,
    (
        {
            "params": mlp(),
            "opt_state": {
                "mu": {
                    name: {"values": like(one, jnp.int8), "scales": array(one.shape[0], 1)}
                    for name, one in mlp().items()
                }
            },
        },
        array(TOKENS, WIDTH),
    ),
    truth=[("s8 8192x20480", ANY, BRIEF), ("s8 8704x20480", ANY, BRIEF), *MLP_TRUTH],
    must_hold=PLAIN.must_hold,
)


def on_fsdp(*sizes, spec):
    mesh = AbstractMesh((4,), ("fsdp",), axis_types=(AxisType.Auto,))
    return array(*sizes, sharding=NamedSharding(mesh, PartitionSpec(*spec)))


GATHERED = KnownProgram(
    "weights split over four devices and gathered where they are used",
    scanned_step,
    (
        state_of(
            {
                "up": on_fsdp(LAYERS, WIDTH, HIDDEN, spec=(None, "fsdp", None)),
                "down": on_fsdp(LAYERS, HIDDEN, WIDTH, spec=(None, None, "fsdp")),
            }
        ),
        on_fsdp(4 * TOKENS, WIDTH, spec=("fsdp", None)),
    ),
    truth=[
        ("bf16 2048x20480", "dynamic_index_in_dim", COPY),  # a device's share of one layer
        ("bf16 2048x20480", "rematted_computation", COPY),
        # Weights gathered piece by piece for one product, gradients summed so for the other.
        ("bf16 2048x20480", BACKWARD, f"{COPY}|{GRADIENT}"),
        ("bf16 2048x20480", FORWARD, COPY),
        ("bf16 3x2048x20480", ANY, COPY),
        ("f32 2048x20480", BACKWARD, GRADIENT),
        ("f32 3x2048x20480", BACKWARD, GRADIENT),
        ("bf16 2x2048x20480", BACKWARD, GRADIENT),  # summed over devices piece by piece
        ("bf16 6144x8192", BACKWARD, BRIEF),
        ("bf16 6144x8192", f"{FORWARD}/while", f"{BRIEF}|{KEPT}"),  # of a layer, and of the last
        *SCANNED_TRUTH,
    ],
    must_hold=[("bf16 8192x20480", COPY), ("f32 3x2048x20480", GRADIENT)],
    slice="v6e-4",
)

PROGRAMS = (PLAIN, ACCUMULATING, CHUNKED, SCANNED, NARROW_MOMENTS, INT8_MOMENTS, GATHERED)
