"""What served tokens cost: list prices and one's own, held to arithmetic, and how it is shown."""

import io

import pytest
from rich.console import Console

from tpukit.errors import ConfigError
from tpukit.hardware import Slice, public_prices
from tpukit.planner.serving import plan_serving

OWN = {
    "source": "a contract",
    "date": "2026-11-01",
    "rates": [{"generation": "7x", "tier": "reserved-1y", "usd_per_chip_h": 3.6}],
}


def test_a_million_tokens_cost_what_the_slice_costs_while_they_are_made():
    plan = plan_serving("llama3.1-70b", batch=32, formats=["bf16"], generations=["v5e", "v6e"])
    for one in plan.choices:
        hourly = public_prices().cost_per_hour(Slice.parse(one.slice)).value
        hours = 1e6 / one.tokens_per_s / 3600
        assert one.usd_per_million.value == pytest.approx(hourly * hours)
        assert one.usd_per_million.origin == "model"  # a modelled speed at a listed price
        assert one.region == public_prices().cheapest_region(Slice.parse(one.slice))
    least = min(plan.choices, key=lambda one: one.usd_per_million.value)
    assert plan.cheapest == {"bf16": least}


def test_tiers_regions_and_own_rates_count():
    asked = {"formats": ["int8"], "generations": ["v6e-4"]}

    def usd(**market):
        return plan_serving("llama3.1-8b", **asked, **market).choices[0].usd_per_million.value

    assert usd(spot=True) == usd(tier="spot") < usd()
    dear = max(public_prices().find("v6e", tier="on_demand"), key=lambda rate: rate.price.value)
    assert usd(regions=[dear.region]) > usd()
    (own,) = plan_serving(
        "llama3.1-8b", formats=["bf16"], generations=["7x"], tier="reserved-1y", rates=OWN
    ).choices
    assert own.usd_per_million.value == pytest.approx(own.chips * 1000 / own.tokens_per_s)
    with pytest.raises(ConfigError, match="spot and tier='reserved-1y' exclude each other"):
        plan_serving("llama3.1-8b", **asked, spot=True, tier="reserved-1y")


def test_where_no_price_is_known_the_reason_is():
    plan = plan_serving("llama3.1-8b", formats=["bf16", "int4"], generations=["7x"])
    assert plan.cheapest == {}
    shown = text_of(plan)
    assert shown.count("no price of tpu7x-1x1x1: no public list price is known; supply a rate") == 1
    assert "No on_demand price is known of these slices" in " ".join(shown.split())


def test_slices_of_more_chips_than_allowed_are_left_out():
    asked = {"formats": ["bf16"], "generations": ["v6e"]}
    (few,) = plan_serving("llama3.1-70b", **asked, max_chips=4).choices
    assert few.slice is None
    assert few.reason.endswith("its largest slice of 4 chips or fewer has room for 112")
    assert not few.usd_per_million.value
    (enough,) = plan_serving("llama3.1-70b", **asked, max_chips=8).choices
    assert enough.chips == 8
    (none,) = plan_serving(
        "llama3.1-8b", generations=["v5p"], max_chips=1, formats=["bf16"]
    ).choices
    assert none.reason == (
        "needs 16 GiB, its smallest slice, v5p-8, has 4 chips, and max_chips is 1"
    )
    with pytest.raises(
        ConfigError, match=r"v6e-8, .*, has 8 chips, but max_chips is 4; name a smaller"
    ):
        plan_serving("llama3.1-8b", generations=["v6e-8"], max_chips=4)


def test_the_cheapest_of_each_format_is_said_first_and_a_page_has_it_all(tmp_path):
    plan = plan_serving("llama3.2-1b", formats=["bf16", "vq"], generations=["v5e", "v6e"])
    first, bf16, vq, *_ = text_of(plan).splitlines()
    assert first.startswith("serving llama3.2-1b: 1 request of")
    assert bf16.startswith(f"bf16: cheapest on {plan.cheapest['bf16'].slice}, $")
    assert vq.startswith(f"vq: cheapest on {plan.cheapest['vq'].slice}, $")
    plan.to_html(tmp_path / "serving.html")
    page = (tmp_path / "serving.html").read_text("utf-8")
    for one in plan.choices:
        assert f"${one.usd_per_million.value:,.2f}" in page
        assert f"A token in {one.weights} on {one.slice}" in page
    assert "network: " not in page  # nothing is sent on one chip, so nothing is drawn


def text_of(plan):
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(plan)
    return console.export_text()
