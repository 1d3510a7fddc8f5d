"""JSON and YAML of others: what is past a limit is refused, what real files hold is read."""

import json

import pytest
import yaml
from fuzzing.kinds import MANY_KEYS, bomb, merge_bomb
from hypothesis import given
from hypothesis import strategies as st

from tpukit.errors import TPUError, TPUValidationError
from tpukit.plain_data import (
    MOST_BYTES,
    MOST_DEPTH,
    MOST_VALUES,
    damaged_as,
    parse_json,
    parse_yaml,
    read_json,
)

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63) + 1, 2**63 - 1) | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("abé", max_size=3), inner),
    max_leaves=20,
)  # fmt: skip


@given(PLAIN)
def test_what_json_writes_is_read(value):
    assert parse_json(json.dumps(value)) == value
    assert parse_json(json.dumps(value, ensure_ascii=False).encode()) == value


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[" * 100_000, "nested more than 64 levels deep"),
        ("[" * (MOST_DEPTH + 1) + "]" * (MOST_DEPTH + 1), "nested more than 64 levels deep"),
        ("[" + "0," * MOST_VALUES + "0]", "more than 2,000,000 values"),
        ('{"a": "\\ud83d"}', "half of a surrogate pair"),
        (b"\xff", "can't decode"),
        (b" " * (MOST_BYTES + 1), "at most 67,108,864 are read"),
        ("{", "Expecting property name"),
    ],
)
def test_json_past_a_limit_is_refused(text, why):
    with pytest.raises(ValueError, match=why):
        parse_json(text)


def test_json_of_real_files_is_read():
    # A tokenizer_config.json of transformers, a pair of surrogates, a byte-order mark.
    assert parse_json('{"model_max_length": 1000000000000000019884624838656}') == {
        "model_max_length": 1e30
    }
    assert parse_json('"\\ud83d\\ude00 \\\\ud83d"') == "😀 \\ud83d"
    assert parse_json(b"\xef\xbb\xbf[1]") == [1]
    assert parse_json("[" * MOST_DEPTH + "]" * MOST_DEPTH)
    commas = json.dumps({"text": ", " * MOST_VALUES})
    assert len(parse_json(commas)["text"]) == 2 * MOST_VALUES


def test_a_file_is_not_read_past_its_limit(tmp_path):
    (tmp_path / "large.json").write_text("[" + "1," * 100 + "1]")
    with pytest.raises(ValueError, match="203 bytes, but at most 100 are read"):
        read_json(tmp_path / "large.json", most_bytes=100)
    with pytest.raises(ValueError, match="at most 100 are read"):
        read_json("/dev/zero", most_bytes=100)


@given(PLAIN)
def test_what_yaml_writes_is_read(value):
    assert parse_yaml(yaml.safe_dump(value, allow_unicode=False)) == [value]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (bomb(26).decode(), "more than 10,000 values, aliases counted as copies"),
        (merge_bomb(26).decode(), "more than 10,000 values, aliases counted as copies"),
        (MANY_KEYS.decode(), "at most 1,048,576 are read"),
        (MANY_KEYS[:500_000].decode(), "more than 10,000 values"),
        ("a: &a {b: *a}", "nested more than 64 levels deep"),
        ("- " * 5000, "nested more than 64 levels deep"),
        ("a: 1\nb: !!bool maybe", "line 2, column 4, the value does not fit its type"),
        ("a: 2001-99-99", "line 1, column 4, the value does not fit its type"),
        ("a: 1" + "0" * 20, "line 1, column 4, the whole number is past 64 bits"),
        ('a: "\\ud800"', "half of a surrogate pair"),
        ("a: !!python/object:os.system x", "could not determine a constructor"),
    ],
)
def test_yaml_past_a_limit_is_refused(text, why):
    with pytest.raises(ValueError, match=why):
        parse_yaml(text)


def test_aliases_and_merges_are_read():
    assert parse_yaml("a: &a {x: 1}\nb: {<<: *a, y: 2}\nc: [*a, *a]") == [
        {"a": {"x": 1}, "b": {"x": 1, "y": 2}, "c": [{"x": 1}, {"x": 1}]}
    ]


def test_a_reader_says_what_is_damaged():
    @damaged_as(TPUValidationError, "the list is damaged ({}); write it again.")
    def first(values, error=None):
        if error:
            raise error
        return values[0]

    assert first([3]) == 3
    with pytest.raises(TPUValidationError, match=r"damaged \(IndexError: list index out of range"):
        first([])
    with pytest.raises(TPUError, match="as it was"):
        first([], TPUError("as it was"))
    with pytest.raises(OSError, match="a disk"):
        first([], OSError("a disk"))
