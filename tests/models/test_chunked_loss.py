"""A loss cut into chunks is the whole loss, gradients and all, one chunk's logits at a time."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tpukit.errors import TPUModelError
from tpukit.models.loss import (
    LOGITS_BYTES,
    MIN_TOKENS,
    TokenSplit,
    chunked_next_token_loss,
    count_chunks,
    next_token_loss,
)
from tpukit.models.presets import get_preset
from tpukit.parallel.mesh.mesh import create_mesh
from tpukit.parallel.sharding.activations import activation_rules
from tpukit.step.workload import Workload


def draw(seed, batch=2, length=6, width=4, vocab=11, masked=0.3):
    rng = np.random.default_rng(seed)
    targets = rng.integers(0, vocab, (batch, length))
    return (
        jnp.asarray(rng.normal(size=(batch, length, width)), jnp.float32),
        jnp.asarray(rng.normal(size=(width, vocab)) * 2, jnp.float32),
        jnp.asarray(np.where(rng.random(targets.shape) < masked, -1, targets), jnp.int32),
    )


def whole(x, kernel, targets, z_loss=0.0):
    loss = next_token_loss(x @ kernel, targets, z_loss=z_loss)
    return loss.total, loss.weight


def cut(x, kernel, targets, z_loss=0.0, chunks=1):
    loss = chunked_next_token_loss(x, kernel, targets, chunks=chunks, z_loss=z_loss)
    return loss.total, loss.weight


def with_gradients(function, args, **options):
    def scaled(x, kernel, targets):
        total, weight = function(x, kernel, targets, **options)
        return 3 * total, weight  # a cotangent that is not one

    return jax.value_and_grad(scaled, argnums=(0, 1), has_aux=True)(*args)


def assert_same(seen, expected):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), seen, expected
    )


def step(function, **options):
    return jax.jit(lambda *args: with_gradients(function, args, **options))


@pytest.mark.parametrize(("chunks", "z_loss"), [(1, 0.0), (4, 0.1), (5, 0.0), (12, 0.1)])
def test_values_and_gradients_are_those_of_whole_logits(chunks, z_loss):
    cases = [draw(seed, masked=masked) for seed, masked in enumerate((0.0, 0.5, 1.0))]
    seen = step(cut, z_loss=z_loss, chunks=chunks)
    expected = step(whole, z_loss=z_loss)
    for args in cases:
        assert_same(seen(*args), expected(*args))


def test_without_gradients_the_loss_is_the_same():
    args = draw(0)
    assert_same(cut(*args, chunks=3), whole(*args))


def test_a_frozen_head_leaves_the_other_gradient_as_it_is():
    args = draw(0)

    def total(x, kernel, targets, frozen):
        return 3 * chunked_next_token_loss(x, kernel, targets, chunks=3, frozen=frozen).total

    seen, expected = (
        jax.value_and_grad(total, argnums=(0, 1))(*args, frozen) for frozen in (True, False)
    )
    assert_same((seen[0], seen[1][0]), (expected[0], expected[1][0]))
    assert not seen[1][1].any()


def test_the_gradient_of_the_head_is_summed_in_float32():
    x, kernel, targets = draw(0, batch=1, length=2048, vocab=3, masked=0)
    # All tokens push the same way: a sum in bfloat16 would stall long before the last of them.
    low = (jnp.abs(x).astype(jnp.bfloat16), kernel.astype(jnp.bfloat16), targets)
    high = (low[0].astype(jnp.float32), low[1].astype(jnp.float32), targets)
    seen = step(cut, chunks=512)(*low)[1][1]
    exact = step(whole)(*high)[1][1]
    assert seen.dtype == jnp.bfloat16
    # The products' operands and the sum are rounded to 8 bits once; every entry is in the hundreds.
    np.testing.assert_allclose(seen.astype(jnp.float32), exact, rtol=2.0**-7)


SPLITS = [
    ("fsdp", {"fsdp": 8}),
    ("megatron+sequence", {"model": 4}),
    ("fsdp+context+megatron", {"fsdp": 2, "context": 2, "model": 2}),
]


@pytest.fixture(scope="module", params=SPLITS, ids=lambda one: one[0])
def on_a_mesh(request):
    strategy, sizes = request.param
    mesh = create_mesh(
        mesh_shape=tuple(sizes.values()),
        axis_names=tuple(sizes),
        devices=jax.devices()[: int(np.prod(list(sizes.values())))],
    )
    batch = P("fsdp") if "fsdp" in sizes else P()
    head = P("fsdp" if "fsdp" in sizes else None, "model" if "model" in sizes else None)
    args = [
        jax.device_put(leaf, NamedSharding(mesh, spec))
        for leaf, spec in zip(
            draw(1, batch=8, length=12, width=24, vocab=16), (batch, head, batch), strict=True
        )
    ]
    with activation_rules(mesh, strategy):
        compiled = jax.jit(lambda *args: with_gradients(cut, args, chunks=3)).lower(*args).compile()
    return args, compiled, 16 // sizes.get("model", 1)


def test_every_split_of_tokens_and_vocabulary(on_a_mesh):
    args, compiled, _ = on_a_mesh
    assert_same(compiled(*args), with_gradients(whole, [np.asarray(leaf) for leaf in args]))


def test_the_head_is_gathered_and_its_gradient_summed_outside_the_loop(on_a_mesh):
    _, compiled, vocab_here = on_a_mesh
    talk = [line for line in compiled.as_text().splitlines() if re.search(r"= \S+ all-", line)]
    of_the_head = [line for line in talk if re.search(rf"\[(1,)?24,{vocab_here}\]", line)]
    assert not [line for line in of_the_head if "/while/body/" in line]
    assert not [line for line in talk if "all-to-all" in line]


def test_no_array_of_all_logits():
    def largest(chunks):
        args = draw(0, batch=2, length=64, vocab=512)
        function = jax.jit(lambda *args: with_gradients(cut, args, chunks=chunks))
        return function.lower(*args).compile().memory_analysis().temp_size_in_bytes

    all_logits = 2 * 64 * 512 * 4
    assert largest(1) > all_logits
    assert largest(16) < all_logits / 4


ALONE = TokenSplit(None)


@pytest.mark.parametrize(
    ("wanted", "logits", "expected"),
    [
        (None, (1024, 8192, 128256), 1),
        (5, (1, 8, 10), 5),
        ("auto", (8, 16, 256), 1),
        ("auto", (1, LOGITS_BYTES // 2 // 65536, 65536), 1),
        ("auto", (2, LOGITS_BYTES // 2 // 65536, 65536), 2),
        ("auto", (3, 8192, 128256), 12),  # llama3.1-8b, three examples a device
        ("auto", (1, MIN_TOKENS, 2**20), 1),  # a chunk this small would cost more than it saves
        ("auto", (1, 9 * 8192, 2**16), 18),
        ("auto", (1, 8209 * 9, 2**16), 19),  # of a prime and 9 only 27 divides: padding is cheaper
    ],
)
def test_how_many(wanted, logits, expected):
    assert count_chunks(wanted, logits, itemsize=2, split=ALONE) == expected


def test_what_a_device_holds_decides():
    mesh = create_mesh(mesh_shape=(4, 2), axis_names=("fsdp", "model"))
    logits = (16, 8192, 65536)
    with activation_rules(mesh, "fsdp+megatron"):
        split = TokenSplit.of(logits)
    assert (split.ways(0), split.ways(1), split.ways(2)) == (4, 1, 2)
    assert count_chunks("auto", logits, itemsize=2, split=split) == 4
    assert count_chunks("auto", logits, itemsize=2, split=ALONE) == 32


@pytest.mark.parametrize("chunks", [0, -1, True, 2.0, "some"])
def test_chunks_must_be_a_number(chunks):
    with pytest.raises(TPUModelError, match="expected 'auto'"):
        Workload("tiny", batch_size=8, sequence_length=8, loss_chunks=chunks)


def test_somebodys_own_loss_is_given_whole_logits():
    seen = []

    def loss(logits, batch):
        seen.append(logits.shape)
        return next_token_loss(logits, batch["targets"])

    work = Workload("tiny", batch_size=2, sequence_length=8, loss=loss)
    jax.eval_shape(work.train_step, work.state_shapes(), work.batch_shapes())
    assert seen[0] == (2, 8, get_preset("tiny").vocab_size)
    with pytest.raises(TPUModelError, match="or a loss=; leave it out"):
        work.replace(loss_chunks=2)


def test_a_loss_of_ones_own_may_start_from_activations():
    seen = []

    def from_activations(x, kernel, targets):
        seen.append((x.shape, kernel.shape, targets.shape))
        return next_token_loss(x @ kernel, targets)

    config = get_preset("tiny")
    work = Workload(config, batch_size=2, sequence_length=8, loss_chunks=from_activations)
    jax.eval_shape(work.train_step, work.state_shapes(), work.batch_shapes())
    assert seen[0] == ((2, 8, config.d_model), (config.d_model, config.vocab_size), (2, 8))
    assert work.to_dict()["loss_chunks"] == "from_activations"
