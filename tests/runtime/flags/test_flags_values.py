"""Types are told from what a parser takes, and values are written as it wants them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpukit.errors import FlagError
from tpukit.hardware import list_chips
from tpukit.runtime.flags.flag import (
    COUNT,
    DURATION,
    FRACTION,
    NEGATIVE,
    TRIAL_VALUES,
    WIDE,
    YES,
    Flag,
    infer_type,
    listed_choices,
    published_ranges,
)


def flag(type_, *, choices=(), parsers=("libtpu",)):
    return Flag("xla_x", parsers, type_, choices=choices)


@pytest.mark.parametrize(
    ("taken", "expected"),
    [
        (TRIAL_VALUES, "string"),
        ([YES], "bool"),
        ([COUNT, NEGATIVE, WIDE], "int64"),
        ([COUNT, NEGATIVE], "int32"),
        ([COUNT, WIDE], "uint64"),
        ([COUNT], "uint32"),
        ([COUNT, NEGATIVE, WIDE, FRACTION], "float"),
        ([DURATION], "duration"),
        ([], "other"),
    ],
)
def test_the_values_a_parser_takes_tell_the_type(taken, expected):
    assert infer_type([value for value in TRIAL_VALUES if value not in taken]) == expected


@pytest.mark.parametrize(
    "complaint",
    [
        "Unrecognized flag option: @@. Valid options are: auto, on.",
        "Invalid value '@@' for enum 'x.Y.Value'. Supported values are: auto, on.",
        "Invalid value '@@'. Must be one of {auto, on}. Integer values are not permitted.",
        "Unknown value '@@' for x argument. Possible values are: 'auto', 'on'",
    ],
)
def test_choices_are_read_from_each_way_libtpu_lists_them(complaint):
    assert listed_choices(complaint) == ("auto", "on")


def test_a_complaint_without_a_list_gives_no_choices():
    assert listed_choices("Unknown trace level.") == ()


@pytest.mark.parametrize(
    ("kind", "value", "written"),
    [
        ("bool", True, "true"),
        ("bool", "FALSE", "false"),
        ("bool", 1, "true"),
        ("bool", "no", "false"),
        ("int64", 5, "5"),
        ("int64", "-0", "0"),
        ("int64", "0x10", "16"),
        ("float", 1.5, "1.5"),
        ("float", "1e3", "1e3"),
        ("duration", "1m30s", "1m30s"),
        ("string", True, "true"),
        ("string", "a,b", "a,b"),
    ],
)
def test_values_are_written_as_the_parser_wants(kind, value, written):
    assert flag(kind).render(value) == written


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        ("bool", "maybe", "xla_x takes true or false, not 'maybe'"),
        ("bool", 7, "takes true or false, not 7"),
        ("int32", 2**31, "a whole number from -2,147,483,648 to 2,147,483,647"),
        ("uint32", -1, "a whole number from 0 to 4,294,967,295"),
        ("int64", "5.0", "takes a whole number"),
        ("int64", True, "takes a whole number"),
        ("float", "fast", "takes a number, not 'fast'"),
        ("float", "nan", "takes a number"),
        ("duration", "10", "a duration such as 10s"),
        ("string", None, "a bool, a number or text, not None"),
        ("string", "two words", "splits LIBTPU_INIT_ARGS at spaces and knows no quotes"),
    ],
)
def test_wrong_values_are_refused(kind, value, message):
    with pytest.raises(FlagError, match=message):
        flag(kind).render(value)


def test_an_enum_takes_its_choices_in_any_case():
    mode = flag("enum", choices=("PROMOTE_F32", "NATIVE_EMISSION"))
    assert mode.render("native_emission") == "NATIVE_EMISSION"
    with pytest.raises(FlagError, match="one of PROMOTE_F32, NATIVE_EMISSION, not 'fast'"):
        mode.render("fast")


def test_xla_takes_spaces_but_no_quotes():
    path = flag("string", parsers=("xla",))
    assert path.render("/tmp/my folder") == "/tmp/my folder"
    with pytest.raises(FlagError, match="holds a quote"):
        path.render("/tmp/'x'")


def test_a_tpu_flag_both_parsers_know_goes_to_libtpu():
    both = ("libtpu", "xla")
    assert Flag("xla_tpu_detect_nan", both, "bool").variable == "LIBTPU_INIT_ARGS"
    assert Flag("xla_sdy_x", both, "bool").variable == "XLA_FLAGS"


kinds = st.sampled_from(
    ["bool", "int32", "int64", "uint32", "uint64", "float", "duration", "string", "enum"]
)


@settings(deadline=None)
@given(kinds, st.text() | st.integers() | st.floats() | st.booleans())
def test_only_a_flag_error_comes_out_and_rendering_is_stable(kind, value):
    one = flag(kind, choices=("auto", "on") if kind == "enum" else ())
    try:
        written = one.render(value)
    except FlagError:
        return
    assert one.render(written) == written


def test_round_trips_through_its_dictionary():
    one = Flag("xla_x", ("xla",), "enum", default="a", choices=("a", "b"), compile_option=True)
    assert Flag.from_dict(one.to_dict()) == one


@pytest.mark.parametrize(
    ("name", "wrong", "right"),
    [
        ("xla_tpu_scoped_vmem_limit_kib", (-5, -2, 196_609), (-1, 0, 98_304)),
        ("xla_jf_spmd_threshold_for_windowed_einsum_mib", (-5,), (-1, 0, 1_000_000)),
        ("xla_tpu_rwb_something", (2**63,), (-5, 5)),  # its name says nothing about its meaning
    ],
)
def test_amounts_are_not_negative(name, wrong, right):
    amount = Flag(name, ("libtpu",), "int64")
    for value in wrong:
        with pytest.raises(FlagError, match=f"{name} takes a whole number from"):
            amount.render(value)
    assert [amount.render(value) for value in right] == [str(value) for value in right]


def test_a_share_has_its_published_range():
    share = Flag("xla_tpu_msa_inefficient_use_to_copy_ratio", ("libtpu",), "float")
    assert share.render(0.5) == "0.5"
    for value in (-0.1, 1.1, "inf"):
        with pytest.raises(FlagError, match="a number from 0 to 1"):
            share.render(value)


def test_no_chip_has_more_vmem_than_a_limit_may_say():
    most = max(chip.vmem_bytes.value or 0 for chip in list_chips())
    assert published_ranges()["xla_tpu_scoped_vmem_limit_kib"].high == most / 1024
