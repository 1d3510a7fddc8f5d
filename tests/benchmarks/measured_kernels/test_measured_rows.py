"""The reader of measured kernels: any file, however wrong, is answered in words."""

import gzip
import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from measured_kernels import MeasuredRow, read_timings

from tpukit.errors import TPUValidationError

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=12,
)
FIELDS = sorted(MeasuredRow.model_fields)
ROW = {
    "id": "r1",
    "device": "v6e",
    "op": "matmul",
    "impl": "xla",
    "shapes": {"a": [8, 128], "b": [128, 8]},
    "dtypes": {"a": "bfloat16", "b": "bfloat16"},
    "measured_us": 3.5,
}


def read(content):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "timings.json"
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
        return read_timings(path)


def test_a_row_is_read_with_what_it_says_and_defaults_for_the_rest():
    (row,) = read([ROW | {"spread": 0.1, "config": None}]).rows
    assert (row.chip, row.measured_us, row.config, row.num_devices) == ("v6e", 3.5, {}, 1)
    assert row.shapes == {"a": (8, 128), "b": (128, 8)}
    assert row.is_xla
    assert not row.is_pallas


def test_a_compressed_file_is_read_alike():
    plain = read([ROW])
    assert read(gzip.compress(json.dumps([ROW]).encode())).rows == plain.rows


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"measured_us": None}, "measured_us: input should be a valid number"),
        ({"measured_us": "3.5"}, "measured_us: input should be a valid number"),
        ({"measured_us": 0}, "measured_us: input should be greater than 0"),
        ({"measured_us": float("nan")}, "measured_us: input should be a finite number"),
        ({"measured_us": True}, "measured_us: input should be a valid number"),
        ({"id": 7}, "id: input should be a valid string"),
        ({"op": None}, "op: input should be a valid string"),
        ({"shapes": [8, 128]}, "shapes: input should be a valid dictionary"),
        ({"shapes": {"a": [8, -1]}}, "shapes.a.1: input should be greater than or equal to 0"),
        ({"shapes": {"a": [8, 1.5]}}, "shapes.a.1: input should be a valid integer"),
        ({"shapes": {"a": None}}, "shapes.a: input should be a valid tuple"),
        ({"dtypes": {"a": 16}}, "dtypes.a: input should be a valid string"),
        ({"config": 3}, "config: input should be a valid dictionary"),
        ({"group_sizes": {}}, "group_sizes.values: field required"),
        ({"num_devices": 0}, "num_devices: input should be greater than 0"),
    ],
)
def test_what_is_wrong_with_a_row_is_said_and_the_others_are_kept(changed, said):
    found = read([ROW | {"id": "bad"} | changed, ROW])
    assert [row.id for row in found.rows] == ["r1"]
    (wrong,) = found.unreadable
    assert wrong.reason == said
    assert wrong.id == ("#1" if "id" in changed else "bad")


@pytest.mark.parametrize("name", ["id", "device", "op", "impl", "shapes", "measured_us"])
def test_a_missing_field_is_named(name):
    less = {key: value for key, value in ROW.items() if key != name}
    (wrong,) = read([less, ROW]).unreadable
    assert wrong.reason == f"{name}: field required"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is not JSON"),
        (b"{", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"\xff\xfe\x00", "is not JSON"),
        (b'{"rows": []}', "holds a JSON dict; expected a list"),
        (b"3", "holds a JSON int"),
        (b"[]", "it is empty"),
        (b"[1]", "row #1: the row: input should be a valid dictionary"),
        (b"\x1f\x8b\x00", "damaged gzip"),
        (gzip.compress(b"[]", mtime=0)[:-4], "damaged gzip"),
    ],
)
def test_a_file_without_rows_is_refused_in_one_line(content, said):
    with pytest.raises(TPUValidationError, match=said) as caught:
        read(content)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(TPUValidationError, match=r"none\.json cannot be read \(No such file"):
        read_timings(tmp_path / "none.json")
    with pytest.raises(TPUValidationError, match=r"cannot be read \(Is a directory\)"):
        read_timings(tmp_path)


@given(st.binary(max_size=300))
@settings(deadline=None)
def test_any_bytes_are_read_or_refused(content):
    with pytest.raises(TPUValidationError):
        read(content)


@given(st.lists(st.dictionaries(st.sampled_from(FIELDS), JSON) | JSON, max_size=4))
@settings(deadline=None)
def test_every_row_of_any_json_is_kept_or_named(rows):
    found = read([*rows, ROW])
    assert len(found.rows) + len(found.unreadable) == len(rows) + 1
    for wrong in found.unreadable:
        assert wrong.reason
        assert "\n" not in wrong.id
        wrong.id.encode()


@given(st.dictionaries(st.sampled_from(FIELDS), JSON, min_size=1))
@settings(deadline=None)
def test_keys_and_words_can_be_had_of_any_row_that_is_read(changed):
    for row in read([ROW | {"id": "changed"} | changed, ROW]).rows:
        assert row.program_key
        assert row.describe()
        assert row.chip in (None, "v2", "v3", "v4", "v5e", "v5p", "v6e", "7x", "8i", "8t")
