"""The catalog on the command line: the same objects as text and as JSON."""

import json

import pytest
import typer
from typer.testing import CliRunner

from tpukit.cli import slices
from tpukit.errors import SliceError
from tpukit.models.presets import get_preset

app = typer.Typer()
app.command("slices")(slices.slices)
app.command("slice")(slices.slice_info)
app.command("prices")(slices.prices)


def shown(*arguments):
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "160"}, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("arguments", [["slices"], ["slices", "7x"], ["slices", "v5p"], ["prices"]])
def test_nothing_is_cut_off_in_a_terminal_of_80_columns(arguments):
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "80"}, catch_exceptions=False)
    assert "…" not in result.output


def test_generations():
    text = shown("slices")
    for part in ("v2", "v6e", "7x", "8i", "8t", "189.5 GiB", "1–256", "2.7000", "datasheet"):
        assert part in text
    names = [one["name"] for one in json.loads(shown("slices", "--json"))["generations"]]
    assert names == ["v2", "v3", "v4", "v5e", "v5p", "v6e", "7x", "8i", "8t"]


def test_slices_of_one_generation():
    text = shown("slices", "v6e")
    for part in ("v6e-256", "16x16", "235,008", "691.20", "2026-08-21"):
        assert part in text
    listed = json.loads(shown("slices", "v6e", "--json"))["slices"]
    assert [one["chips"] for one in listed] == [1, 4, 8, 16, 32, 64, 128, 256]
    assert listed[-1]["usd_per_hour"]["value"] == pytest.approx(691.2)
    assert listed[-1]["int8_tops"]["value"] == 256 * 1836
    assert listed[-1]["usd_per_pflop_hour"]["value"] == pytest.approx(2.7 / 0.918)
    assert listed[-1]["usd_per_pflop_hour"]["origin"] == "third-party"
    assert "supply a rate of your own" in shown("slices", "7x")


def test_each_slice_names_the_largest_preset_that_it_trains():
    listed = json.loads(shown("slices", "v6e", "--json"))["slices"]
    named = {one["name"]: get_preset(one["largest_trained"]) for one in listed}
    sizes = [config.parameter_count().total for config in named.values()]
    assert sizes == sorted(sizes)
    # Parameters and both moments of adamw alone are 12 bytes a parameter, over all chips.
    for one, size in zip(listed, sizes, strict=True):
        assert 12 * size < one["chips"] * 31.25 * 2**30 < 12 * 8 * size
    text = shown("slices", "v6e")
    assert "Largest preset that each slice trains (model): one sequence of 2,048 tokens" in text
    assert listed[-1]["largest_trained"] in text


def test_a_generation_without_slices_shows_its_chip_and_the_reason():
    text = " ".join(shown("slices", "8t").split())
    for part in ("TPU 8t", "3D torus", "9,600", "5,977 TFLOP/s", "libtpu 0.0.42.1 does not"):
        assert part in text
    chip = json.loads(shown("slices", "8i", "--json"))
    assert chip["interconnect"] == "Boardfly"
    assert chip["torus_dims"] is None
    assert "not by a torus" in chip["no_slices"]


def test_one_slice():
    assert "470,016 TFLOP/s" in shown("slice", "2xv6e-256")
    assert json.loads(shown("slice", "v5p:4x4x8", "--json"))["name"] == "v5p-256"
    with pytest.raises(SliceError, match="tpu7x-4x4x4"):
        shown("slice", "tpu7x-128")


def test_prices(tmp_path):
    text = shown("prices", "v3", "--region", "europe-west4", "--tier", "on_demand")
    for part in ("up to 4 chips", "2.2000", "from 16 chips", "2.0000", "skypilot"):
        assert part in text
    assert "no public list price" in shown("prices", "7x")
    assert (
        "placeholder"
        in json.loads(shown("prices", "v6e", "--region", "us-central2", "--json"))["reason"]
    )
    own = tmp_path / "rates.yaml"
    own.write_text("rates: [{generation: 7x, usd_per_chip_h: 12.5}]")
    rates = json.loads(shown("prices", "7x", "--rates", str(own), "--json"))["rates"]
    assert [(rate["price"]["value"], rate["region"]) for rate in rates] == [(12.5, "*")]
    assert "12.50" in shown("slices", "7x", "--rates", str(own))
