import re
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpukit.errors import ConfigError, TPUValidationError
from tpukit.job.config import TPUConfig
from tpukit.job.document import NOT_SETTINGS, PREFIX, parse_assignments
from tpukit.job.sections import format_bytes, parse_bytes
from tpukit.job.settings import SettingsView


def test_later_sources_win_and_origins_are_remembered(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text("zone: us-east5-a\nproject: from-file\nnum_chips: 8\ntpu_version: v6e\n")
    config = TPUConfig.load(
        path,
        preset="training",
        environment={"TPU_ZONE": "us-east1-c", "TPUKIT_XLA_OPTIMIZATION_LEVEL": "3"},
        num_chips=16,
    )
    assert (config.zone, config.project, config.num_chips) == ("us-east1-c", "from-file", 16)
    assert config.xla_optimization_level == 3
    origins = {name: str(config.origin_of(name)) for name in type(config).model_fields}
    assert origins["zone"] == "environment TPU_ZONE"
    assert origins["project"] == f"file {path}:2"
    assert origins["num_chips"] == "argument"
    assert origins["gradient_checkpointing"] == "preset training"
    assert origins["network"] == "default"
    shown = SettingsView.of_settings(config).to_dict()
    assert shown["zone"]["value"] == "us-east1-c"
    assert shown["zone"]["origin"] == "environment TPU_ZONE"


def test_well_known_variables():
    config = TPUConfig.load(
        environment={
            "TPU_PROJECT": "p",
            "TPU_ZONE": "z",
            "TPU_NETWORK": "n",
            "GOOGLE_APPLICATION_CREDENTIALS": "/keys/k.json",
            "TPUKIT_ZONE": "more-specific",
            "HOME": "/root",
        }
    )
    assert (config.project, config.network) == ("p", "n")
    assert config.zone == "more-specific"
    assert config.credentials_file == "/keys/k.json"


def test_an_unknown_variable_of_ours_is_refused():
    with pytest.raises(ConfigError, match="Did you mean 'TPUKIT_NUM_CHIPS'"):
        TPUConfig.load(environment={"TPUKIT_NUM_CHIP": "4"})


def test_every_variable_in_the_source_is_a_setting_or_listed():
    source = Path(__file__).parents[2] / "src"
    used = set()
    for path in source.rglob("*.py"):
        used |= set(re.findall(rf'"({PREFIX}[A-Z_]+)"', path.read_text()))
    settings = {PREFIX + name.upper() for name in TPUConfig.model_fields}
    assert used <= settings | NOT_SETTINGS


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("num_chips: 8\nnum_chip: 4\n", r"job.yaml:2 sets 'num_chip'.*Did you mean 'num_chips'"),
        ("num_chips: 8\nnum_chips: 4\n", "twice, in lines 1 and 2"),
        ("- a\n- b\n", "is a list"),
        ("a: [1, 2", "not valid YAML"),
        ("a: !!python/object:os.system {}", "not valid YAML"),
        ("num_chips: eight\n", r"num_chips='eight' is not valid.*comes from file .*job.yaml:1"),
        ("tpu_version: v6e\nnum_chips: 7\n", "v6e"),
    ],
)
def test_bad_files_are_named_with_the_line(tmp_path, text, message):
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(TPUValidationError, match=message):
        TPUConfig.from_file(path)


def test_unreadable_files(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        TPUConfig.from_file(tmp_path / "none.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00zone")
    with pytest.raises(ConfigError, match="not UTF-8"):
        TPUConfig.from_file(tmp_path / "binary.yaml")
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    assert TPUConfig.from_file(tmp_path / "empty.yaml") == TPUConfig()


@given(st.text())
def test_no_text_gives_anything_but_a_config_or_a_clear_error(text):
    with suppress(TPUValidationError):
        TPUConfig.from_yaml(text)


@given(
    st.dictionaries(
        st.sampled_from(sorted(TPUConfig.model_fields)),
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats()
        | st.text()
        | st.lists(st.integers()),
        max_size=4,
    )
)
def test_no_value_gives_anything_but_a_config_or_a_clear_error(values):
    with suppress(TPUValidationError):
        TPUConfig(**values)


def test_assignments_of_the_command_line():
    assert parse_assignments(
        ["num_chips=8", "topology=2x4", "reserved=true", "zone=", "a=null"]
    ) == {
        "a": None,
        "num_chips": 8,
        "topology": "2x4",
        "reserved": True,
        "zone": "",
    }
    with pytest.raises(ConfigError, match="write key=value"):
        parse_assignments(["num_chips"])


@given(st.integers(1, 2**62))
def test_bytes_round_trip(amount):
    assert parse_bytes(format_bytes(amount)) == amount


@pytest.mark.parametrize(
    ("text", "expected"),
    [("32GB", 32 * 10**9), ("31.25 GiB", 33554432000), ("16gib", 2**34), (1024, 1024), ("7", 7)],
)
def test_amounts_of_memory(text, expected):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "1 2GB", "3XB", "nan", True, None, 0, "1e3GB"])
def test_wrong_amounts_of_memory(text):
    with pytest.raises(ConfigError):
        parse_bytes(text)
