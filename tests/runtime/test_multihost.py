"""Settings of a job of several hosts: what is accepted, read from the environment, refused."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpukit.errors import ConfigError, TPUDistributedError
from tpukit.runtime import multihost
from tpukit.runtime.address import Address, listen
from tpukit.runtime.multihost import MultiHostConfig

HOST_NAMES = st.from_regex(r"[a-z0-9]([a-z0-9.-]{0,20}[a-z0-9])?", fullmatch=True)


@given(HOST_NAMES | st.ip_addresses(v=4).map(str), st.integers(1, 65535))
def test_addresses_round_trip(host, port):
    text = f"{host}:{port}"
    assert Address.parse(text) == Address(host, port)
    assert str(Address.parse(text)) == text


@given(st.ip_addresses(v=6).map(str), st.integers(1, 65535))
def test_ipv6_addresses_round_trip(host, port):
    assert str(Address.parse(f"[{host}]:{port}")) == f"[{host}]:{port}"
    assert Address.parse(f"[{host}]:{port}").host == host


@given(st.text())
def test_any_other_text_is_a_config_error_or_an_address(text):
    try:
        parsed = Address.parse(text)
    except ConfigError:
        return
    assert Address.parse(str(parsed)) == parsed


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("10.0.0.1", "add what is missing"),
        (":1234", "add what is missing"),
        ("http://10.0.0.1:1234", "leave out the scheme"),
        ("10.0.0.1:0", "port must be a number from 1 to 65535"),
        ("10.0.0.1:65536", "port must be a number"),
        ("10.0.0.1:port", "port must be a number"),
        ("10.0.0.1:１２", "port must be a number"),
        ("::1:1234", r"in brackets, like '\[::1\]:8482'"),
        ("[10.0.0.1]:1", "in brackets"),
    ],
)
def test_bad_addresses_say_what_is_wrong(text, message):
    with pytest.raises(ConfigError, match=message):
        MultiHostConfig(2, 0, text)
    with pytest.raises(ConfigError, match=f"^bind_address.*{message}"):
        MultiHostConfig(2, 0, "10.0.0.1:1", bind_address=text)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_hosts": 0, "host_id": 0}, "num_hosts is 0; a job has at least one host"),
        ({"num_hosts": 8, "host_id": 8}, "the 8 hosts of this job are numbered 0 to 7"),
        ({"num_hosts": 8, "host_id": -1}, "host_id is -1"),
        ({"num_hosts": 8, "host_id": 0, "timeout_s": 0}, "timeout_s is 0"),
        ({"num_hosts": 8, "host_id": 0, "heartbeat_timeout_s": -5}, "heartbeat_timeout_s is -5"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ConfigError, match=message):
        MultiHostConfig(coordinator_address="10.0.0.1:1234", **settings)


def place(environment):
    config = MultiHostConfig.from_environment(environment, timeout_s=7)
    assert config.timeout_s == 7
    return config.num_hosts, config.host_id, config.coordinator_address


def test_place_from_own_variables():
    own = {"TPUKIT_NUM_HOSTS": "4", "TPUKIT_HOST_ID": "3", "TPUKIT_COORDINATOR": "a:1"}
    assert place(own) == (4, 3, "a:1")
    assert place({**own, "TPU_WORKER_HOSTNAMES": "x,y", "TPU_WORKER_ID": "1"}) == (4, 3, "a:1")


def test_place_on_a_cloud_tpu():
    slice_of_four = {"TPU_WORKER_HOSTNAMES": "t0, t1,t2,t3", "TPU_WORKER_ID": "2"}
    assert place(slice_of_four) == (4, 2, "t0:8482")
    two_slices = {
        **slice_of_four,
        "MEGASCALE_NUM_SLICES": "2",
        "MEGASCALE_SLICE_ID": "1",
        "MEGASCALE_COORDINATOR_ADDRESS": "s0:8080",
    }
    assert place(two_slices) == (8, 6, "s0:8482")


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({}, "does not identify this host; set TPUKIT_NUM_HOSTS"),
        ({"TPUKIT_HOST_ID": "1"}, "not TPUKIT_NUM_HOSTS or TPUKIT_COORDINATOR; set all"),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, "not TPU_WORKER_ID"),
        ({"TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "one"}, "TPU_WORKER_ID is 'one'"),
        (
            {
                "TPU_WORKER_HOSTNAMES": "a",
                "TPU_WORKER_ID": "0",
                "MEGASCALE_COORDINATOR_ADDRESS": "a",
            },
            "not MEGASCALE_NUM_SLICES or MEGASCALE_SLICE_ID",
        ),
    ],
)
def test_half_an_environment_is_refused(environment, message):
    with pytest.raises(ConfigError, match=message):
        MultiHostConfig.from_environment(environment)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"TPUKIT_HOST_ID": "3"}, 3),
        ({"TPU_WORKER_HOSTNAMES": "a,b,c,d", "TPU_WORKER_ID": "2"}, 2),
        (
            {
                "TPU_WORKER_HOSTNAMES": "a,b",
                "TPU_WORKER_ID": "1",
                "MEGASCALE_SLICE_ID": "3",
                "MEGASCALE_NUM_SLICES": "4",
                "MEGASCALE_COORDINATOR_ADDRESS": "a",
            },
            7,
        ),
    ],
)
def test_without_a_host_id_the_environment_says_it(variables, expected, monkeypatch):
    for name in ("TPUKIT_HOST_ID", "TPU_WORKER_HOSTNAMES", "MEGASCALE_COORDINATOR_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    config = MultiHostConfig(num_hosts=8, host_id=None, coordinator_address="10.0.0.1:1234")
    assert config.host_id == expected


def test_no_host_id_anywhere_is_refused(monkeypatch):
    for name in ("TPUKIT_HOST_ID", "TPU_WORKER_HOSTNAMES"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="host_id is None, but the environment does not identify"):
        MultiHostConfig(num_hosts=8, host_id=None, coordinator_address="10.0.0.1:1234")


def test_one_host_needs_no_coordinator():
    group = MultiHostConfig(1, 0, "203.0.113.1:1").setup()
    assert group.to_dict()["num_hosts"] == 1
    assert "host 0 of 1" in group.__rich__()


def test_setup_after_jax_has_started_says_so():
    import jax

    jax.devices()
    # The documents' own example asks jax for the host id, which starts jax.
    config = MultiHostConfig(
        num_hosts=8, host_id=jax.process_index(), coordinator_address="127.0.0.1:1234"
    )
    with pytest.raises(TPUDistributedError, match="jax has already opened its devices"):
        config.setup()


def test_an_address_of_another_machine_is_refused():
    with pytest.raises(
        TPUDistributedError, match=r"192\.0\.2\.1 is not an address of this machine"
    ):
        listen(Address("192.0.2.1", 1234))


def test_listening_everywhere_must_be_asked_for():
    assert Address.parse("0.0.0.0:1").is_wildcard
    assert Address.parse("[::]:1").is_wildcard
    assert not Address.parse("localhost:1").is_wildcard
    assert Address.parse("localhost:1").resolved() == Address("127.0.0.1", 1)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, None),
        ({"no_proxy": "a"}, None),
        ({"http_proxy": "http://p:1"}, "10.0.0.1"),
        ({"https_proxy": "http://p:1", "no_proxy": "a,b"}, "a,b,10.0.0.1"),
        ({"grpc_proxy": "http://p:1", "no_grpc_proxy": "c", "no_proxy": "a"}, "c,10.0.0.1"),
    ],
)
def test_the_coordinator_is_exempt_from_proxies(monkeypatch, before, after):
    monkeypatch.setattr(os, "environ", dict(before))
    multihost._bypass_proxy("10.0.0.1")
    assert os.environ.get(multihost.EXEMPTIONS[0]) == after
