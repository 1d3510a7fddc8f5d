"""Any text goes in; flags or a FlagError come out, and what is written reads back the same."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tpukit.errors import FlagError
from tpukit.runtime.flags.syntax import format_flags, merge_flags, parse_flags, read_values

names = st.from_regex(r"[a-z][a-z0-9_]{0,20}", fullmatch=True)
values = st.text(st.characters(exclude_characters="'\"\n\r\v\f", codec="utf-8"), max_size=12)
flag_like = st.lists(
    st.sampled_from(
        ["--a", "-b", "--noa", "--a=1", "--a='x y'", '--c="', "=", "'", "--", " ", "\t"]
    )
).map("".join)


def test_takes_a_string_apart():
    text = "--xla_a=1 -xla_b=x=y  --xla_c --xla_d='two words'\n--xla_e="
    assert parse_flags(text) == {
        "xla_a": "1",
        "xla_b": "x=y",
        "xla_c": True,
        "xla_d": "two words",
        "xla_e": "",
    }


@pytest.mark.parametrize("text", ["", "  \n"])
def test_nothing_is_no_flags(text):
    assert parse_flags(text) == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("xla_a=1", "'xla_a=1' is not a flag: XLA and libtpu stop .* or skip it silently"),
        ("--xla_a 5", "'5' is not a flag"),
        ("'--xla_a=1'", "is not a flag"),
        ("---xla_a=1", "is not a flag"),
        ("--", "'--' is not a flag"),
        ("--=1", "is not a flag"),
        ("--xla_a='x y", "a quote is not closed"),
        ("--xla_a=1 --xla_a=2", "--xla_a is given twice, as '1' and as '2'"),
    ],
)
def test_what_no_parser_would_read_right_is_refused(text, message):
    with pytest.raises(FlagError, match=message):
        parse_flags(text)


def test_the_same_setting_twice_is_one():
    assert parse_flags("--xla_a=1 --xla_a=1") == {"xla_a": "1"}


@settings(deadline=None)
@given(st.text() | flag_like)
@example("--a='")
@example("--a=''b")
def test_only_a_flag_error_comes_out(text):
    try:
        flags = parse_flags(text)
    except FlagError:
        return
    assert all(isinstance(value, str) or value is True for value in flags.values())


@settings(deadline=None)
@given(st.dictionaries(names, values))
def test_what_is_written_reads_back(flags):
    assert parse_flags(format_flags(flags)) == flags


@settings(deadline=None)
@example("='", {"a": "\t"})
@given(st.text() | flag_like, st.dictionaries(names, values, max_size=3))
def test_setting_wins_over_whatever_was_there(existing, flags):
    merged = merge_flags(existing, flags)
    assert {name: read_values(merged)[name] for name in flags} == flags


@settings(deadline=None)
@given(st.dictionaries(names, values), st.dictionaries(names, values, max_size=3))
def test_other_settings_are_kept(before, flags):
    after = read_values(merge_flags(format_flags(before), flags))
    replaced = {*flags, *(f"no{name}" for name in flags)}
    assert after == {k: v for k, v in before.items() if k not in replaced} | flags


def test_merging_replaces_every_form_libtpu_reads():
    before = "--xla_a 5 --noxla_b -xla_c=1 word --xla_d=keep"
    assert merge_flags(before, {"xla_a": "6", "xla_b": "true", "xla_c": "2"}) == (
        "word --xla_d=keep --xla_a=6 --xla_b=true --xla_c=2"
    )


def test_merging_can_take_out():
    assert merge_flags("--xla_a=1 --xla_b=2", {}, without={"xla_a"}) == "--xla_b=2"
