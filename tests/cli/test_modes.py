"""Options of another question than the one asked are refused, never left aside."""

import pytest
from command_line import every_command
from typer.testing import CliRunner

from tpukit.cli.app import app
from tpukit.cli.check import OF_DECODE
from tpukit.cli.plan import OF_SERVING, OF_TRAINING
from tpukit.cli.quantize import OF_CACHE, OF_VERDICT
from tpukit.errors import ConfigError


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("plan tiny --serve --deadline 3d", "--deadline is of training"),
        ("plan tiny --serve -o job.yaml", "--output is of training"),
        ("plan tiny --tokens 1e9 --kv int8", "--kv is of serving; add --serve"),
        ("check tiny --on v6e-4 --weights int8", "--weights is of --decode"),
        ("check tiny --on v6e-4 --donate 1", "--donate is of a function's arguments"),
        ("quantize folder --verdict --bits 2", "--bits is of quantizing"),
        ("quantize folder --kv int4 --mesh data=8", "--mesh is of the weights"),
        ("quantize folder --context 3", "--context is of --verdict"),
    ],
)
def test_the_option_is_named_with_where_it_belongs(words, said):
    with pytest.raises(ConfigError) as refused:
        CliRunner().invoke(app, words.split(), catch_exceptions=False)
    assert str(refused.value).startswith(said)


def test_every_name_is_one_of_the_command():
    commands = every_command()
    for command, names in (
        ("plan", (*OF_TRAINING, *OF_SERVING)),
        ("check", OF_DECODE),
        ("quantize", (*OF_CACHE, *OF_VERDICT)),
    ):
        assert {*names} <= {one.name for one in commands[command].parameters}
