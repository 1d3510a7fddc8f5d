"""Every Hugging Face type that is read: transformers itself says what its logits and tokens are."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from huggingface_models import (  # noqa: E402
    MODELS,
    VOCABULARY,
    greedy_tokens,
    logits_of,
    make_model,
)

from tpukit.models import export_huggingface, import_huggingface  # noqa: E402
from tpukit.models.generation import Generator, Sampling  # noqa: E402
from tpukit.models.huggingface.weights import ImportedModel  # noqa: E402

LENGTH, PROMPTS, NEW = 24, (5, 11), 16
# What a model with such a configuration is written as: the plainest type that holds it.
WRITTEN_AS = {"phi3": "LlamaForCausalLM"}


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(0).integers(1, VOCABULARY, (2, LENGTH))


def in_float32(folder):
    read = import_huggingface(folder)
    return ImportedModel(read.config.replace(dtype="float32"), read.params)


@pytest.mark.parametrize("name", MODELS)
def test_logits_tokens_and_files_are_those_of_transformers(name, tokens, tmp_path):
    theirs = make_model(name)
    theirs.save_pretrained(tmp_path / "theirs")
    expected = logits_of(theirs, tokens)
    ours = in_float32(tmp_path / "theirs")
    module = ours.module()
    found = np.asarray(jax.jit(lambda ids: module(ids))(jnp.asarray(tokens)))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * max(1, abs(expected).max()))

    prompts = [row[:length] for row, length in zip(tokens, PROMPTS, strict=True)]
    generated = Generator(ours.config, ours.params).generate(
        prompts, max_new_tokens=NEW, sampling=Sampling(temperature=0)
    )
    if "longrope" not in json.dumps(ours.config.to_dict()):
        # There transformers changes frequencies as a sequence grows past the original length.
        assert generated.tokens == tuple(greedy_tokens(theirs, prompt, NEW) for prompt in prompts)

    export_huggingface(ours.params, ours.config, tmp_path / "ours")
    back, problems = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", attn_implementation="eager", output_loading_info=True
    )
    assert not any(problems.values()), problems
    assert type(back).__name__ == WRITTEN_AS.get(name, type(theirs).__name__)
    np.testing.assert_allclose(logits_of(back.eval(), tokens), expected, rtol=0, atol=1e-5)
    read_again = import_huggingface(tmp_path / "ours").params
    jax.tree.map(np.testing.assert_array_equal, read_again, dict(ours.params))
