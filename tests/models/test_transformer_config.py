"""Configurations refuse what cannot be built, and count exactly what the modules hold."""

import json
import math
from typing import NamedTuple

import jax
import pytest
from flax import nnx

from tpukit.errors import TPUModelError
from tpukit.models.presets import get_preset, list_presets, presets
from tpukit.models.transformer.config import RopeScaling, TransformerConfig
from tpukit.models.transformer.model import Transformer
from tpukit.parallel.sharding.trees import join_path

BASE = {"n_layers": 2, "d_model": 64, "d_ff": 128, "n_heads": 4, "vocab_size": 256}
PUBLISHED = [name for name, preset in presets().items() if preset.published_parameters]

# (preset, sequence length) -> training FLOPs a token with causal attention counted once, then with
# every key counted: the figures of the published runs these presets are compared with.
FLOPS = {
    ("llama3.1-8b", 8192): (51470401536, 57912852480),
    ("llama3.1-70b", 8192): (449222541312, 481434796032),
    ("llama3.1-70b", 131072): (932406362112, 1447802437632),
    ("llama3.1-405b", 8192): (2523955986432, 2625424588800),
    ("llama2-70b", 4096): (428385239040, 444491366400),
    ("gpt3-175b", 2048): (1061881380864, 1076376895488),
    ("maxtext2023-16B", 2048): (100864622592, 104085848064),
    ("maxtext2023-22B", 2048): (135291469824, 138915348480),
    ("maxtext2023-32B", 2048): (198508019712, 201729245184),
    ("maxtext2023-64B", 2048): (395002773504, 401445224448),
    ("maxtext2023-128B", 2048): (787992281088, 800877182976),
    ("maxtext2023-512B", 2048): (3122172788736, 3147942592512),
    ("maxtext2023-1024B", 2048): (6240319045632, 6291858653184),
}


def module_parameter_shapes(config: TransformerConfig) -> dict[str, tuple[int, ...]]:
    model = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    leaves = jax.tree_util.tree_flatten_with_path(nnx.state(model, nnx.Param))[0]
    return {join_path(path): leaf.shape for path, leaf in leaves}


def test_formats_go_by_any_name():
    config = TransformerConfig(**BASE, dtype="fp32", param_dtype="bf16")
    assert (config.dtype, config.param_dtype) == ("float32", "bfloat16")
    with pytest.raises(TPUModelError, match="dtype='int8' is not one of float32, bfloat16"):
        TransformerConfig(**BASE, dtype="int8")


@pytest.mark.parametrize("name", list_presets())
def test_the_arithmetic_lists_what_the_module_holds(name):
    config = get_preset(name)
    assert config.parameter_shapes() == module_parameter_shapes(config)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_counts_are_the_published_ones(name):
    assert get_preset(name).parameter_count().total == presets()[name].published_parameters


def test_gpt3_is_within_its_rounded_name():
    assert get_preset("gpt3-175b").parameter_count().total == pytest.approx(175e9, rel=0.005)


class Card(NamedTuple):
    """Billions as a model card rounds them.

    Attributes:
        total: All parameters.
        source: The card.
        active: Those a token touches; None where it does not say.
        towers: For images and sound, which the card counts and a preset does not have.
        digits: Behind the point.
    """

    total: float
    source: str
    active: float | None = None
    towers: float = 0.0
    digits: int = 0


LLAMA4 = "huggingface.co/meta-llama/Llama-4-{}, Model Information: 17B activated, {}B total"
CARDS = {
    "gemma4-31b": Card(30.7, "huggingface.co/google/gemma-4-31B", digits=1),
    "gemma4-26b-a4b": Card(25.2, "huggingface.co/google/gemma-4-26B-A4B", 3.8, digits=1),
    "gemma4-e2b": Card(5.1, "huggingface.co/google/gemma-4-E2B", None, 0.45, digits=1),
    "gemma4-e4b": Card(8.0, "huggingface.co/google/gemma-4-E4B", None, 0.45, digits=1),
    "llama4-scout": Card(109, LLAMA4.format("Scout-17B-16E", 109), 17, 0.9),
    "llama4-maverick": Card(400, LLAMA4.format("Maverick-17B-128E", 400), 17, 0.9),
    "qwen3-next-80b-a3b": Card(
        80, "huggingface.co/Qwen/Qwen3-Next-80B-A3B-Instruct: 80B in total and 3B activated", 3
    ),
}


@pytest.mark.parametrize("name", CARDS)
def test_counts_round_to_those_of_the_model_card(name):
    card, config = CARDS[name], get_preset(name)
    count = config.parameter_count()
    assert card.source
    assert count.total / 1e9 + card.towers == pytest.approx(card.total, rel=0.015)
    # Qwen counts what is multiplied, and no tables.
    tables = 2 * config.vocab_size * config.d_model if name.startswith("qwen") else 0
    if card.active is not None:
        assert round((count.active - tables) / 1e9, card.digits) == card.active
    assert presets()[name].published_parameters is None  # an exact one would be compared exactly


def test_every_preset_says_where_it_is_from_and_has_a_count_to_meet():
    for name, preset in presets().items():
        assert preset.source
        ours = name.startswith(("tiny", "small", "maxtext2023"))
        assert ours or name == "gpt3-175b" or name in CARDS or name in PUBLISHED, name


def test_a_token_of_mixtral_touches_two_of_eight_experts():
    # 12.9B active is the figure of the Mixtral paper (arXiv 2401.04088).
    assert get_preset("mixtral-8x7b").parameter_count().active == pytest.approx(12.9e9, rel=0.005)


@pytest.mark.parametrize(("name", "seq_len"), FLOPS)
def test_flops_are_those_of_the_published_runs(name, seq_len):
    causal, every_key = FLOPS[name, seq_len]
    assert get_preset(name).flops_per_token(seq_len).total == causal
    assert get_preset(name).flops_per_token(seq_len, causal=False).total == every_key


def test_a_window_costs_only_the_keys_it_sees():
    config = TransformerConfig(
        **BASE,
        layer_kinds={"local": {"sliding_window": 8}, "global": {}},
        layer_pattern="local, global",
    )
    seq_len = 64
    seen = sum(
        # The convention S / 2 counts half of the diagonal.
        query + 0.5 if query < window else window
        for window in (8, 64)
        for query in range(seq_len)
    )
    flops = config.flops_per_token(seq_len).attention
    assert flops == pytest.approx(12 * 4 * 16 * seen / seq_len, rel=1e-9)
    assert "before the query" in config.flops_per_token(seq_len).convention


@pytest.mark.parametrize(
    "options",
    [
        {
            "norm": "layernorm",
            "attention_bias": "qkvo",
            "mlp_bias": True,
            "positions": "learned",
            "gated_mlp": False,
        },
        {"qk_norm": True, "post_norms": True, "tied_embeddings": True},
        {"parallel_block": True, "head_dim": 32, "n_kv_heads": 2},
        {"n_experts": 4, "experts_per_token": 1, "attention_bias": "qkvo", "mlp_bias": True},
    ],
    ids=lambda options: "-".join(options),
)
def test_every_option_is_counted(options):
    config = TransformerConfig(**BASE, **options)
    shapes = module_parameter_shapes(config)
    assert config.parameter_shapes() == shapes
    assert config.parameter_count().total == sum(map(math.prod, shapes.values()))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_heads": 3}, "d_model=64 is not a multiple of n_heads=3; set head_dim"),
        ({"n_kv_heads": 3}, "n_kv_heads=3 does not divide n_heads=4"),
        ({"head_dim": 7}, "head_dim=7 gives 7 rotated channels"),
        ({"n_layers": 0}, "n_layers=0; it must be at least 1"),
        ({"activation": "sillu"}, "activation='sillu' is not one of .* Did you mean 'silu'"),
        ({"n_experts": 4}, "experts_per_token=0 with n_experts=4"),
        ({"experts_per_token": 2}, "n_experts is 0; set n_experts"),
        (
            {"layer_pattern": "5 local, global"},
            "layer_kinds and layer_pattern must be set together",
        ),
        ({"sliding_window": 0}, "sliding_window=0; it must be at least 1"),
        ({"n_experts": 2, "experts_per_token": 1, "gated_mlp": False}, "experts are always gated"),
        ({"rope_scaling": {"kind": "lama3"}}, "rope scaling 'lama3' is not known"),
        ({"d_fff": 3}, "'d_fff' is not a field of TransformerConfig. Did you mean 'd_ff'"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_errors_teach(changes, message):
    with pytest.raises(TPUModelError, match=message):
        TransformerConfig.from_dict({**BASE, **changes})


def test_an_unknown_preset_names_the_nearest():
    with pytest.raises(TPUModelError, match=r"there is no preset 'llama31-8b'.*'llama3.1-8b'"):
        get_preset("llama31-8b")


@pytest.mark.parametrize("name", list_presets())
def test_plain_data_reads_back(name):
    data = json.loads(json.dumps(get_preset(name).to_dict()))
    assert TransformerConfig.from_dict(data) == get_preset(name)
    assert presets()[name].to_dict()["source"]


def test_gemma3_has_one_global_layer_in_six():
    windows = [get_preset("gemma3-12b").layer(number).sliding_window for number in range(12)]
    assert windows == ([1024] * 5 + [None]) * 2


def test_rope_scaling_needs_a_positive_factor():
    with pytest.raises(TPUModelError, match="factor is 0"):
        RopeScaling(factor=0)


def test_keys_that_depend_on_the_length_are_refused():
    with pytest.raises(TPUModelError, match="keys could not be cached"):
        get_preset("tiny").replace(rope_scaling=RopeScaling("dynamic", factor=2.0))
