"""Slices: the spellings people use, what follows from one, and errors that name the choices."""

import contextlib
import io
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from tpukit.errors import SliceError
from tpukit.hardware import Slice, get_chip, list_chips, list_slices

NAMED = [chip for chip in list_chips() if chip.rules]


@st.composite
def slices(draw):
    chip = draw(st.sampled_from(NAMED))
    return Slice(chip, draw(st.sampled_from(chip.rules.shapes)), draw(st.integers(1, 64)))


@pytest.mark.parametrize(
    ("spelling", "canonical", "chips", "hosts", "devices"),
    [
        ("v4-32", "v4-32", 16, 4, 16),
        ("v5p-128", "v5p-128", 64, 16, 64),
        ("v5litepod-16", "v5e-16", 16, 4, 16),
        ("v5e-16", "v5e-16", 16, 4, 16),
        ("v6e-256", "v6e-256", 256, 64, 256),
        ("tpu7x-4x4x4", "tpu7x-4x4x4", 64, 16, 128),
        ("2xv6e-256", "2xv6e-256", 512, 128, 512),
        ("v5p:4x4x8", "v5p-256", 128, 32, 128),
        ("v5p:4x4x16", "v5p:4x4x16", 256, 64, 256),
        ("v3-8", "v3-8", 4, 1, 8),
        ("v2-512", "v2-512", 256, 64, 512),
        ("v5p-12288", "v5p-12288", 6144, 1536, 6144),
        ("v6e-8", "v6e-8", 8, 1, 8),
        # other spellings
        ("tpu-v6e-8", "v6e-8", 8, 1, 8),
        ("  TPU V6E 8 ", "v6e-8", 8, 1, 8),
        ("tpuv6e-8", "v6e-8", 8, 1, 8),
        ("trillium-8", "v6e-8", 8, 1, 8),
        ("TPU v5 lite:4x4", "v5e-16", 16, 4, 16),
        ("tpu-v5-lite-podslice 4x4", "v5e-16", 16, 4, 16),
        ("tpu-v4-podslice:2x2x4", "v4-32", 16, 4, 16),
        ("tpu-v6e-slice/8×16", "v6e-128", 128, 32, 128),
        ("v5:4x4x4", "v5p-128", 64, 16, 64),
        ("7x:2x2x1", "tpu7x-2x2x1", 4, 1, 8),
        ("v7x-2x2x1", "tpu7x-2x2x1", 4, 1, 8),
        ("v7:2x2x1", "tpu7x-2x2x1", 4, 1, 8),
        ("2 x TPU v7 4x4x4", "2xtpu7x-4x4x4", 128, 32, 256),
        ("ironwood-1x1x1", "tpu7x-1x1x1", 1, 1, 2),
        ("tpu7x-128-4x4x4", "tpu7x-4x4x4", 64, 16, 128),
        ("v4-32:2x2x4", "v4-32", 16, 4, 16),
        ("3 * v5litepod-4", "3xv5e-4", 12, 3, 12),
    ],
)
def test_spellings(spelling, canonical, chips, hosts, devices):
    found = Slice.parse(spelling)
    assert (str(found), found.chips, found.hosts, found.devices) == (
        canonical,
        chips,
        hosts,
        devices,
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "tpu7x-128",
            r"tpu7x-4x4x4 \(64 chips, 128 devices\) or tpu7x-4x4x8 \(128 chips, 256 devices\)",
        ),
        ("v7-8", r"tpu7x-2x2x1 \(4 chips, 8 devices\) or tpu7x-2x2x2 \(8 chips, 16 devices\)"),
        ("tpu7x-96", "tpu7x-4x4x4"),
        ("tpu7x-100-4x4x4", "ambiguous"),
        ("v6e-7", r"v6e-4 \(4 chips\), v6e-8 \(8 chips\)"),
        ("v4-32:4x8", "3D shapes of 16 chips are 2x2x4"),
        ("v4:4x8", "3D shapes of 32 chips are 2x4x4"),
        ("v5p:8x4x4", "3D shapes of 128 chips are 4x4x8"),
        ("v4-33", "counts TensorCores, 2 a chip.*v4-32"),
        ("v5p-100", r"v5p-64 \(32 chips\), v5p-128 \(64 chips\)"),
        ("v6e-512", r"v6e-256 \(256 chips\)"),
        ("v6e-256x2", "For 2 slices write '2xv6e-256'"),
        ("v5-16", r"'v5e-16' \(16 chips\) or 'v5p-16'"),
        ("v6e", "names the generation v6e but no slice"),
        ("v6e-", "names the generation v6e but no slice"),
        ("v6e-4x", "names the generation v6e but no slice"),
        ("v9-8", "Did you mean 'v4-8'"),
        ("h100-8", "names no TPU generation; known are v2, v3"),
        ("tpu-edge", "Edge TPUs .* are not in the catalog"),
        ("8i-4", "No slice of TPU 8i can be named: .*Boardfly.*libtpu.*`tpukit slices 8i`"),
        ("tpu8t-4x4x4", "No slice of TPU 8t can be named: .*no shape.*libtpu"),
        ("", "an empty name"),
        ("v" * 200, "a name of 200 characters"),
        (8, "A slice name is text"),
    ],
)
def test_impossible_names_say_what_is_possible(name, message):
    with pytest.raises(SliceError, match=message):
        Slice.parse(name)


def test_counted_chips_are_chips_in_every_generation():
    assert str(Slice.of("v6e", chips=64, topology="8x8")) == "v6e-64"
    assert str(Slice.of("v4", chips=32)) == "v4-64"
    assert Slice.of("tpu7x", chips=64).topology == (4, 4, 4)
    assert Slice.of("v5p", topology=(4, 4, 4), num_slices=2).devices == 128


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"generation": "v4", "chips": 32, "topology": "4x8"}, "3D shapes of 32 chips are 2x4x4"),
        ({"generation": "v6e", "chips": 64, "topology": "4x8"}, r"\(that shape has 32\).* 8x8"),
        ({"generation": "v6e", "chips": 5}, "No v6e slice has 5 chips"),
        ({"generation": "v6e"}, "needs chips or a topology"),
        ({"generation": "v6e", "topology": "wide"}, "'wide' is not a topology"),
        ({"generation": "v6", "chips": 4}, "not a TPU generation.*Did you mean 'v6e'"),
        ({"generation": "v6e", "chips": 4, "num_slices": 0}, "at least one slice"),
    ],
)
def test_impossible_counts_say_what_is_possible(arguments, message):
    with pytest.raises(SliceError, match=message):
        Slice.of(**arguments)


def test_totals_follow_from_the_datasheet():
    v6e = Slice.parse("v6e-64")
    assert v6e.peak_tflops().value == 58_752
    assert v6e.peak_tflops("int8").value == 2 * 58_752
    assert v6e.peak_tflops().origin == "datasheet"
    assert v6e.hbm_bytes.value == 64 * 32 * 2**30
    assert v6e.hbm_usable_bytes.origin == "compiler"
    assert Slice.parse("v4-32").peak_tflops("bfloat16").value == 4_400
    ironwood = Slice.parse("tpu7x-4x4x4")
    assert ironwood.peak_tflops("int8").value is None
    assert "no int8" in ironwood.peak_tflops("int8").reason


def test_names_of_the_cloud():
    v5e = Slice.parse("2xv5e-16")
    assert (v5e.api_name, v5e.gke_accelerator, v5e.gke_topology, v5e.needs_gke) == (
        "v5litepod-16",
        "tpu-v5-lite-podslice",
        "4x4",
        False,
    )
    ironwood = Slice.parse("tpu7x-2x2x1")
    assert (ironwood.api_name, ironwood.gke_accelerator, ironwood.needs_gke) == (
        None,
        "tpu7x",
        True,
    )


def test_arguments_for_the_offline_compiler():
    assert Slice.parse("v5p-128").libtpu_topology == "v5p:4x4x4"
    assert Slice.parse("2xv4-8").libtpu_options == {"chip_config_name": "megacore", "num_slices": 2}
    assert Slice.parse("v6e-1").libtpu_options == {"chips_per_host_bounds": (1, 1, 1)}
    assert Slice.parse("v6e-256").libtpu_options == {}


def test_a_slice_shows_itself():
    console = Console(width=140, file=io.StringIO())
    console.print(Slice.parse("2xv6e-256"))
    shown = console.file.getvalue()
    for part in ("2xv6e-256", "470,016 TFLOP/s", "datasheet", "31.25 GiB", "compiler", "x, y"):
        assert part in shown


def test_listing_covers_every_size_once():
    sizes = [one.chips for one in list_slices("v6e")]
    assert sizes == [1, 4, 8, 16, 32, 64, 128, 256]
    assert len({one.chips for one in list_slices("v5p")}) == len(list_slices("v5p"))
    with pytest.raises(SliceError, match="TPU 8i"):
        list_slices("8i")


@given(slices())
def test_canonical_names_round_trip(one):
    assert Slice.parse(str(one)) == one
    assert Slice.parse(str(one).upper()) == one
    assert hash(Slice.parse(str(one))) == hash(one)
    assert eval(repr(one)) == one
    assert eval(repr(one.chip)) == one.chip


@given(slices())
def test_counts_are_consistent(one):
    assert math.prod(one.topology) * one.num_slices == one.chips
    assert one.chips == one.hosts * one.chips_per_host
    assert one.devices == one.hosts * one.devices_per_host
    assert one.devices == one.chips * one.chip.devices_per_chip
    assert len(one.wraps) == len(one.topology) == one.chip.torus_dims
    assert Slice.of(one.chip.name, chips=one.chips_per_slice).chips == one.chips_per_slice
    json.dumps(one.to_dict())


@given(st.text(max_size=100))
@settings(max_examples=300)
def test_any_text_is_a_slice_or_a_slice_error(text):
    with contextlib.suppress(SliceError):
        assert Slice.parse(text).chips > 0


@given(
    st.from_regex(
        r"([0-9]{1,5} ?[x*])?(tpu)?[- ]?(v[2-9]?[a-z]{0,3}|tpu7x|7x|8[it]|v5litepod)"
        r"[-: ][0-9x]{0,12}",
        fullmatch=True,
    )
)
@settings(max_examples=400)
def test_names_that_look_right_are_a_slice_or_a_slice_error(text):
    try:
        found = Slice.parse(text)
    except SliceError:
        return
    assert Slice.parse(str(found)) == found


def test_a_generation_is_found_under_the_names_jax_uses():
    for chip in list_chips():
        for kind in chip.device_kinds:
            assert get_chip(kind) is chip
