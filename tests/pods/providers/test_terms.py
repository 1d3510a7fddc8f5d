"""Terms that a provider does not have are refused with its reason; the rest is not touched."""

import pytest

from tpukit.errors import ConfigError
from tpukit.job.sections import LaunchSettings
from tpukit.pods import PodConfig, Tier
from tpukit.pods.providers.protocol import Capabilities, check_terms
from tpukit.pods.providers.registry import open_provider


@pytest.mark.parametrize(
    ("provider", "settings", "said"),
    [
        ("gcp", {"flex_start_seconds": 60}, "gke and gce have"),
        ("gcp", {"enable_ip_alias": False}, "always have addresses of the VPC"),
        ("gke", {"flex_start_seconds": 60}, "set only flex_start"),
        ("gke", {"network": "vpc"}, "another cluster"),
        ("gke", {"software_version": "tpu-ubuntu2204-base"}, "launch.image"),
        ("gce", {"flex_start": True}, "launch.flex_start_seconds"),
        ("ssh", {"spot": True, "hosts": ("a",)}, "cannot be preempted"),
        ("local", {"reserved": True}, "nothing to reserve"),
    ],
)
def test_settings_that_would_be_ignored_are_refused(provider, settings, said, tmp_path):
    with pytest.raises(ConfigError, match=f"'{provider}' does not support .*{said}"):
        open_provider(provider, LaunchSettings(project="p", **settings))


def test_what_is_said_and_is_the_default_is_no_wish():
    launch = LaunchSettings(network="default", enable_ip_alias=True, flex_start=False)
    assert open_provider("gke", launch).name == "gke"


def test_a_cloud_job_runs_here_as_it_is():
    launch = LaunchSettings(
        project="p", zone="local-a", network="vpc", software_version="v2-alpha-tpuv6e", spot=True
    )
    assert open_provider("local", launch).name == "local"


@pytest.mark.parametrize(
    ("term", "config"),
    [
        ("spot", PodConfig(tpu_type="v6e-8", tier=Tier.SPOT)),
        ("reserved", PodConfig(tpu_type="v6e-8", tier=Tier.RESERVED)),
        ("multislice", PodConfig(tpu_type="2xv6e-8")),
        ("network", PodConfig(tpu_type="v6e-8", network="vpc")),
    ],
)
def test_terms_of_a_pod(term, config):
    check_terms("cloud", Capabilities(), config)
    check_terms("cloud", Capabilities(refused={term: "no"}), PodConfig(tpu_type="v6e-8"))
    with pytest.raises(ConfigError, match=f"does not support {term}: because"):
        check_terms("cloud", Capabilities(refused={term: "because"}), config)
