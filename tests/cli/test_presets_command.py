"""`tpukit presets`: every name that commands take, with its size and source."""

import json

import pytest
from typer.testing import CliRunner

from tpukit.cli.app import app
from tpukit.errors import TPUModelError
from tpukit.models.presets import list_presets, presets


def run(*words):
    return CliRunner().invoke(app, ["presets", *words])


def test_every_preset_is_listed_whole():
    shown = run().stdout
    for name, preset in presets().items():
        assert name in shown
        assert preset.source in shown


def test_sizes_are_those_that_were_published():
    listed = json.loads(run("--json").stdout)["presets"]
    assert tuple(one["name"] for one in listed) == list_presets()
    for one in listed:
        published = one["published_parameters"]
        assert published is None or one["parameters"]["total"] == pytest.approx(published, rel=1e-3)
        assert one["parameters"]["active"] <= one["parameters"]["total"]


def test_part_of_a_name_chooses():
    (listed,) = json.loads(run("Llama3.1-8B", "--json").stdout)["presets"]
    assert listed["name"] == "llama3.1-8b"
    found = run("lama4x")
    assert isinstance(found.exception, TPUModelError)
    assert "`tpukit presets` lists all" in str(found.exception)
