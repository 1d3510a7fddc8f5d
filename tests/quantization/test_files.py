"""Files of codebooks and arrays: what is written comes back, anything else is an error."""

import json
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save
from vq_arrays import made_up

from tpukit.errors import TPUCheckpointError, TPUError
from tpukit.quantization import (
    load_arrays,
    load_codebook,
    save_arrays,
    save_codebook,
    train_codebook,
)


@pytest.fixture(scope="module")
def book():
    return train_codebook(np.random.default_rng(0).standard_normal((300, 4)), entries=16)


@pytest.fixture(scope="module")
def arrays():
    return {
        "layer.a": made_up("vq1.75", rotated=True),
        "layer.b": made_up("vq:2x16x2"),
        "layer.c": made_up("trellis2:256"),
    }


def test_a_codebook_comes_back(tmp_path, book):
    path = save_codebook(tmp_path / "new" / "book.safetensors", book, source="a test")
    back = load_codebook(path)
    assert np.array_equal(back.entries, book.entries)
    assert float(back.scale) == float(book.scale)
    assert (back.metric, back.fit) == (book.metric, book.fit)


def test_arrays_come_back_with_the_others(tmp_path, arrays):
    norm = jnp.arange(5, dtype=jnp.bfloat16)
    path = save_arrays(tmp_path / "model.safetensors", arrays, others={"norm": norm})
    back, others = load_arrays(path)
    assert set(back) == set(arrays)
    for name, array in arrays.items():
        assert np.array_equal(back[name].dequantize(), array.dequantize())
        assert jax.tree.structure(back[name]) == jax.tree.structure(array)
    assert others["norm"].dtype == jnp.bfloat16
    assert np.array_equal(others["norm"], norm)


def test_a_stack_of_matrices_comes_back(tmp_path, arrays):
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), arrays["layer.b"])
    back = load_arrays(save_arrays(tmp_path / "s.safetensors", {"s": stacked}))[0]["s"]
    assert np.array_equal(back.codes, stacked.codes)
    assert back.bits_per_weight == pytest.approx(arrays["layer.b"].bits_per_weight)


def test_a_name_like_a_pickle_gets_safetensors_and_says_so(tmp_path, book, caplog):
    path = save_codebook(tmp_path / "model_vq.pkl", book)
    assert "not as a pickle" in caplog.text
    assert load_codebook(path).size == 16


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_pickle_is_refused(tmp_path, protocol):
    path = tmp_path / "book.pkl"
    path.write_bytes(pickle.dumps({"codebook": [1, 2, 3]}, protocol=protocol))
    with pytest.raises(TPUCheckpointError, match="is a pickle"):
        load_codebook(path)


def test_what_is_not_there_or_of_another_kind(tmp_path, book, arrays):
    with pytest.raises(TPUCheckpointError, match="cannot be read"):
        load_codebook(tmp_path / "none")
    codebook = save_codebook(tmp_path / "book", book)
    matrices = save_arrays(tmp_path / "arrays", arrays)
    with pytest.raises(TPUCheckpointError, match="holds 'arrays'"):
        load_codebook(matrices)
    with pytest.raises(TPUCheckpointError, match="holds 'codebook'"):
        load_arrays(codebook)
    with pytest.raises(TPUCheckpointError, match="at most 100 are read"):
        load_arrays(matrices, most_bytes=100)


def rewritten(path, *, tensors=None, about=None):
    """The file with some tensors or words changed, and a digest that is right for them."""
    from tpukit.quantization.files.array_files import _digest

    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])["__metadata__"] | (about or {})
    kept = load_file(path) | (tensors or {})
    header["digest"] = _digest(kept)
    path.write_bytes(save(kept, header))
    return path


@pytest.mark.parametrize(
    ("tensors", "about", "said"),
    [
        ({}, {"format_version": "2"}, "format_version '2'"),
        ({}, {"entries": "17"}, r"expected int8 or float32\[1, 17, 4\]"),
        ({}, {"entries": "1e3"}, "entries='1e3'"),
        ({}, {"length": "99999999999999999999"}, "expected a size"),
        ({}, {"metric": "manhattan"}, "no metric"),
        ({"codebook": np.zeros((1, 16, 4), np.int16)}, {}, "int16"),
        ({"scale": np.array(np.nan, np.float32)}, {}, "not finite"),
    ],
)
def test_lies_about_a_codebook(tmp_path, book, tensors, about, said):
    path = rewritten(save_codebook(tmp_path / "b", book), tensors=tensors, about=about)
    with pytest.raises(TPUCheckpointError, match=said):
        load_codebook(path)


def test_an_index_past_the_codebook(tmp_path, arrays):
    path = save_arrays(tmp_path / "a", {"x": arrays["layer.b"]})
    codes = np.asarray(arrays["layer.b"].codes).copy()
    codes[0, 0, 0] = 16
    with pytest.raises(TPUCheckpointError, match="index 16; its codebook has 16 entries"):
        load_arrays(rewritten(path, tensors={"x.indices": codes}))


@given(st.data())
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_damage_gives_an_error_or_the_same_arrays(tmp_path, arrays, data):
    """Bit flips, truncation and noise: an error of ours, or what was written."""
    path = tmp_path / "fuzzed.safetensors"
    whole = _whole_file(tmp_path, arrays)
    kind = data.draw(st.sampled_from(["flip", "cut", "noise", "longer", "header"]))
    damaged = bytearray(whole)
    if kind == "flip":
        for _ in range(data.draw(st.integers(1, 4))):
            damaged[data.draw(st.integers(0, len(whole) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    elif kind == "cut":
        del damaged[data.draw(st.integers(0, len(whole) - 1)) :]
    elif kind == "noise":
        damaged = bytearray(data.draw(st.binary(max_size=200)))
    elif kind == "longer":
        damaged += data.draw(st.binary(min_size=1, max_size=50))
    else:
        damaged[:8] = data.draw(st.binary(min_size=8, max_size=8))
    path.write_bytes(damaged)
    try:
        back = load_arrays(path)[0]
    except TPUError:
        return
    for name, array in back.items():
        # A flip in a name of the header may rename one; what is there is as it was.
        if name in arrays:
            assert np.array_equal(array.codes, arrays[name].codes)


@given(
    words=st.dictionaries(
        st.sampled_from(["shape", "layout", "length", "entries", "stages", "leading", "rotated"]),
        st.one_of(
            st.none(),
            st.booleans(),
            st.integers(-(2**70), 2**70),
            st.floats(),
            st.text(max_size=5),
            st.lists(st.integers(-2, 2**45), max_size=5),
            st.sampled_from(["plain", "tpu_lane_i32", "trellis4"]),
        ),
        min_size=1,
    )
)
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_a_header_that_lies_gives_an_error(tmp_path, arrays, words):
    path = tmp_path / "lying.safetensors"
    save_arrays(path, {"x": arrays["layer.b"]})
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    said = json.loads(json.loads(raw[8 : 8 + size])["__metadata__"]["arrays"])
    said["x"] |= words
    rewritten(path, about={"arrays": json.dumps(said)})
    try:
        back = load_arrays(path)[0]["x"]
    except TPUError:
        return
    assert np.array_equal(back.codes, arrays["layer.b"].codes)


def _whole_file(tmp_path, arrays):
    path = tmp_path / "whole.safetensors"
    if not path.exists():
        save_arrays(path, arrays)
    return path.read_bytes()
