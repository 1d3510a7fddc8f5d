"""Prices: dated, sourced, placeholders refused, and rates of your own over them."""

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tpukit.errors import ConfigError, SliceError
from tpukit.hardware import Slice, public_prices
from tpukit.hardware.prices import listed_zones

BOOK = public_prices()


@pytest.mark.parametrize(
    ("name", "region", "tier", "usd"),
    # Read by hand from the public catalog of 2026-08-21.
    [
        ("v4-8", "us-central2", "on_demand", 3.22),
        ("v5e-256", "us-central1", "on_demand", 1.20),
        ("v5e-1", "southamerica-west1", "on_demand", 1.716),
        ("v5p-8", "us-south1", "on_demand", 4.779),
        ("v5p-8", "us-south1", "spot", 0.6401),
        ("v6e-8", "asia-southeast1", "spot", 0.2673),
        ("v6e-8", "europe-west4", "on_demand", 2.97),
        # A slice of several hosts has another price than a single host of v2 and v3.
        ("v2-8", "us-central1", "on_demand", 1.125),
        ("v2-32", "us-central1", "on_demand", 1.5),
        ("v3-8", "europe-west4", "on_demand", 2.2),
        ("v3-32", "europe-west4", "on_demand", 2.0),
    ],
)
def test_list_prices(name, region, tier, usd):
    one = Slice.parse(name)
    quote = BOOK.quote(one, region=region, tier=tier)
    assert quote.value == pytest.approx(usd)
    assert (quote.origin, quote.date) == ("third-party", "2026-08-21")
    hourly = BOOK.cost_per_hour(one, region=region, tier=tier)
    assert hourly.value == pytest.approx(usd * one.chips)
    assert hourly.unit == "USD/h"


def test_without_a_region_the_cheapest_is_quoted():
    v6e = Slice.parse("2xv6e-256")
    assert BOOK.quote(v6e, tier="spot").value == min(
        rate.price.value for rate in BOOK.find("v6e", tier="spot")
    )
    assert BOOK.cheapest_region(v6e, tier="spot") == "asia-southeast1"
    assert BOOK.cost_per_hour(v6e).value == pytest.approx(512 * 2.70)


def test_no_placeholder_and_no_empty_price_is_in_the_book():
    for rate in BOOK.rates:
        assert 0.1 < rate.price.value < 10, rate
        assert rate.zones
        assert all(zone.startswith(rate.region) for zone in rate.zones)
    spot = {rate.tier: rate for rate in BOOK.find("v5p", region="us-central1")}
    assert spot["spot"].price.value < spot["on_demand"].price.value


def test_a_missing_price_says_why():
    placeholder = BOOK.quote(Slice.parse("v6e-8"), region="us-central2")
    assert placeholder.value is None
    assert "placeholder, 700.0" in placeholder.reason
    ironwood = BOOK.quote(Slice.parse("tpu7x-4x4x4"))
    assert ironwood.value is None
    assert "supply a rate of your own" in ironwood.reason
    assert BOOK.cost_per_hour(Slice.parse("tpu7x-4x4x4")).value is None
    assert BOOK.cheapest_region(Slice.parse("tpu7x-4x4x4")) is None
    elsewhere = BOOK.quote(Slice.parse("v4-8"), region="us-east1")
    assert "v4 prices exist in us-central2" in elsewhere.reason
    empty_cell = BOOK.quote(Slice.parse("v3-8"), region="us-east1", tier="spot")
    assert empty_cell.value is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"region": "us-centrl1"}, "No price has region 'us-centrl1'.*Did you mean 'us-central1'"),
        ({"tier": "spots"}, "No price has tier 'spots'.*Did you mean 'spot'"),
    ],
)
def test_unknown_names_are_answered_with_the_nearest(arguments, message):
    with pytest.raises(ConfigError, match=message):
        BOOK.find("v6e", **arguments)


def test_unknown_generation():
    with pytest.raises(SliceError, match="not a TPU generation"):
        BOOK.find("v66")


def test_own_rates_fill_gaps_and_replace_list_prices(tmp_path):
    content = {
        "source": "contract 17",
        "date": "2026-10-01",
        "rates": [
            {"generation": "tpu7x", "region": "*", "tier": "on_demand", "usd_per_chip_h": 12},
            {"generation": "v6e", "region": "us-east5", "tier": "spot", "usd_per_chip_h": 0.1},
            {"generation": "v5p", "tier": "reserved-1y", "usd_per_chip_h": 2.9},
        ],
    }
    file = tmp_path / "rates.yaml"
    file.write_text(yaml.safe_dump(content))
    for book in (BOOK.with_rates(content), BOOK.with_rates(file), BOOK.with_rates(str(file))):
        ironwood = book.quote(Slice.parse("tpu7x-4x4x4"), region="us-central1")
        assert (ironwood.value, ironwood.source, ironwood.date) == (12, "contract 17", "2026-10-01")
        v6e = Slice.parse("v6e-8")
        assert book.quote(v6e, region="us-east5", tier="spot").value == 0.1
        assert book.cheapest_region(v6e, tier="spot") == "us-east5"
        assert len(book.find("v6e", region="us-east5", tier="spot")) == 1
        assert book.quote(Slice.parse("v5p-8"), tier="reserved-1y").value == 2.9
        assert book.quote(v6e, region="us-east5").value == 2.7
    everywhere = BOOK.with_rates({"rates": [{"generation": "v4", "usd_per_chip_h": 9.0}]})
    assert everywhere.quote(Slice.parse("v4-8"), region="us-central2").value == 9.0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "need a list under 'rates'"),
        ([1], "need a list under 'rates'"),
        ({"rates": [3]}, "Rate 1 is 3"),
        ({"rates": [{"generation": "v6e", "price": 3}]}, "unknown key 'price'"),
        ({"rates": [{"generation": "v6e"}]}, "usd_per_chip_h None"),
        ({"rates": [{"generation": "v6e", "usd_per_chip_h": -1}]}, "expected a positive number"),
        ({"rates": [{"generation": "v6e", "usd_per_chip_h": 0}]}, "expected a positive number"),
        ({"rates": [{"generation": "v6e", "usd_per_chip_h": True}]}, "expected a positive number"),
        ({"rates": [{"generation": "h100", "usd_per_chip_h": 1}]}, "not a TPU generation"),
    ],
)
def test_bad_rates_are_refused(content, message):
    with pytest.raises((ConfigError, SliceError), match=message):
        BOOK.with_rates(content)


def test_unreadable_rates_files_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"none.yaml cannot be read"):
        BOOK.with_rates(tmp_path / "none.yaml")
    broken = tmp_path / "broken.yaml"
    broken.write_text("rates: [")
    with pytest.raises(ConfigError, match="is not valid YAML"):
        BOOK.with_rates(broken)


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
        ),
        max_leaves=6,
    )
)
def test_any_rates_are_read_or_refused(content):
    with pytest.raises((ConfigError, SliceError)):
        BOOK.with_rates({"rates": content})


def test_a_chip_hour_costs_ten_thousand_dollars_at_most():
    def priced(usd):
        book = public_prices().with_rates(
            {"rates": [{"generation": "v6e", "tier": "on_demand", "usd_per_chip_h": usd}]}
        )
        return book.quote(Slice.parse("v6e-8")).value

    assert priced(10_000) == 10_000
    with pytest.raises(ConfigError, match=r"usd_per_chip_h 10000\.5; expected a positive"):
        priced(10_000.5)
    with pytest.raises(ConfigError, match="usd_per_chip_h 0;"):
        priced(0)


def test_a_name_stands_for_the_regions_that_begin_with_it():
    assert BOOK.regions_of("us-east5") == ("us-east5",)
    assert BOOK.regions_of(" US-East ") == ("us-east1", "us-east4", "us-east5")
    rates = BOOK.find("v6e", region="asia", tier="spot")
    assert {rate.region for rate in rates} == {"asia-northeast1", "asia-south1", "asia-southeast1"}
    with pytest.raises(ConfigError, match="Did you mean 'us-east5'"):
        BOOK.regions_of("us-eest5")
    with pytest.raises(ConfigError, match="No price has region ''"):
        BOOK.regions_of("")


def test_zones_are_those_that_list_a_slice_of_that_size():
    assert listed_zones(Slice.parse("v6e-8"), "us-south1") == ("us-south1-a", "us-south1-c")
    assert listed_zones(Slice.parse("v2-8"), "us-central1") == (
        *("us-central1-b", "us-central1-c", "us-central1-f"),
    )
    assert listed_zones(Slice.parse("v2-32"), "us-central1") == ("us-central1-a",)
    assert listed_zones(Slice.parse("tpu7x-4x4x4"), "us-central1") == ()
