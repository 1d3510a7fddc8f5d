"""What a served model holds and reads, against the arrays of generation and published figures."""

import math
import subprocess
import sys

import jax
import pytest

from tpukit.hardware.stored_formats import CACHE_FORMATS
from tpukit.kernels import quantize_weight
from tpukit.models import get_preset, list_presets
from tpukit.models.generation.cache import CacheSpec, empty_cache
from tpukit.planner.cost.serving_model import ServedModel
from tpukit.step import Workload

# llama3.1-70b by hand: 80 layers of q, o (64 heads), k, v (8), gate, up, down and two norms, a
# last norm, and the two tables.
LAYER = 8192 * 128 * (2 * 64 + 2 * 8) + 3 * 8192 * 28672 + 2 * 8192
TABLES = 2 * 128256 * 8192
PARAMETERS_70B = 80 * LAYER + 8192 + TABLES
NORMS = (2 * 80 + 1) * 8192
COLUMNS = 80 * (2 * 8192 + 2 * 1024 + 2 * 28672 + 8192)  # of q, o; k, v; gate, up; down


def model(name, **changes):
    return ServedModel.of(get_preset(name, **changes))


@pytest.mark.parametrize("name", list_presets())
def test_every_preset_holds_what_generation_makes(name):
    config = get_preset(name, dtype="bfloat16")
    for slots in (100, min(config.max_seq_len, 20_000)):
        made = jax.eval_shape(lambda slots=slots: empty_cache(config, rows=3, slots=slots))
        nbytes = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(made))
        assert 3 * ServedModel.of(config).cache_bytes(slots) == nbytes


@pytest.mark.parametrize("name", ["llama3.1-8b", "gemma3-12b", "deepseek-v3"])
@pytest.mark.parametrize("cache", ["fp8", "int8", "int4", "pq4", "pq2"])
def test_narrow_caches_take_what_generation_makes(name, cache):
    config = get_preset(name, dtype="bfloat16")
    spec = CacheSpec(CACHE_FORMATS[cache])
    for slots in (30, 4096):
        made = jax.eval_shape(lambda slots=slots: empty_cache(config, rows=3, slots=slots, kv=spec))
        nbytes = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(made))
        assert 3 * ServedModel.of(config).cache_bytes(slots, cache) == nbytes


@pytest.mark.parametrize("name", list_presets())
def test_every_preset_has_its_parameters_and_products(name):
    served = model(name)
    count = get_preset(name, mtp_layers=0).parameter_count()
    assert served.weight_bytes("bf16") == 2 * count.total
    assert served.products == pytest.approx(count.matmul_active, rel=1e-12)
    assert served.others >= 0


def test_weights_and_cache_by_hand():
    served = model("llama3.1-70b")
    assert served.weight_bytes("bf16") == 2 * PARAMETERS_70B
    matrices = PARAMETERS_70B - TABLES - NORMS
    wide = 2 * (TABLES + NORMS)
    eight_bits = wide + matrices + 4 * COLUMNS
    assert served.weight_bytes("int8") == served.weight_bytes("fp8") == eight_bits
    assert served.weight_bytes("int4") == wide + matrices * 4.25 / 8
    assert served.cache_bytes(8192) == 80 * 2 * 8 * 128 * 2 * 8192
    local = model("gemma3-12b")  # 40 of its 48 layers hold 1024 keys, not more
    assert local.cache_bytes(8192) == 2 * 8 * 256 * 2 * (8 * 8192 + 40 * 1024)
    assert local.cache_bytes(512) == 2 * 8 * 256 * 2 * 48 * 512


def test_latents_take_what_the_paper_says():
    """DeepSeek-V3: 512 + 64 numbers of every token in each of 61 layers, for all heads."""
    served = model("deepseek-v3")
    assert served.cache_bytes(1000) == 61 * (512 + 64) * 2 * 1000
    assert served.cache_bytes(1000, "fp8") == 61 * (512 + 64) * 1000
    grouped = model("llama3.1-405b").cache_bytes(1000)
    assert grouped / served.cache_bytes(1000) > 7


def test_layers_that_share_keys_hold_none_and_read_them():
    """Gemma 4 E2B: 20 of 35 layers take the keys of one before them."""
    served, config = model("gemma4-e2b"), get_preset("gemma4-e2b")
    sharing = [kind for kind in served.kinds if kind.layer.shares_keys_of is not None]
    assert sum(kind.layers for kind in sharing) == 20
    assert sum(kind.cache_bytes(8192, "bf16") for kind in sharing) == 0
    own = [layer for _, layer in config.layers() if layer.shares_keys_of is None]
    held = sum(
        2 * 2 * layer.n_kv_heads * layer.head_dim * min(8192, layer.sliding_window or 8192)
        for layer in own
    )
    assert served.cache_bytes(8192) == held
    every = sum(
        2 * 2 * layer.n_kv_heads * layer.head_dim * min(8192, layer.sliding_window or 8192)
        for _, layer in config.layers()
    )
    assert served.bytes_attended(8192) == every


def test_states_do_not_grow_with_the_context():
    """Qwen3-Next: 36 layers keep a state of 32 heads of 128 x 128 and three inputs of a token."""
    served = model("qwen3-next-80b-a3b")
    linear = next(kind for kind in served.kinds if kind.layer.delta is not None)
    inputs = 3 * (2 * 16 * 128 + 32 * 128) * 2
    assert linear.layers == 36
    for context in (16, 262_144):
        assert linear.cache_bytes(context, "bf16") == 36 * (32 * 128 * 128 * 4 + inputs)
    assert linear.cache_bytes(16, "fp8") == linear.cache_bytes(16, "bf16")
    grown = served.cache_bytes(2000) - served.cache_bytes(1000)
    assert grown == 12 * 2 * 2 * 256 * 2 * 1000  # 12 layers of two heads of 256


@pytest.mark.parametrize("name", ["llama3.1-8b", "gemma3-12b", "deepseek-v3", "gpt-oss-20b"])
def test_a_cache_in_fp8_takes_half(name):
    served = model(name)
    assert 2 * served.cache_bytes(5000, "fp8") == served.cache_bytes(5000)
    assert 2 * served.bytes_attended(5000, "fp8") == served.bytes_attended(5000)


@pytest.mark.parametrize("format", ["int8", "fp8", "int4"])
@pytest.mark.parametrize("changes", [{}, {"n_experts": 4, "experts_per_token": 2}])
def test_weights_take_what_the_quantized_arrays_of_a_model_take(format, changes):
    config = get_preset("tiny", **changes)
    held = 0
    parameters = Workload(config, batch_size=8, sequence_length=32).state_shapes().params
    for path, leaf in jax.tree_util.tree_leaves_with_path(parameters["layers"]):
        if leaf.ndim < 3 or "router" in str(path):  # layers are stacked
            held += 2 * leaf.size
            continue
        each = jax.ShapeDtypeStruct(leaf.shape[-2:], leaf.dtype)
        narrow = jax.eval_shape(lambda w: quantize_weight(w, format), each)
        held += math.prod(leaf.shape[:-2]) * narrow.nbytes
    outside = jax.tree.leaves({key: parameters[key] for key in parameters if key != "layers"})
    held += sum(2 * leaf.size for leaf in outside)
    assert ServedModel.of(config).weight_bytes(format) == held


def test_a_mixture_reads_the_experts_that_a_batch_chooses():
    served = model("mixtral-8x7b")
    table = 2 * 32_000 * 4096  # looked up, and not read whole
    whole = served.weight_bytes("bf16") - table
    experts = 2 * 32 * 8 * 3 * 4096 * 14336
    assert served.bytes_read("bf16", 1) == pytest.approx(whole - experts * 6 / 8)
    assert served.bytes_read("bf16", 64) == pytest.approx(whole, rel=1e-6)
    dense = model("llama3.1-8b")
    assert dense.bytes_read("bf16", 1) == dense.weight_bytes("bf16") - 2 * 128_256 * 4096
    tied = model("llama3.2-1b")  # its table is its head
    assert tied.bytes_read("bf16", 1) == tied.weight_bytes("bf16")


def test_attention_of_a_token_meets_latents_as_they_are_kept():
    served = model("deepseek-v3")
    pairs = sum(kind.token_products(1000) for kind in served.kinds)
    assert pairs == 61 * 128 * (2 * 512 + 64) * 1000
    prompt = sum(kind.prompt_products(2048) for kind in served.kinds)
    assert prompt == 61 * 128 * (192 + 128) * 2048 * 2048


def test_chunks_bound_what_a_prompt_meets():
    served = model("llama4-scout")
    chunked = next(kind for kind in served.kinds if kind.layer.attention_chunk)
    whole = next(kind for kind in served.kinds if not kind.layer.attention_chunk)
    assert (chunked.layers, whole.layers) == (36, 12)
    assert chunked.tokens_held(100_000) == 8192
    assert chunked.prompt_products(16_384) == 2 * chunked.prompt_products(8192)
    assert whole.prompt_products(16_384) > 3 * whole.prompt_products(8192)


def test_a_serving_plan_needs_no_jax():
    code = (
        "import sys\n"
        "from tpukit.planner.serving import plan_serving\n"
        "plan_serving('gemma4-e2b', generations=['v6e']).to_dict()\n"
        "sys.exit('jax' in sys.modules or 'flax' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
