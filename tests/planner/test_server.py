"""Seconds of a served model's passes, by hand."""

import pytest

from tpukit.compiler.timeline.machine import Machine
from tpukit.hardware import Slice
from tpukit.models import get_preset
from tpukit.planner.cost import serving_model
from tpukit.planner.cost.serving_model import (
    ServedFormats,
    ServedModel,
    Server,
    ServingTraffic,
    room_bytes,
    servers_on,
)

SHARE = 0.43  # of the HBM rate that attention over a cache reaches
START = 24 * 1.3e-6  # of the ops of one layer
WEIGHTS_8B = 32 * (4096 * 128 * (2 * 32 + 2 * 8) + 3 * 4096 * 14336) + 128_256 * 4096
WEIGHTS_70B = 80 * (8192 * 128 * (2 * 64 + 2 * 8) + 3 * 8192 * 28672) + 128_256 * 8192
REACHED = 918e12 * 0.85 / 0.95  # of v6e's peak by products in a step
MEAN = 4096  # tokens that the decoded sequences have


def served(name, on, *, tensor, batch=1, prompt=MEAN - 1, new=2, **formats):
    traffic = ServingTraffic(batch=batch, prompt=prompt, new=new)
    model = ServedModel.of(get_preset(name))
    return Server(model, Slice.parse(on), traffic, tensor, ServedFormats(**formats))


def test_llama_70b_on_four_chips_by_hand():
    """512 sequences on v5p-8: products wait for FLOPs, attention for the cache, sums for links."""
    found = served("llama3.1-70b", "v5p-8", tensor=4, batch=512, prompt=512, new=512).decode()
    products = 2 * WEIGHTS_70B * 512 / 4 / (459e12 * 0.90 / 0.95)
    cache = 80 * 2 * 8 * 128 * 2 * 768 * 512 / 4 / (2765e9 * 0.87) / SHARE
    # 2x2x1 chips, no axis a ring: two links of 90 GB/s a chip; three quarters come from others.
    once = 512 * 8192 * 2 * 3 / 4 / (2 * 90e9) + 2 * 1e-6
    assert found.flops == pytest.approx(products, rel=1e-6)
    assert found.hbm == pytest.approx(cache, rel=1e-6)
    assert found.network == pytest.approx(80 * 2 * 2 * once, rel=1e-6)
    assert found.starts == pytest.approx(80 * 24 * 1.5e-6)
    assert found.tokens_per_s == pytest.approx(512 / found.seconds)


def test_a_prompt_by_hand():
    server = served("llama3.1-8b", "v6e-8", tensor=8, prompt=4096)
    found = server.prefill()
    products = 2 * WEIGHTS_8B * 4096 / 8 / REACHED
    # In two blocks of 2,048 a query meets 3,072 keys in the mean; two products with each.
    pairs = 32 * 3072 * 4096
    reached = 918e12 * Machine.of(server.slice).attention_share(128)
    scores = 2 * 2 * 32 * 128 * pairs / 8 / reached
    assert found.flops == pytest.approx(products + scores)
    assert found.hbm == 0.0
    # 2x4 chips, no ring: two links a chip of 90 GB/s, 1 + 3 hops; two sums in each of 32 layers.
    once = 4096 * 4096 * 2 * 7 / 8 / (2 * 90e9) + 4e-6
    assert found.network == pytest.approx(32 * 2 * 2 * once)
    assert found.starts == pytest.approx(32 * START)
    assert found.tokens == 4096
    assert found.seconds == pytest.approx(found.flops + found.hbm + found.network + found.starts)
    assert found.bound_by == "network"
    assert served("llama3.1-8b", "v6e-8", tensor=2, prompt=4096).prefill().tokens == 4 * 4096


def test_a_prompt_of_local_layers_meets_the_blocks_of_their_window():
    found = served("gemma3-12b", "v6e-1", tensor=1, prompt=8192).prefill()
    # 8 of 48 layers see all; 40 the block of their 1,024 and one more
    pairs = (8 * 5120 + 40 * 3584) * 8192
    reached = 918e12 * Machine.of(Slice.parse("v6e-1")).attention_share(256)
    products = 2 * get_preset("gemma3-12b").parameter_count().matmul_active * 8192 / REACHED
    assert found.flops == pytest.approx(products + 2 * 2 * 16 * 256 * pairs / reached)
    assert found.network == 0.0


def test_a_short_prompt_waits_for_its_weights():
    found = served("llama3.1-8b", "v6e-1", tensor=1, prompt=16).prefill()
    copied = 1359.6e9  # as fast as a copy was measured
    scores = 2 * 2 * 32 * 128 * 32 * 16 * 16
    written = 2 * 2 * 8 * 128 * 32 * 16 / copied
    reached = 918e12 * Machine.of(Slice.parse("v6e-1")).attention_share(128)
    assert written > scores / reached
    assert found.hbm == pytest.approx(2 * WEIGHTS_8B / copied + written, rel=1e-3)
    assert found.flops == 0.0


def test_products_in_fp8_run_at_its_peak_and_the_head_in_bf16():
    server = served(
        "qwen3-32b", "tpu7x-1x1x1", tensor=2, prompt=8192, weights="fp8", activations="fp8"
    )
    config = get_preset("qwen3-32b")
    head = config.vocab_size * config.d_model
    layers = config.parameter_count().matmul_active - head
    reached = 2307e12 / 2 * 0.78 / 0.95
    products = 2 * 8192 / 2 * (layers / (2 * reached) + head / reached)
    pairs = 64 * 5120 * 8192
    scores = 2 * 2 * 64 * 128 * pairs / 2
    scores /= 2307e12 / 2 * Machine.of(server.slice).attention_share(128)
    assert server.prefill().flops == pytest.approx(products + scores, rel=2e-3)


def test_two_devices_sum_over_the_link_between_them():
    once = 4096 * 2 / 2 / 90e9 + 1e-6
    found = served("llama3.1-8b", "v6e-4", tensor=2).decode().network
    assert found == pytest.approx(32 * 2 * 2 * once)
    assert served("llama3.1-8b", "v6e-4", tensor=1).decode().network == 0


def test_past_the_heads_of_keys_one_more_sum_joins_results():
    within, past = (served("llama3.1-8b", "v6e-16", tensor=n).decode().network for n in (8, 16))
    # 8 of 4x4 chips: two links, 1 + 3 hops; all: two links, 3 + 3 hops.
    once = [4096 * 2 * 7 / 8 / 180e9 + 4e-6, 4096 * 2 * 15 / 16 / 180e9 + 6e-6]
    assert within == pytest.approx(32 * 2 * 2 * once[0])
    assert past == pytest.approx(32 * 3 * 2 * once[1])


def test_latents_belong_to_no_head():
    found = served("deepseek-v2-lite", "v6e-4", tensor=4).decode().network
    # Two sums of 2,048 channels and one of 16 heads of 512: two links, 1 + 1 hops.
    sums = [2 * width * 2 * 3 / 4 / 180e9 + 2 * 2e-6 for width in (2048, 2048, 16 * 512)]
    assert found == pytest.approx(27 * sum(sums))


def test_the_fullest_replica_is_waited_for():
    nine = served("llama3.1-8b", "v6e-8", tensor=1, batch=9)
    assert (nine.replicas, nine.sequences) == (8, 2)
    assert nine.decode().tokens == 9
    assert (
        nine.decode().seconds == served("llama3.1-8b", "v6e-1", tensor=1, batch=2).decode().seconds
    )
    held, each = nine.model.weight_bytes("bf16"), nine.model.cache_bytes(MEAN + 1)
    assert nine.device_bytes == held + 2 * each
    halves = served("llama3.1-8b", "v6e-8", tensor=2, batch=9)
    assert halves.device_bytes == (held + 3 * each) / 2


def test_a_slice_is_split_into_powers_of_two_and_as_a_whole():
    def splits(on):
        asked = (ServingTraffic(batch=1, prompt=8, new=8), ServedFormats(weights="int4"))
        model = ServedModel.of(get_preset("tiny"))
        return [one.tensor for one in servers_on(Slice.parse(on), model, *asked)]

    assert splits("v6e-8") == [1, 2, 4, 8]
    assert splits("2xv6e-8") == [1, 2, 4, 8]  # replicas do not span slices
    assert splits("v5p:4x4x12") == [1, 2, 4, 8, 16, 32, 64, 192]


def test_nine_tenths_of_a_device_hold_weights_and_cache():
    assert room_bytes(Slice.parse("v6e-8")) == pytest.approx(0.9 * 31.25 * 2**30)
    # 94.75 GiB of a device, which is half of a TPU7x.
    assert room_bytes(Slice.parse("tpu7x-2x2x1")) == pytest.approx(0.9 * 94.75 * 2**30)
    assert not served("llama3.1-70b", "v6e-4", tensor=4).fits
    whole = served("llama3.1-70b", "v6e-8", tensor=8)
    assert whole.fits
    most = whole.room_for
    assert served("llama3.1-70b", "v6e-8", tensor=8, batch=most).fits
    assert not served("llama3.1-70b", "v6e-8", tensor=8, batch=most + 1).fits


def test_what_fills_a_device_to_the_last_byte_fits(monkeypatch):
    server = served("llama3.1-8b", "v6e-4", tensor=4)
    for more, fits in ((0, True), (-1, False)):
        room = server.device_bytes + more
        monkeypatch.setattr(serving_model, "room_bytes", lambda on, room=room: room)
        assert server.fits == fits


@pytest.mark.parametrize(
    ("on", "rate"),
    [("v6e-1", 1359.6e9), ("tpu7x-1x1x1", 6420.96e9 / 2), ("v5p-8", 2765e9 * 0.87)],
)
def test_serving_reads_as_fast_as_ops_and_no_faster_than_a_copy(on, rate):
    """By tpu-recipes a copy reached the same within a thousandth; the slower of both counts."""
    found = served("llama3.1-8b", on, tensor=1).decode()
    read = 2 * WEIGHTS_8B + 2 * 2 * 8 * 128 * 32 * MEAN / SHARE
    assert found.hbm == pytest.approx(read / rate, rel=1e-3)
