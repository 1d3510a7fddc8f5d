"""Document 004, block by block, in the Python form of its Rust: awaited as there, and plain.

`optirs_tpu` is `tpukit.pods`. Every block runs twice: against an emulated Cloud TPU through
Google's own client, with Cloud Monitoring a loopback server; and unchanged on this machine, where
nothing but TPUKIT_PROVIDER=local is set. The devices are this process's. Tensors are smaller.
"""

import asyncio
import importlib.metadata
import inspect
from datetime import timedelta

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from document_blocks import conforms
from emulated_tpus import FLAT, cloud_tpu, forget_settings
from libtpu_server import LibtpuServer
from monitoring_server import Monitoring

import tpukit
from tpukit.hardware.missing import Missing
from tpukit.job.sections import LaunchSettings
from tpukit.observe.sources.libtpu_grpc import LibtpuSource
from tpukit.pods import (
    AllReduceStrategy,
    AutoScaler,
    MultiPodManager,
    PodConfig,
    PodState,
    PodTopology,
    ScalingPolicy,
    Tier,
    TpuManager,
    TpuOptimizer,
    WorkloadMetrics,
)
from tpukit.pods.config import TpuConfig
from tpukit.pods.error import (
    CommunicationTimeout,
    OutOfMemory,
    PodUnavailable,
    TpuError,
    TpuResult,
)
from tpukit.pods.monitoring import MetricsCollector, TpuMonitor
from tpukit.pods.optimizers import Adam
from tpukit.pods.preemptible import PreemptibleManager, PreemptionHandler
from tpukit.pods.spot import BiddingStrategy, SpotManager
from tpukit.pods.xla import OptimizationFlags, XlaCompiler
from tpukit_emulators.holding import Zone

pytestmark = pytest.mark.xdist_group("pods-processes")
ZONES = ("us-central1-a", "us-central1-b", "europe-west4-a")


@pytest.fixture(autouse=True)
def own_state(tmp_path, monkeypatch):
    monkeypatch.setenv("TPUKIT_STATE_DIR", str(tmp_path / "state"))
    forget_settings(monkeypatch)


@pytest.fixture
def cloud(tmp_path, authority, own_state):
    zones = {zone: Zone({"v3": 64, "v6e": 64}, spot_quota={"v3": 64}) for zone in ZONES}
    with cloud_tpu(tmp_path, authority, zones) as made:
        yield made


@pytest.fixture
def cloud_launch(cloud):
    """Settings that name the emulated cloud; the document names all others."""
    return LaunchSettings(**cloud.settings)


@pytest.fixture(params=["cloud", "local"])
def launch(request, monkeypatch):
    """The emulated cloud's settings, or none where the environment names this machine."""
    if request.param == "cloud":
        return request.getfixturevalue("cloud_launch")
    monkeypatch.setenv("TPUKIT_PROVIDER", "local")
    return None


@pytest.fixture
def data():
    rng = np.random.default_rng(0)
    return rng.normal(size=(16, 256)).astype(np.float32), np.ones((16, 128), np.float32)


def mean_square(params, batch):
    inputs, targets = batch
    return ((inputs @ params - targets) ** 2).mean()


# --- basic TPU optimization --------------------------------------------------------------------


async def basic(launch, training_data):
    tpu_manager = await TpuManager(launch=launch).with_zone("us-central1-a").build()

    pod_config = PodConfig().with_tpu_type("v3-8").with_cores(8).build()
    tpu_pod = await tpu_manager.allocate_pod(pod_config)

    optimizer = (
        TpuOptimizer(tpu_pod)
        .with_optimizer(Adam(0.001))
        .with_xla_optimization(True)
        .with_loss(mean_square)
        .build()
    )
    params = optimizer.create_distributed_tensor([256, 128])
    grads = await optimizer.load_gradients_from_dataset(training_data)
    metrics = await optimizer.step_distributed(params, grads)
    return tpu_pod, params, metrics


@conforms("004", 1, "one package to depend on, under one licence")
def test_installation():
    said = importlib.metadata.metadata("tpukit")
    assert said["License-Expression"].startswith("Apache-2.0")
    assert "emulators" in said.get_all("Provides-Extra")


@conforms("004", 2, "credentials: what is missing is said before anything is asked for")
def test_prerequisites(tmp_path, monkeypatch):
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path / "no gcloud here"))
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    launch = LaunchSettings(provider="gcp", project="your-gcp-project", zone="us-central1-a")
    with pytest.raises(TpuError, match="no Google Cloud credentials"):
        TpuManager(launch=launch).build().allocate_pod(PodConfig(tpu_type="v3-8"))


@conforms("004", 14, "names in snake_case throughout the public interface")
def test_names_are_in_snake_case():
    for package in (tpukit, tpukit.pods):
        for name in package.__all__:
            taken = getattr(package, name)
            if inspect.isfunction(taken):
                parameters = inspect.signature(taken).parameters
                assert all(one == one.lower() for one in (name, *parameters)), name


# --- basic TPU optimization --------------------------------------------------------------------


@conforms("004", 3, "TpuManager, PodConfig, TpuOptimizer: allocate a pod and step on it")
def test_basic_optimization(launch, data):
    pod, params, metrics = asyncio.run(basic(launch, data))
    assert (pod.zone, str(pod.slice), pod.state) == ("us-central1-a", "v3-8", PodState.READY)
    assert metrics.loss == pytest.approx(1.0)  # parameters of zeros, targets of ones
    assert params.sharding.num_devices == 8
    assert np.abs(np.asarray(params)).max() == pytest.approx(0.001, rel=1e-3)  # Adam's first step


@conforms("004", 3, "the same without await")
def test_basic_optimization_in_plain_code(launch, data):
    tpu_manager = TpuManager(launch=launch).with_zone("us-central1-a").build()
    tpu_pod = tpu_manager.allocate_pod(PodConfig(tpu_type="v3-8", cores=8))
    optimizer = TpuOptimizer(tpu_pod).with_optimizer(optax.adam(0.001)).build()
    params = optimizer.create_distributed_tensor([8192, 64])
    grads = optimizer.load_gradients_from_dataset([np.ones((8192, 64), np.float32)])
    metrics = optimizer.step_distributed(params, grads)
    assert f"{metrics.loss:.4f} loss" == "– loss"  # gradients were given
    assert np.asarray(params) == pytest.approx(-0.001, rel=1e-3)
    tpu_manager.release(tpu_pod)
    assert tpu_manager.list() == []


# --- multi-pod training ------------------------------------------------------------------------


async def several_pods(launch, model_parameters, gradients):
    config = PodConfig().with_tpu_type("v3-8")
    multi_pod = await (
        MultiPodManager()
        .with_topology(PodTopology.Ring)
        .with_allreduce_strategy(AllReduceStrategy.HierarchicalAllReduce)
        .with_pods(
            [
                config.in_zone("us-central1-a"),
                config.in_zone("us-central1-b"),
                config.in_zone("europe-west4-a"),
            ]
        )
        .with_manager(TpuManager(launch=launch))
        .build()
    )
    await multi_pod.distribute_model(model_parameters)
    result = await multi_pod.step_synchronized(gradients).with_timeout(timedelta(seconds=300))
    return multi_pod, result


@conforms("004", 4, "MultiPodManager: topology, all-reduce strategy, synchronized steps")
def test_several_pods(launch):
    parameters = {"w": np.ones((12, 4), np.float32)}
    gradients = [{"w": np.full((12, 4), pod, np.float32)} for pod in range(3)]
    multi_pod, result = asyncio.run(several_pods(launch, parameters, gradients))
    assert [member.zone for member in multi_pod.members] == list(ZONES)
    assert np.asarray(result.gradients["w"]) == pytest.approx(1.0)
    assert np.asarray(result.parameters["w"]) == pytest.approx(0.999, rel=1e-5)

    plain = multi_pod.step_synchronized(gradients).with_timeout(300)
    assert plain.step == 2


@conforms("004", 4, "a pod that vanishes is dropped")
def test_a_pod_that_the_cloud_takes_away_is_dropped(cloud_launch, cloud):
    parameters = {"w": np.ones((12, 4), np.float32)}
    gradients = [{"w": np.full((12, 4), pod, np.float32)} for pod in range(3)]
    multi_pod, _ = asyncio.run(several_pods(cloud_launch, parameters, gradients))
    lost = multi_pod.members[2].name
    cloud.api.cloud.preempt(lost, notice_s=0)
    while lost in {member.name for member in multi_pod.members}:
        # The pods that are left are asked for one gradient each.
        left = gradients[: len(multi_pod.members)]
        result = multi_pod.step_synchronized(left).with_timeout(300)
    assert lost in result.dropped
    assert len(result.pods) == 2


# --- dynamic resource scaling ------------------------------------------------------------------


async def scaled(optimizer):
    autoscaler = (
        AutoScaler()
        .with_policy(ScalingPolicy.PerformanceBased)
        .with_min_cores(8)
        .with_max_cores(256)
        .with_target_utilization(0.85)
        .build()
    )
    metrics = await WorkloadMetrics.from_current_training(optimizer)
    scaling_decision = await autoscaler.evaluate_scaling(metrics)
    if scaling_decision:
        await optimizer.scale_to_config(scaling_decision.config)
    return scaling_decision


@conforms("004", 5, "AutoScaler, WorkloadMetrics, scale_to_config")
def test_scaling(launch, data):
    tpu_pod = TpuManager(launch=launch).allocate_pod(PodConfig(tpu_type="v6e-8"))
    optimizer = TpuOptimizer(tpu_pod).with_loss(mean_square).build()
    params = optimizer.create_distributed_tensor([256, 128])
    grads = optimizer.load_gradients_from_dataset(data)
    losses = [optimizer.step_distributed(params, grads).loss for _ in range(3)]
    decision = asyncio.run(scaled(optimizer))
    assert not decision  # the pod is seconds old
    assert decision.reason

    metrics = WorkloadMetrics.from_current_training(optimizer)
    smaller = AutoScaler(max_cores=4).build().evaluate_scaling(metrics)
    assert str(smaller.config.slice) == "v6e-4"
    optimizer.scale_to_config(smaller.config)
    metrics = optimizer.step_distributed(params, grads)
    assert (metrics.step, params.sharding.num_devices) == (4, 4)
    assert metrics.loss < losses[-1]


# --- XLA optimization --------------------------------------------------------------------------


async def compiled(optimizer, optimizer_config):
    xla_compiler = (
        XlaCompiler()
        .with_optimization_level(3)
        .with_flags(
            OptimizationFlags(
                enable_fusion=True,
                enable_layout_optimization=True,
                enable_memory_optimization=True,
            )
        )
        .build()
    )
    optimized_graph = await xla_compiler.compile_optimization_pipeline(optimizer_config)
    optimizer.load_xla_graph(optimized_graph)
    return optimized_graph


@conforms("004", 6, "XlaCompiler through the offline TPU compiler, load_xla_graph")
@pytest.mark.libtpu
def test_xla_optimization(launch, data):
    tpu_pod = TpuManager(launch=launch).allocate_pod(PodConfig(tpu_type="v3-8"))
    optimizer = TpuOptimizer(tpu_pod).with_loss(mean_square).build()
    params = optimizer.create_distributed_tensor([256, 128])
    grads = optimizer.load_gradients_from_dataset(data)
    graph = asyncio.run(compiled(optimizer, optimizer.config_for(params, grads)))
    assert str(graph.compiled.slice) == "v3-8"
    metrics = optimizer.step_distributed(params, grads)
    assert metrics.program == graph.fingerprint


# --- configuration -----------------------------------------------------------------------------


async def configured(path, launch):
    config = await TpuConfig.from_file(path)
    return await TpuManager.from_config(config, **launch)


@conforms("004", 7, "environment variables")
@conforms("004", 8, "tpu_config.yaml")
@conforms("004", 9, "TpuConfig.from_file, TpuManager.from_config")
def test_the_configuration_file(launch, tmp_path, monkeypatch):
    path = tmp_path / "tpu_config.yaml"
    path.write_text(FLAT)
    cloud = {}
    if launch is not None:
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", launch.credentials_file)
        cloud = {"endpoint": launch.endpoint, "provider": "gcp"}
    plain = TpuManager.from_config(TpuConfig.from_file(path), **cloud)
    awaited = asyncio.run(configured(path, cloud))
    assert plain.settings.provider_name == ("gcp" if cloud else "local")
    assert plain.settings == awaited.settings
    assert plain.settings.project == "your-gcp-project"
    assert plain.complete(None).software_version == "2.8.0"
    monkeypatch.setenv("TPU_ZONE", "us-central1-b")
    again = TpuManager.from_config(TpuConfig.from_file(path), **cloud)
    assert again.settings.zone == "us-central1-b"
    assert str(again.complete(None).slice) == "v3-8"


# --- monitoring --------------------------------------------------------------------------------


async def monitored(endpoint, sources):
    monitor = (
        TpuMonitor(sources=sources)
        .with_collection_interval(timedelta(seconds=30))
        .with_metrics_endpoint(endpoint)
        .with_project("your-gcp-project")
        .build()
    )

    # Collect and report TPU metrics
    metrics = await monitor.collect_metrics()
    written = await monitor.report_to_cloud_monitoring(metrics)
    monitor.stop()
    return metrics, written


@conforms("004", 10, "TpuMonitor: collect, and report to Cloud Monitoring")
def test_monitoring():
    service, chips = Monitoring(), LibtpuServer()
    try:
        metrics, written = asyncio.run(monitored(service.endpoint, [LibtpuSource(chips.address)]))
    finally:
        service.stop()
        chips.stop()
    (call,) = service.calls
    assert written == len(call.time_series) > 5
    assert metrics["utilization"] == pytest.approx(0.6925)
    assert isinstance(metrics.power_watts, Missing)  # TPUs publish none
    assert MetricsCollector([]).collect() == []


@conforms("004", 10, "with TPUKIT_PROVIDER=local and no credentials nothing is sent, which is said")
def test_monitoring_on_this_machine(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("TPUKIT_PROVIDER", "local")
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path / "no gcloud here"))
    metrics, written = asyncio.run(monitored("https://monitoring.googleapis.com", None))
    assert written == 0
    assert "no Google Cloud credentials" in caplog.text
    assert isinstance(metrics.power_watts, Missing)


# --- error handling ----------------------------------------------------------------------------


async def handled(optimizer, params, grads, tpu_manager) -> TpuResult[object]:
    """The document's match, word for word but for the language."""
    try:
        metrics = await optimizer.step_distributed(params, grads)
    except TpuError as error:
        match error:
            case PodUnavailable():
                return await tpu_manager.request_alternate_pod()
            case CommunicationTimeout():
                return await optimizer.reduce_batch_size()
            case OutOfMemory():
                return await optimizer.enable_gradient_checkpointing()
            case _:
                raise
    return f"Optimization successful: {metrics.loss:.4f} loss"


def failing(pod, *, loss=mean_square, **changes):
    optimizer = TpuOptimizer(pod).with_loss(loss)._with(**changes).build()
    params = optimizer.create_distributed_tensor([256, 128])
    return optimizer, params


@conforms("004", 11, "PodUnavailable, CommunicationTimeout, OutOfMemory and the way out of each")
def test_errors_are_handled_as_in_the_document(launch, data):
    tpu_manager = TpuManager(launch=launch).with_zone("us-central1-a", "us-central1-b").build()
    tpu_pod = tpu_manager.allocate_pod(PodConfig(tpu_type="v3-8"))

    optimizer, params = failing(tpu_pod)
    grads = optimizer.load_gradients_from_dataset(data)
    said = asyncio.run(handled(optimizer, params, grads, tpu_manager))
    assert said == "Optimization successful: 1.0000 loss"

    def waits(params, batch):
        raise CommunicationTimeout("a peer did not answer")

    optimizer, params = failing(tpu_pod, loss=waits)
    assert asyncio.run(handled(optimizer, params, grads, tpu_manager)) == 8  # of 16 examples

    def too_large(params, batch):
        raise OutOfMemory("it does not fit")

    optimizer, params = failing(tpu_pod, loss=too_large)
    asyncio.run(handled(optimizer, params, grads, tpu_manager))
    assert optimizer.checkpointing

    optimizer, params = failing(tpu_pod, watch=lambda: {tpu_pod.name: "preempted"})
    alternate = asyncio.run(handled(optimizer, params, grads, tpu_manager))
    assert (alternate.zone, alternate.is_ready) == ("us-central1-b", True)

    def broken(params, batch):
        return jnp.float32("no number")

    optimizer, params = failing(tpu_pod, loss=broken)
    with pytest.raises(ValueError, match="could not convert"):
        asyncio.run(handled(optimizer, params, grads, tpu_manager))


# --- preemptible and spot ----------------------------------------------------------------------


def handler():
    return (
        PreemptionHandler()
        .with_checkpoint_frequency(timedelta(seconds=300))
        .with_auto_restart(True)
        .build()
    )


async def preemptible(tpu_manager, preemption_handler):
    config = PodConfig().with_tpu_type("v3-8").with_preemptible(True).build()
    return await tpu_manager.allocate_preemptible_pod(config, preemption_handler)


@conforms("004", 12, "preemptible pods with a PreemptionHandler")
def test_preemptible_pods(launch):
    tpu_manager = TpuManager(launch=launch).build()
    pod = asyncio.run(preemptible(tpu_manager, handler()))
    assert (pod.tier, pod.is_ready) == (Tier.SPOT, True)
    plain = PreemptibleManager(tpu_manager, handler())
    assert plain.allocate_pod(PodConfig(tpu_type="v3-8")).tier is Tier.SPOT
    tpu_manager.close()


async def bid(launch, pod_config):
    spot_manager = (
        SpotManager()
        .with_bidding_strategy(BiddingStrategy.CostOptimized)
        .with_max_price_per_hour(2.50)
        .with_manager(TpuManager(launch=launch))
        .build()
    )
    return await spot_manager.bid_for_pod(pod_config)


@conforms("004", 13, "SpotManager: a cap on the price of the catalogue")
def test_spot_bidding(launch):
    config = PodConfig(tpu_type="v3-8", zones=ZONES)
    pod = asyncio.run(bid(launch, config))
    assert (pod.tier, pod.is_ready) == (Tier.SPOT, True)
    # v3-8 is four chips: at the list's spot price, within the document's 2.50 USD an hour.
    cheap = SpotManager(manager=TpuManager(launch=launch), max_price_per_hour=0.01)
    with pytest.raises(PodUnavailable, match=r"above the cap of 0\.01"):
        cheap.bid_for_pod(config)
