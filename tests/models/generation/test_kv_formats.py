"""Caches in few bits: what slots hold, what is lost, and that every kind of layer has them."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_decoders import latent, linear, params_of, small, windowed

from tpukit.errors import TPUValidationError
from tpukit.hardware.stored_formats import CACHE_FORMATS
from tpukit.models.generation import CacheSpec, Generator, Sampling
from tpukit.models.generation.cache_slots import QuantizedSlots, decode, encode, rotate
from tpukit.models.generation.generator import same_choices
from tpukit.parallel import create_mesh
from tpukit.quantization import Codebook

GREEDY = Sampling(temperature=0)
CONFIGS = {
    "llama": small(),
    "windows": windowed(12),
    "latent": latent(),
    "shared": small(
        layer_pattern="full, taker",
        layer_kinds={"full": {}, "taker": {"shares_keys_of": "full"}},
    ),
    "linear": linear(),
}
PROMPTS = [[7, 3, 50, 11, 9, 14, 2], [5], [*range(20)]]


def small_format(name, **changes):
    """The format with few tokens in bfloat16, so that short sequences have codes."""
    return replace(CACHE_FORMATS[name], **{"first": 2, "recent": 3, **changes})


def test_codes_lose_what_their_bits_must():
    x = jax.random.normal(jax.random.key(0), (500, 2, 64))
    for name, most in (("int8", 4e-5), ("int4", 8.2e-3)):
        format = CACHE_FORMATS[name]
        codes, scales = encode(format, x, None)
        assert codes.shape[-1] == format.code_bytes(64)
        lost = np.asarray(decode(format, codes, scales, None, jnp.float32) - x)
        assert np.mean(lost**2) < most
    # No code of 16 even steps loses less than (largest / 7.5)² / 12 of evenly spread values.
    even = jnp.linspace(-1, 1, 32)[None]
    codes, scales = encode(CACHE_FORMATS["int4"], even, None)
    back = decode(CACHE_FORMATS["int4"], codes, scales, None, jnp.float32)
    assert float(jnp.abs(back - even).max()) <= 1 / 15 + 1e-3


def test_codes_of_a_codebook_are_its_nearest_entries():
    format = CACHE_FORMATS["pq4"]
    rng = np.random.default_rng(0)
    entries = rng.integers(-100, 100, (1, 256, 2)).astype(np.int8)
    book = Codebook(jnp.asarray(entries), jnp.float32(0.02))
    x = rng.normal(size=(3, 16)).astype(np.float32)
    codes, scales = encode(format, jnp.asarray(x), book)
    size = np.asarray(scales, np.float32)
    np.testing.assert_allclose(size[:, 0], np.sqrt((x**2).mean(1)), rtol=4e-3)
    wanted = (x / size).reshape(3, 8, 1, 2)
    nearest = ((wanted - 0.02 * entries[0].astype(np.float32)) ** 2).sum(-1).argmin(-1)
    np.testing.assert_array_equal(codes, nearest)
    back = decode(format, codes, scales, book, jnp.float32)
    np.testing.assert_allclose(
        back, (0.02 * entries[0][nearest].astype(np.float32)).reshape(3, 16) * size, rtol=1e-6
    )


def test_turning_twice_changes_nothing_and_products_not_at_all():
    q, k = jax.random.normal(jax.random.key(0), (2, 5, 24))
    np.testing.assert_allclose(rotate(rotate(q)), q, atol=1e-6)
    np.testing.assert_allclose(rotate(q) @ rotate(k).T, q @ k.T, atol=1e-5)


@pytest.mark.parametrize("slots", [32, 8])
def test_first_and_newest_tokens_are_read_as_they_came(slots):
    """Against a plain record of positions, over a ring that is written several times."""
    rng, rows, width = np.random.default_rng(0), 3, 8
    format = small_format("int4")
    told = jnp.asarray(rng.normal(size=(rows, 10, 1, width)), jnp.bfloat16)
    lengths = jnp.asarray([10, 1, 4])
    held = QuantizedSlots.empty((2, rows, slots), 1, width, format, None).fill(1, told, lengths)
    record = [{p: told[r, p, 0] for p in range(int(lengths[r]))} for r in range(rows)]
    for step in range(12):
        token = jnp.asarray(rng.normal(size=(rows, 1, width)), jnp.bfloat16)
        now = lengths + step
        held = held.put(1, token, now)
        for row in range(rows):
            record[row][int(now[row])] = token[row, 0]
        found = np.asarray(held.read(1, now, jnp.float32))
        for row in range(rows):
            newest = int(now[row])
            for position, kept in record[row].items():
                if position <= newest - slots:
                    continue
                error = np.abs(found[row, position % slots, 0] - np.asarray(kept, np.float32))
                is_wide = position < format.first or position > newest - format.recent
                assert error.max() <= (0 if is_wide else 0.45), (position, newest)
    assert not np.asarray(held.codes[0]).any()  # of the other layer


CHEAP = ("llama",)


@pytest.mark.parametrize(
    "name", [n if n in CHEAP else pytest.param(n, marks=pytest.mark.slow) for n in CONFIGS]
)
def test_narrow_caches_of_every_kind_follow_the_wide_one(name):
    config = CONFIGS[name]
    params = params_of(config)
    after = np.random.default_rng(0).integers(0, 64, (3, 12))
    wide = Generator(config, params).follow(PROMPTS, after)
    lost = {}
    for kv, format in (("int8", small_format("int8")), ("int4", small_format("int4"))):
        found = Generator(config, params, kv=format).follow(PROMPTS, after)
        lost[kv] = np.sqrt(((found - wide) ** 2).mean() / (wide**2).mean())
    assert 0 < lost["int8"] < 0.015
    assert lost["int8"] < lost["int4"] < 0.2


def test_one_by_one_is_what_generation_chooses():
    config = CONFIGS["llama"]
    generator = Generator(config, params_of(config), kv=small_format("int4"))
    sampling = Sampling(temperature=0.7, seed=5)
    found = generator.generate(PROMPTS[:1], max_new_tokens=12, sampling=sampling)
    assert same_choices(generator, PROMPTS[0], found.tokens[0], sampling).all()
    other = [(one + 1) % 64 for one in found.tokens[0]]
    assert not same_choices(generator, PROMPTS[0], other, sampling).all()


@pytest.mark.slow
@pytest.mark.parametrize("loop", [True, False])
def test_devices_and_loops_change_no_token_of_a_narrow_cache(loop):
    config = CONFIGS["llama"]
    params, kv = params_of(config), small_format("int4")
    asked = {"max_new_tokens": 10, "sampling": GREEDY}
    alone = Generator(config, params, kv=kv, loop=True).generate(PROMPTS, **asked)
    if loop:
        mesh = create_mesh(
            mesh_shape=(2, 2), axis_names=("data", "tensor"), devices=jax.devices()[:4]
        )
        params = jax.device_put(
            params, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        )
    other = Generator(config, params, kv=kv, loop=loop).generate(PROMPTS, **asked)
    assert other.tokens == alone.tokens


def test_formats_that_are_none():
    with pytest.raises(TPUValidationError, match="ean 'int4'"):
        CacheSpec.of("intt4")
    with pytest.raises(TPUValidationError, match="needs codebooks"):
        CacheSpec.of("pq4")
    with pytest.raises(TPUValidationError, match="no multiple"):
        CACHE_FORMATS["pq2"].code_bytes(6)
