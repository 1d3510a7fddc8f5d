"""What is asked for, in keywords and step by step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpukit.errors import ConfigError, TPUError
from tpukit.job.sections import LaunchSettings
from tpukit.observe import TpuMonitor
from tpukit.pods import PodConfig, PreemptionHandler, SpotManager, Tier, XlaCompiler
from tpukit.pods.causes import Cause, Kind
from tpukit.pods.pod import LONGEST_NAME, check_name


def test_both_styles_say_the_same():
    built = (
        PodConfig().with_tpu_type("v3-8").with_cores(8).in_zone("us-central1-a").with_preemptible()
    ).build()
    assert built == PodConfig(tpu_type="v3-8", cores=8, zones=("us-central1-a",), tier=Tier.SPOT)
    assert PodConfig.from_dict(built.to_dict()) == built


def test_cores_that_are_not_the_slice_are_refused():
    with pytest.raises(ConfigError, match=r"v6e-8 has 8 cores \(8 chips\), not 16"):
        PodConfig().with_tpu_type("v6e-8").with_cores(16).build()


def test_the_launch_section_becomes_a_request():
    launch = LaunchSettings(zone="a", zones=("b", "a"), spot=True, priority=3)
    config = PodConfig.of(launch, "v6e-16")
    assert config.zones == ("a", "b")
    assert (config.tier, config.priority) == (Tier.SPOT, 3)


def test_spot_and_reserved_exclude_each_other():
    with pytest.raises(ConfigError, match="set only one"):
        PodConfig.of(LaunchSettings(spot=True, reserved=True), "v6e-8")


@given(st.text(max_size=60))
def test_names_are_good_or_a_good_one_is_offered(text):
    try:
        check_name(text)
    except ConfigError as error:
        offered = str(error).rsplit("Try ", 1)[1].rstrip(".").strip("'\"")
        assert check_name(offered) == offered
        assert len(offered) <= LONGEST_NAME


def test_an_eviction_is_not_a_failure():
    assert {cause for cause in Cause if cause.kind is Kind.EVICTION} == {
        *(Cause.NOTICE, Cause.SPOT, Cause.MAINTENANCE, Cause.QUEUE, Cause.SCHEDULER),
        *(Cause.DRAIN, Cause.PRESSURE, Cause.NODE_GONE),
    }
    assert all(cause.meaning for cause in Cause)
    assert not Cause.OUT_OF_MEMORY.is_worth_restarting


def test_terms_read_back_as_they_were_given():
    config = PodConfig().with_tpu_type("v3-8").with_preemptible(True).in_zone("us-central1-a")
    assert (config.preemptible, config.zone) == (True, "us-central1-a")
    assert (config.with_preemptible(False).preemptible, PodConfig().zone) == (False, None)
    assert PodConfig.from_dict(config.to_dict()).preemptible


@pytest.mark.parametrize(
    ("terms", "said"),
    [
        ({"tpu_type": "v3-7"}, "v3-8"),
        ({"tpu_type": "v3-8", "cores": 7}, "has 8 cores"),
        ({"cores": 0}, "cores"),
        ({"max_price_per_hour": -2.5}, "max_price_per_hour"),
        ({"queue_timeout_s": 0}, "queue_timeout_s"),
    ],
)
def test_what_no_pod_can_be_is_refused_when_it_is_built(terms, said):
    with pytest.raises(TPUError, match=said):
        PodConfig(**terms)
    if "tpu_type" in terms:
        with pytest.raises(TPUError, match=said):
            PodConfig().with_cores(terms.get("cores", 8)).with_tpu_type(terms["tpu_type"]).build()


def test_another_slice_may_be_named_later():
    config = PodConfig(tpu_type="v3-8", cores=8).with_tpu_type("v3-32").build()
    assert (str(config.slice), config.cores) == ("v3-32", None)


@pytest.mark.parametrize(
    "build",
    [
        lambda: SpotManager(max_price_per_hour=-1),
        lambda: XlaCompiler(level=4),
        lambda: XlaCompiler(timeout_s=-1),
        lambda: PreemptionHandler(checkpoint_frequency=0),
        lambda: TpuMonitor(collection_interval=-30),
    ],
)
def test_keywords_are_refused_as_steps_are(build):
    with pytest.raises(ConfigError):
        build()
