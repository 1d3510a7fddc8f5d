"""A model that reads packed documents has the loss it has on each document alone."""

from itertools import pairwise

import jax
import numpy as np
from flax import nnx

from tpukit.models import Transformer, get_preset
from tpukit.models.loss import next_token_loss
from tpukit.training.data.examples import DocumentExamples
from tpukit.training.data.token_store import ArrayShard, TokenStore

LENGTHS = [9, 5, 30, 3, 14, 2, 17]
ROW = 32


def test_packed_documents_do_not_see_each_other():
    config = get_preset("tiny", n_layers=1)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, sum(LENGTHS))
    bounds = np.cumsum([0, *LENGTHS])
    store = TokenStore((ArrayShard("array", tokens),), "array", "array", bounds)
    examples = DocumentExamples(store, ROW, config.vocab_size)
    assert len(examples) < len(LENGTHS)  # or nothing is packed
    packed = examples.read(np.arange(len(examples))[None])[0]

    # One document a row, by hand; empty rows make the packed batch as large, for one compile.
    alone = {name: np.zeros((len(LENGTHS), ROW), np.int32) for name in packed}
    alone["targets"] -= 1
    alone["positions"] += np.arange(ROW, dtype=np.int32)
    for row, (start, stop) in enumerate(pairwise(bounds)):
        alone["inputs"][row, : stop - start - 1] = tokens[start : stop - 1]
        alone["targets"][row, : stop - start - 1] = tokens[start + 1 : stop]
    empty = ((0, len(LENGTHS) - len(examples)), (0, 0))
    packed = {
        name: np.pad(value, empty, constant_values=-1 if name == "targets" else 0)
        for name, value in packed.items()
    }

    graph, shapes = nnx.split(nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0))))
    drawn = np.random.default_rng(1)
    weights = jax.tree.map(lambda s: drawn.normal(0, 0.2, s.shape).astype(s.dtype), shapes)

    @jax.jit
    def loss(weights, batch):
        model = nnx.merge(graph, weights)
        places = {name: batch[name] for name in ("positions", "segment_ids")}
        return next_token_loss(model(batch["inputs"], **places), batch["targets"])

    apart, together = loss(weights, alone), loss(weights, packed)
    assert float(together.weight) == float(apart.weight) == sum(LENGTHS) - len(LENGTHS)
    np.testing.assert_allclose(together.total, apart.total, rtol=1e-5)
    # Without the marks they do see each other, so the comparison can fail.
    unmarked = {**packed, "segment_ids": np.zeros_like(packed["segment_ids"])}
    assert not np.allclose(loss(weights, unmarked).total, apart.total, rtol=1e-4)
