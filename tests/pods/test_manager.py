"""Managers in both styles, where their settings come from, and what they leave behind."""

import asyncio
import threading
from dataclasses import replace

import pytest
from emulated_tpus import FLAT, forget_settings
from scripted_provider import ScriptedProvider

from tpukit.errors import ConfigError, PodUnavailable, ProviderError
from tpukit.job.sections import LaunchSettings
from tpukit.pods import (
    Capabilities,
    PodConfig,
    PodState,
    PreemptibleManager,
    PreemptionHandler,
    Store,
    Tier,
    TpuConfig,
    TpuManager,
)
from tpukit.pods.providers import registry

A, B, C = "us-central1-a", "us-central1-b", "us-east5-b"
CONFIG = PodConfig(tpu_type="v6e-8", zones=(A, B, C))


@pytest.fixture
def provider(monkeypatch):
    made = ScriptedProvider()
    monkeypatch.setattr("tpukit.pods.manager.open_provider", lambda name, launch: made)
    return made


@pytest.fixture
def store(tmp_path):
    made = Store(tmp_path / "state")
    yield made
    made.close()


@pytest.fixture(autouse=True)
def no_settings_around(monkeypatch):
    forget_settings(monkeypatch)


@pytest.fixture
def manager(provider, store):
    return TpuManager(provider="gcp", project="p", state=store)


def test_both_styles_say_the_same(provider, store):
    built = (
        TpuManager(state=store).with_provider("gcp").with_project("p").with_zone(A, B)
        .with_network("n").with_endpoint("127.0.0.1:1").with_credentials("k.json").build()
    )  # fmt: skip
    said = TpuManager(
        provider="gcp",
        project="p",
        zone=A,
        zones=(B,),
        network="n",
        endpoint="127.0.0.1:1",
        credentials_file="k.json",
        state=store,
    )
    assert built.settings == said.settings
    assert (built.settings.zone, *built.settings.zones) == (A, B)


def test_section_environment_arguments_in_this_order(provider, store, monkeypatch):
    monkeypatch.setenv("TPU_ZONE", "from-environment")
    monkeypatch.setenv("TPU_NETWORK", "net")
    launch = LaunchSettings(project="from-section", zone="from-section", spot=True)
    manager = TpuManager(launch=launch, network="mine", state=store)
    settings = manager.settings
    assert (settings.project, settings.zone) == ("from-section", "from-environment")
    assert (settings.network, settings.spot) == ("mine", True)
    origins = {name: str(manager.origin_of(name)) for name in ("project", "zone", "network")}
    assert origins == {
        "project": "file launch:",
        "zone": "environment TPU_ZONE",
        "network": "argument",
    }
    assert manager.to_dict()["zone"]["origin"] == "environment TPU_ZONE"
    monkeypatch.setenv(registry.VARIABLE, "gke")
    assert TpuManager(launch=LaunchSettings(provider="gcp")).settings.provider_name == "gke"
    assert TpuManager(provider="ssh").settings.provider_name == "ssh"


def test_the_flat_file_of_the_document(provider, store, tmp_path, monkeypatch):
    path = tmp_path / "tpu_config.yaml"
    path.write_text(FLAT)
    manager = TpuManager.from_config(TpuConfig.from_file(path), provider="gcp", state=store)
    asked = manager.complete(None)
    assert (asked.slice, asked.zones) == (PodConfig(tpu_type="v3-8").slice, (A,))
    assert (asked.software_version, asked.tier) == ("2.8.0", Tier.ON_DEMAND)
    assert str(manager.origin_of("project")) == f"file {path}:3"
    monkeypatch.setenv("TPU_PROJECT", "another")
    again = TpuManager.from_config(TpuConfig.from_file(path), provider="gcp", state=store)
    assert again.settings.project == "another"
    path.write_text(FLAT + "reservd: true\n")
    with pytest.raises(ConfigError, match="Did you mean 'reserved'"):
        TpuConfig.from_file(path)


def test_reserved_reaches_the_request(provider, store):
    launch = LaunchSettings(reserved=True, reservation="r", network="n", enable_ip_alias=False)
    asked = TpuManager(launch=launch, state=store).complete(PodConfig(tpu_type="v6e-8"))
    assert (asked.tier, asked.reservation) == (Tier.RESERVED, "r")
    assert (asked.network, asked.enable_ip_alias) == ("n", False)


def test_a_pod_is_allocated_listed_looked_at_and_released(manager, provider):
    lines = []
    pod = manager.allocate_pod(CONFIG, name="run", progress=lines.append)
    assert (pod.name, pod.zone, pod.state) == ("run-a1", A, PodState.READY)
    assert "v6e-8 on_demand in us-central1-a is $21.60 per hour (prices of 20" in lines[0]
    assert lines[1:] == [
        "run: asked, run-a1 (v6e-8) in us-central1-a",
        "run: ready, run-a1 in us-central1-a",
    ]
    assert manager.list() == [pod]
    health = manager.health(pod)
    assert (health.is_healthy, health.hosts, health.replaced) == (True, 1, 0)
    manager.release(pod)
    assert provider.pods == {}
    assert manager.health("run").state is None
    assert manager.list() == []


def test_every_call_may_be_awaited(manager, provider):
    async def main():
        built = await manager.with_zone(A).build()
        pod = await built.allocate_pod(PodConfig(tpu_type="v6e-8"))
        health = await built.health(pod)
        await built.release(pod)
        return health, await built.list()

    health, left = asyncio.run(main())
    assert health.is_healthy
    assert not left


def test_a_queue_is_waited_for(manager, provider):
    provider.granted = PodState.WAITING
    timer = threading.Timer(0.3, provider.settle)
    timer.start()
    assert manager.allocate_pod(CONFIG).is_ready
    timer.join()


def test_where_no_zone_has_it_nothing_is_left(manager, provider, store):
    provider.empty = {A, B, C}
    with pytest.raises(PodUnavailable, match="no v6e-8 in") as refused:
        manager.allocate_pod(CONFIG, name="run")
    assert refused.value.cause == "stockout"
    assert store.wanted.all() == []


def test_it_goes_on_asking_for_who_waits(manager, provider):
    provider.empty = {A, B, C}
    timer = threading.Timer(0.3, provider.empty.clear)
    timer.start()
    assert manager.allocate_pod(CONFIG, wait_s=20).is_ready
    timer.join()


def test_a_cap_is_held_before_anything_is_asked(manager, provider, store):
    with pytest.raises(
        PodUnavailable,
        match=r"at most \$1\.00 per hour .*lowest price is .* days old",
    ):
        manager.allocate_pod(replace(CONFIG, max_price_per_hour=1.0))
    assert provider.calls == []
    assert store.wanted.all() == []


def test_a_provider_that_is_not_there_is_said_at_once(manager, provider, store):
    provider.script = ["refuse"] * 9
    with pytest.raises(ProviderError, match="cannot be reached"):
        manager.allocate_pod(CONFIG)
    assert len(provider.calls) < 4


def test_a_lost_reply_is_no_error(manager, provider):
    provider.script = ["ok", "lose"]
    assert manager.allocate_pod(CONFIG, name="run").name == "run-a1"
    assert len(provider.pods) == 1


def test_an_interrupted_allocation_leaves_nothing(manager, provider, store):
    def interrupt(line):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        manager.allocate_pod(replace(CONFIG, zones=(A,)), name="run", progress=interrupt)
    manager.reconciler.run_pass()
    assert provider.pods == {}
    assert store.wanted.all() == []


def test_what_is_not_offered_is_said(manager, provider, store):
    refused = {"spot": "this cloud has none", "multislice": "one slice at a time"}
    provider.capabilities = Capabilities(generations=("v6e",), refused=refused)
    with pytest.raises(ConfigError, match="'gcp' does not support spot: this cloud has none"):
        manager.allocate_pod(CONFIG.with_preemptible())
    with pytest.raises(ConfigError, match="one slice at a time"):
        manager.allocate_pod(replace(CONFIG, tpu_type="2xv6e-8"))
    with pytest.raises(PodUnavailable, match="has no v5p; it has v6e"):
        manager.allocate_pod(replace(CONFIG, tpu_type="v5p-8"))
    assert provider.calls == []


def test_no_slice_is_said(manager):
    with pytest.raises(ConfigError, match="No slice is set"):
        manager.allocate_pod()


def test_an_alternate_is_in_another_zone(manager, provider):
    failed = manager.allocate_pod(CONFIG)
    other = manager.request_alternate_pod()
    assert (failed.zone, other.zone) == (A, B)
    assert [pod.name for pod in provider.pods.values()] == [other.name]


def test_or_of_another_type_where_that_is_allowed(manager, provider):
    provider.capabilities = Capabilities(zones=(A,))
    failed = manager.allocate_pod(PodConfig(tpu_type="v6e-8", zones=(A,)))
    provider.empty = set()
    other = manager.request_alternate_pod(failed, tpu_types=["v6e-8", "v5litepod-8"])
    assert (str(other.slice), other.zone) == ("v5e-8", A)
    with pytest.raises(PodUnavailable, match="other types with tpu_types="):
        manager.request_alternate_pod(other)


def test_an_alternate_needs_a_pod_that_failed(manager):
    with pytest.raises(ConfigError, match="needs the pod that failed"):
        manager.request_alternate_pod()


def test_the_match_of_the_document(manager, provider):
    pod = manager.allocate_pod(CONFIG, name="run")
    provider.put((A, pod.name), PodState.SUSPENDED)

    def step():
        if not manager.health("run").is_healthy:
            raise PodUnavailable("run was taken away", cause="spot")

    try:
        step()
    except PodUnavailable:
        pod = manager.request_alternate_pod()
    assert pod.zone == B


def watched(manager, **arguments):
    """A spot pod with a handler that says what it was told."""
    told, heard = [], threading.Event()

    def tell(what):
        def one(pod):
            told.append((what, pod.name))
            heard.set()

        return one

    handler = PreemptionHandler(**arguments).with_callbacks(tell("preempted"), tell("restarted"))
    pod = manager.allocate_preemptible_pod(CONFIG, handler, name="run", poll_s=0.02)
    return pod, told, heard


def test_a_handler_is_told_and_given_another(manager, provider):
    pod, told, _ = watched(manager)
    assert pod.tier is Tier.SPOT
    provider.put((A, pod.name), PodState.SUSPENDED)
    while len(told) < 2:
        threading.Event().wait(0.02)
    assert told == [("preempted", "run-a1"), ("restarted", "run-a2")]
    manager.close()


def test_without_auto_restart_the_pod_is_given_up(manager, provider, store):
    pod, told, heard = watched(manager, auto_restart=False)
    provider.put((A, pod.name), PodState.SUSPENDED)
    assert heard.wait(10)
    assert told == [("preempted", "run-a1")]
    assert store.wanted.all() == []
    manager.close()


def test_the_handler_of_the_document(manager):
    handler = PreemptionHandler().with_checkpoint_frequency(300).with_auto_restart(True).build()
    with pytest.raises(ConfigError, match="checkpoint_frequency"):
        manager.allocate_preemptible_pod(CONFIG, handler.with_checkpoint_frequency(-1))
    kept = PreemptibleManager(manager, handler)
    pod = kept.allocate_pod(CONFIG)
    assert pod.tier is Tier.SPOT
    kept.close()


def test_alternates_stay_near_where_nobody_named_zones():
    from tpukit.pods.manager import alternates_of

    pod = ScriptedProvider().create("run-a1", replace(CONFIG, zones=("us-east5-b",)))
    (same,) = alternates_of(pod, PodConfig(tpu_type="v6e-8"), (), known_zones=())
    continents = [zone.partition("-")[0] for zone in same.zones]
    assert "us-east5-b" not in same.zones
    assert same.zones[0].startswith("us-east5")
    assert continents == sorted(continents, key=lambda one: one != "us")


def test_a_name_that_no_provider_accepts_is_refused_before_anything_is_wanted(manager):
    with pytest.raises(ConfigError, match=r"'\\udcff' cannot name a pod; .* Try 'job'"):
        manager.allocate_pod(CONFIG, name="\udcff")
    assert manager.reconciler.store.wanted.find_by_any_name("\udcff") is None
    assert not manager.reconciler.store.wanted.all()
