"""Generating with a cache gives what the whole forward pass gives, token by token."""

import dataclasses
import re

import jax
import numpy as np
import pytest

from tpukit.errors import TPUModelError, TPUValidationError
from tpukit.models import Execution, get_preset
from tpukit.models.adapters import TransformerAdapter
from tpukit.models.generation import Generator, Sampling, generate
from tpukit.models.generation.forward import restack_layers, unstack_layers
from tpukit.models.generation.programs import DecodingPrograms
from tpukit.step import Workload

PROMPTS = [[7, 3, 250, 11, 90, 14, 2], [5], [200, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]]

CONFIGS = {
    "dense": get_preset("tiny"),
    "moe": get_preset("tiny-moe"),
    # A capacity drops tokens of whole sequences; generation must not.
    "capacity": get_preset("tiny-moe", routing="capacity", capacity_factor=0.5),
    "window": get_preset("tiny", sliding_window=3),
    "mixed windows": get_preset(
        "tiny",
        n_layers=5,
        layer_kinds={"local": {"sliding_window": 4, "rope_theta": 100.0}, "global": {}},
        layer_pattern="local, global",
    ),
    "learned, biased, parallel": get_preset(
        "tiny", positions="learned", norm="layernorm", attention_bias="qkvo",
        mlp_bias=True, parallel_block=True,
        gated_mlp=False, activation="gelu", tied_embeddings=True,
    ),
    "normed": get_preset("tiny", qk_norm=True, post_norms=True, scale_embeddings=True),
}  # fmt: skip


def sharp(config, seed=1):
    """Parameters whose logits differ enough for a likeliest token to be beyond rounding."""
    work = Workload(config, batch_size=1, sequence_length=8)
    params = jax.jit(work.init)(jax.random.key(seed)).params
    return jax.tree.map(lambda leaf: leaf * 3 if leaf.ndim >= 2 else leaf, params)


@pytest.fixture(scope="module")
def dense():
    """A generator whose programs the tests share."""
    return Generator(CONFIGS["dense"], sharp(CONFIGS["dense"]))


GREEDY = Sampling(temperature=0)


SELDOM = ("capacity", "learned, biased, parallel", "normed")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if name in SELDOM else name for name in CONFIGS],
)
def test_greedy_tokens_are_those_of_the_whole_forward_pass(name):
    config = CONFIGS[name]
    params = sharp(config)
    found = generate(config, params, PROMPTS, max_new_tokens=12, temperature=0)
    rows = [[*prompt, *new] for prompt, new in zip(PROMPTS, found.tokens, strict=True)]
    whole = np.zeros((len(rows), max(map(len, rows))), np.int32)
    for place, row in enumerate(rows):
        whole[place, : len(row)] = row
    adapter = TransformerAdapter(config.replace(routing="dropless"))
    forward = jax.jit(lambda params, tokens: adapter.module(params, Execution())(tokens))
    likeliest = np.asarray(forward(params, whole)).argmax(-1)
    for place, prompt in enumerate(PROMPTS):
        start = len(prompt) - 1
        assert found.tokens[place] == tuple(likeliest[place, start : start + 12])
    assert found.ended == ("length",) * 3
    assert len(set(found.tokens[0])) > 1


def test_greedy_tokens_are_those_of_float64(reference_logits):
    config = CONFIGS["mixed windows"]
    params = sharp(config)
    found = generate(config, params, [PROMPTS[0]], max_new_tokens=8, temperature=0).tokens[0]
    whole = np.asarray([[*PROMPTS[0], *found]])
    likeliest = reference_logits(params, config, whole)[0].argmax(-1)
    assert tuple(likeliest[len(PROMPTS[0]) - 1 : -1]) == found


def test_a_row_is_the_same_alone_and_streamed(dense):
    sampling = Sampling(temperature=0.8, top_k=20, top_p=0.9, seed=5)
    whole = dense.generate(PROMPTS, max_new_tokens=9, sampling=sampling)
    assert whole.compile_s > 0
    parts = list(dense.stream(PROMPTS, max_new_tokens=9, sampling=sampling, every=2))
    assert [len(part.tokens[0]) for part in parts] == [1, 3, 5, 7, 9]
    assert parts[-1].tokens == whole.tokens
    assert parts[-1].compile_s == 0
    alone = dense.generate(PROMPTS[:1], max_new_tokens=9, sampling=sampling)
    assert alone.tokens[0] == whole.tokens[0]
    again, other = (
        dense.generate(PROMPTS, max_new_tokens=9, sampling=dataclasses.replace(sampling, seed=seed))
        for seed in (5, 6)
    )
    assert again.tokens == whole.tokens != other.tokens
    assert other.compile_s == 0


def test_parameters_split_over_a_mesh_give_the_same_tokens(dense):
    work = Workload(dense.config, batch_size=8, sequence_length=8, strategy="fsdp+megatron")
    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    split = jax.device_put(dense.params, work.layout(mesh).shardings)
    found, truth = (
        generator.generate(PROMPTS, max_new_tokens=9, sampling=GREEDY)
        for generator in (Generator(work, split), dense)
    )
    assert found.tokens == truth.tokens


def test_an_end_token_ends_its_row_only(dense):
    free = dense.generate(PROMPTS, max_new_tokens=9, sampling=GREEDY)
    end = free.tokens[0][4]
    found = dense.generate(PROMPTS, max_new_tokens=9, sampling=GREEDY, eos=end)
    for before, after, ended in zip(free.tokens, found.tokens, found.ended, strict=True):
        cut = before.index(end) if end in before else len(before)
        assert after == before[:cut]
        assert ended == ("end" if end in before else "length")


def test_every_row_ending_stops_the_loop(dense):
    free = dense.generate([[5]] * 3, max_new_tokens=1, sampling=GREEDY)
    assert free.step_time_s is None
    end = free.tokens[0][0]
    found = dense.generate([[5]] * 3, max_new_tokens=20, sampling=GREEDY, eos=end)
    assert (found.tokens, found.ended, found.decode_steps) == (((),) * 3, ("end",) * 3, 0)


@pytest.mark.parametrize(
    ("prompts", "options", "error", "message"),
    [
        ([], {}, TPUValidationError, "there are no prompts"),
        ([[1], []], {}, TPUValidationError, r"prompt 1 has shape \(0,\)"),
        ([[1.5]], {}, TPUValidationError, "dtype float64"),
        ([[1, 320]], {}, TPUModelError, "has token 320, but the vocabulary of 'tiny' is 0 to 319"),
        ([[-1]], {}, TPUModelError, "has token -1"),
        ([[1]], {"max_new_tokens": 0}, TPUValidationError, "max_new_tokens=0"),
        ([[1]], {"max_new_tokens": 128}, TPUModelError, "exceed max_seq_len=128 of 'tiny'"),
        ([[1]], {"temperature": -1}, TPUValidationError, "temperature=-1"),
        ([[1]], {"top_k": 0}, TPUValidationError, "top_k=0"),
        ([[1]], {"top_p": 0.0}, TPUValidationError, "above 0 and at most 1"),
        ([[1]], {"seed": -1}, TPUValidationError, "seed=-1"),
    ],
)
def test_wrong_input_is_refused(prompts, options, error, message):
    with pytest.raises(error, match=message):
        generate("tiny", {}, prompts, **options)


def test_somebody_elses_model_is_refused():
    own = Workload((lambda rng: {}, lambda params, batch: 0.0), batch_size=1, sequence_length=4)
    with pytest.raises(TPUModelError, match="reference transformer, but this is tuple"):
        generate(own, {}, [[1]])


def test_a_result_shows_itself(dense):
    found = dense.generate(PROMPTS, max_new_tokens=3, sampling=GREEDY)
    data = found.to_dict()
    assert data["origin"] == "measured"
    assert data["tokens"] == [list(row) for row in found.tokens]
    assert data["step_time_s"] == found.decode_s / 2
    assert found.__rich__().row_count == 3


@pytest.mark.parametrize("name", ["dense", "mixed windows"])
def test_layers_without_a_loop_give_the_same_tokens(name):
    config, params = CONFIGS[name], sharp(CONFIGS[name])
    apart, looped = (Generator(config, params, loop=loop) for loop in (False, True))

    def tokens(generator, **options):
        # More than one turn of eight tokens, and some that are no turn.
        return generator.generate(PROMPTS, max_new_tokens=13, sampling=GREEDY, **options).tokens

    whole = tokens(apart)
    assert whole == tokens(looped)
    # All rows end, at places of their own, some of them within a turn.
    ends = tuple({row[place] for row, place in zip(whole, (3, 5, 10), strict=True)})
    assert tokens(apart, eos=ends) == tokens(looped, eos=ends)
    prepared = unstack_layers(params)
    jax.tree.map(np.testing.assert_array_equal, restack_layers(prepared), dict(params))


def test_weights_laid_apart_are_read_where_they_lie():
    """No weight is cut, joined or copied in the program: it would be read once more a token."""
    config = get_preset("tiny", n_layers=3)
    programs = DecodingPrograms(config, loop=False)
    params = jax.eval_shape(unstack_layers, programs.abstract_params())
    state, *numbers = programs.decode_arguments(rows=2, slots=32)
    decode = programs.decode(sampling=GREEDY)
    text = decode.lower(params, state, *numbers).compile().as_text()
    assert " while(" in text
    moved = re.findall(r"(\w+)\[([\d,]+)\]\S* (?:concatenate|slice|dynamic-slice|copy)\(", text)
    weights = {(64, 64 + 2 * 32), (64, 64), (64, 128), (64, 320), (128, 64)}
    shapes = {tuple(map(int, dims.split(","))) for _, dims in moved}
    assert not {tuple(size for size in shape if size != 1) for shape in shapes} & weights
