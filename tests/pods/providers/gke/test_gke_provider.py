"""Provider gke: what it makes, says, refuses and follows, on an emulated cluster."""

import base64
import random
import shutil
import stat
import subprocess
import tarfile
import threading
import time
from dataclasses import replace

import pytest
from emulated_cluster import until

from tpukit.errors import ConfigError, PodUnavailable, ProviderError, TPUValidationError
from tpukit.job.sections import ChipLimit
from tpukit.pods import Command, PodConfig, Store, Tier, TpuManager
from tpukit.pods.causes import Cause, Kind
from tpukit.pods.launching.attaching import find_job, follow_job
from tpukit.pods.manifests import queue_documents
from tpukit.pods.pod import PodState
from tpukit.pods.providers.gke.provider import GKEProvider
from tpukit.pods.providers.protocol import Ended, Line, Restarted, StepCompleted
from tpukit.pods.supervision.journal import MemoryJournal
from tpukit.pods.supervision.supervisor import LeftRunning, Supervisor
from tpukit_emulators.faults import Fault, Mishap
from tpukit_emulators.kubernetes_api.emulator import Installed, KubernetesEmulator, Role, tpu_pool
from tpukit_emulators.kubernetes_api.kinds import (
    BY_PATH,
    CONFIG_MAP,
    JOBSET,
    NODE,
    RESOURCE_QUOTA,
    SECRET,
)

pytestmark = pytest.mark.xdist_group("pods-processes")

CONFIG = PodConfig(tpu_type="v6e-16", zones=("us-central1-a",))
SLEEP = Command(argv=("sleep", "60"))


def python(program, **more):
    return Command(argv=("python3", "-c", program), **more)


def ready(provider, name="gem-a1", config=CONFIG, command=SLEEP):
    provider.create(name, config, command=command)
    return until(lambda: (pod := provider.get(name, zone="")) and pod.is_ready and pod)


def gather(gang, stop=lambda events: any(isinstance(one, Ended) for one in events), timeout_s=90):
    events, ends_at = [], time.monotonic() + timeout_s
    while not stop(events):
        assert time.monotonic() < ends_at, events
        events += gang.wait(0.5)
    return events


def follow(provider, config, command):
    """Return a gang that has seen all four Pods: what ends one before that cannot be told."""
    gang = provider.start(ready(provider, config=config, command=command), command, attempt=1)
    until(lambda: gang._round is not None and len(gang._round.members) == 4)
    return gang


def of(kind, events):
    return [one for one in events if isinstance(one, kind)]


# What goes wrong before anything is made.


@pytest.mark.parametrize(
    ("user", "said"),
    [
        (lambda emulator: {"token": "wrong"}, r"does not accept the credentials \(401\)"),
        (lambda emulator: {}, r"\(401\)"),
        (lambda emulator: {"token": emulator.add_token(Role.NOBODY)}, r"Not allowed to"),
    ],
)
def test_who_may_not_is_told_at_once(emulator, launch, monkeypatch, user, said):
    monkeypatch.setenv("KUBECONFIG", str(emulator.write_kubeconfig("bad", user(emulator))))
    with pytest.raises(ProviderError, match=said):
        GKEProvider(launch).create("gem-a1", CONFIG, command=SLEEP)
    assert not emulator.cluster.store.items(JOBSET)


def test_a_viewer_may_not_create(emulator, launch, monkeypatch):
    user = {"token": emulator.add_token(Role.VIEWER)}
    monkeypatch.setenv("KUBECONFIG", str(emulator.write_kubeconfig("viewer", user)))
    provider = GKEProvider(launch)
    command = Command(argv=("x",), environment={"TOKEN": "hunter2"})
    with pytest.raises(ProviderError, match="Not allowed to create jobsets") as error:
        provider.create("gem-a1", CONFIG, command=command)
    assert "hunter2" not in str(error.value)
    assert not emulator.cluster.store.items(SECRET)


def test_a_missing_namespace_is_named(emulator, launch):
    elsewhere = launch.model_copy(update={"namespace": "nowhere"})
    with pytest.raises(ProviderError, match="no namespace 'nowhere'"):
        GKEProvider(elsewhere).create("gem-a1", CONFIG, command=SLEEP)


def test_no_network_is_told(emulator, launch):
    away = launch.model_copy(update={"endpoint": "https://127.0.0.1:9"})
    with pytest.raises(ProviderError, match=r"127\.0\.0\.1:9 cannot be reached"):
        GKEProvider(away).create("gem-a1", CONFIG, command=SLEEP)


def test_no_kubeconfig_is_told(launch, monkeypatch, tmp_path):
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(ProviderError, match="no usable kubeconfig"):
        GKEProvider(launch).list()
    monkeypatch.setenv("KUBECONFIG", str(tmp_path))
    with pytest.raises(ProviderError, match="no usable kubeconfig"):
        GKEProvider(launch).list()


def test_a_plugin_gives_the_token(emulator, launch, monkeypatch, tmp_path):
    plugin = tmp_path / "plugin"
    said = '{"apiVersion":"client.authentication.k8s.io/v1beta1","kind":"ExecCredential",'
    plugin.write_text(f'#!/bin/sh\necho \'{said}"status":{{"token":"{emulator.token}"}}}}\'\n')
    plugin.chmod(plugin.stat().st_mode | stat.S_IEXEC)
    user = {
        "exec": {
            "apiVersion": "client.authentication.k8s.io/v1beta1",
            "command": str(plugin),
            "interactiveMode": "Never",
        }
    }
    monkeypatch.setenv("KUBECONFIG", str(emulator.write_kubeconfig("exec", user)))
    assert GKEProvider(launch).list() == []
    plugin.write_text("#!/bin/sh\necho no login >&2; exit 1\n")
    with pytest.raises(ProviderError, match="401"):
        GKEProvider(launch).list()


def test_an_endpoint_overrides_the_kubeconfigs(emulator, launch, monkeypatch):
    moved = emulator.kubeconfig.read_text().replace(emulator.address, "https://10.0.0.1")
    path = emulator.folder / "moved"
    path.write_text(moved)
    monkeypatch.setenv("KUBECONFIG", str(path))
    here = launch.model_copy(update={"endpoint": emulator.address})
    assert GKEProvider(here).list() == []


# What is made.


def test_files_and_secrets_travel_and_go_with_the_pod(emulator, provider, tmp_path):
    (tmp_path / "hello.py").write_text("import os; print('hello', len(os.environ['TOKEN']))")
    archive = tmp_path / "bundle.tar"
    with tarfile.open(archive, "w") as packed:
        packed.add(tmp_path / "hello.py", "hello.py")
        (tmp_path / "large").write_bytes(random.Random(0).randbytes(1_000_000))
        packed.add(tmp_path / "large", "large")
    command = Command(
        argv=("python3", "hello.py"), environment={"TOKEN": "hunter2"}, bundle=archive
    )
    pod = ready(provider, command=command)
    store = emulator.cluster.store
    assert base64.b64decode(store.items(SECRET)[0]["data"]["TOKEN"]) == b"hunter2"
    assert "hunter2" not in str(store.items(JOBSET))
    assert len(store.items(CONFIG_MAP)) == 2
    gang = provider.start(pod, command, attempt=1)
    events = gather(gang)
    assert {one.text for one in of(Line, events)} == {"hello 7"}
    assert events[-1].ending.cause is Cause.DONE
    gang.close()
    provider.delete("gem-a1", zone="")
    until(lambda: not store.items(SECRET) and not store.items(CONFIG_MAP))


def test_the_jobset_takes_its_parts_along(emulator, provider):
    provider.create("gem-a1", CONFIG, command=Command(argv=("x",), environment={"T": "s"}))
    store = emulator.cluster.store
    store.delete(JOBSET, "default", "gem-a1")
    until(lambda: not store.items(SECRET))


def test_a_lost_reply_with_nothing_done_leaves_nothing(emulator, launch):
    provider = GKEProvider(launch.model_copy(update={"cluster_timeout_seconds": 5.0}))
    emulator.faults.add(Fault(Mishap.OUTAGE, "create jobsets", times=None))
    with pytest.raises(ProviderError, match="cannot answer now"):
        provider.create("gem-a1", CONFIG, command=Command(argv=("x",), environment={"T": "s"}))
    assert not emulator.cluster.store.items(SECRET)


def test_a_busy_or_slow_server_is_waited_for(emulator, provider):
    emulator.faults.add(Fault(Mishap.OUTAGE, "create jobsets", times=4))
    emulator.faults.add(Fault(Mishap.OUTAGE, "list jobsets", times=4))
    emulator.faults.add(Fault(Mishap.SLOW, "create jobsets", pause_s=4.5))  # as a webhook may be
    provider.create("gem-a1", CONFIG, command=SLEEP)
    assert [pod.name for pod in provider.list()] == ["gem-a1"]


def test_a_plugin_that_never_answers_is_named(emulator, launch, monkeypatch, tmp_path):
    plugin = tmp_path / "plugin"
    plugin.write_text("#!/bin/sh\nsleep 5\n")
    plugin.chmod(plugin.stat().st_mode | stat.S_IEXEC)
    version = "client.authentication.k8s.io/v1beta1"
    command = {"apiVersion": version, "command": str(plugin), "interactiveMode": "Never"}
    monkeypatch.setenv("KUBECONFIG", str(emulator.write_kubeconfig("slow", {"exec": command})))
    hasty = launch.model_copy(update={"cluster_timeout_seconds": 0.5})
    with pytest.raises(ProviderError, match=r"within 0.5 s.*cluster_timeout_seconds"):
        GKEProvider(hasty).list()


def test_other_jobsets_are_left_alone(emulator, provider):
    from emulated_cluster import small_jobset

    other = small_jobset("theirs")
    del other["metadata"]["annotations"]
    emulator.cluster.store.create(JOBSET, emulator.cluster.admission.admit(JOBSET, other))
    assert provider.list() == []
    assert provider.get("theirs", zone="") is None
    provider.delete("theirs", zone="")
    assert emulator.cluster.store.items(JOBSET)


# States.


def test_a_pod_without_nodes_waits_and_says_why(emulator, provider):
    config = PodConfig(tpu_type="v5p-32", zones=("us-central1-a",))
    provider.create("gem-a1", config, command=SLEEP)
    pod = until(lambda: (one := provider.get("gem-a1", zone="")) and one.reason and one)
    assert pod.state is PodState.WAITING
    assert "nodes are available" in pod.reason


def apply(emulator, documents):
    cluster = emulator.cluster
    for one in documents:
        kind = next(kind for kind in BY_PATH.values() if kind.name == one["kind"])
        if cluster.store.find(kind, "default", one["metadata"]["name"]) is None:
            cluster.store.create(kind, cluster.admission.admit(kind, one))


@pytest.fixture
def queued(emulator, launch):
    launch = launch.model_copy(update={"queue": "tpu"})
    documents = queue_documents(PodConfig(tpu_type="v6e-16"), launch)
    apply(emulator, documents)
    yield launch
    for one in documents:
        kind = next(kind for kind in BY_PATH.values() if kind.name == one["kind"])
        emulator.cluster.store.delete(kind, "default", one["metadata"]["name"])


def test_what_exceeds_its_quota_is_refused_with_the_cause(emulator, queued):
    provider = GKEProvider(queued)
    provider.create("gem-a1", PodConfig(tpu_type="2xv6e-16"), command=SLEEP)
    pod = until(lambda: (one := provider.get("gem-a1", zone="")) and one.state.is_lost and one)
    assert (pod.state, pod.cause) == (PodState.FAILED, Cause.QUOTA)
    assert "needs 32, quota 16" in pod.reason


def test_a_namespaces_quota_is_a_capacity_error(emulator, provider, monkeypatch):
    body = {"metadata": {"name": "q", "namespace": "default"}, "spec": {"hard": {}}}
    emulator.cluster.store.create(RESOURCE_QUOTA, body)
    from tpukit_emulators.kubernetes_api.refusal import Refusal

    def refuse(*_, **__):
        raise Refusal(403, 'jobsets.jobset.x-k8s.io "gem-a1" is forbidden: exceeded quota: q')

    monkeypatch.setattr(emulator.cluster.admission, "admit", refuse)
    with pytest.raises(PodUnavailable, match="exceeded quota") as refused:
        provider.create("gem-a1", CONFIG, command=SLEEP)
    assert refused.value.cause == "quota"
    emulator.cluster.store.delete(RESOURCE_QUOTA, "default", "q")


# Gangs.

STEPS = """
import json, os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
attempt = os.environ["TPUKIT_ATTEMPT"]
for step in range(1, 400):
    print("line", attempt, step, flush=True)
    if os.environ["TPUKIT_HOST_ID"] == "0":
        print('@tpukit ' + json.dumps({"step": step, "loss": 1.5}), flush=True)
    time.sleep(0.01)
    if step == 100 and attempt == "1":
        break
"""


ON_ONE_HOST = """
import os, sys, time
if os.environ["TPUKIT_HOST_ID"] == "{host}":
    {what}
time.sleep(60)
"""


def test_no_line_is_lost_or_doubled_when_connections_break(emulator, provider, monkeypatch):
    monkeypatch.setattr("tpukit.pods.providers.gke.api.STREAM_S", 0.2)
    program = "import time\nfor i in range(120): print(i, flush=True); time.sleep(0.02)\n" + (
        "print('end', flush=True)"
    )
    command = python(program)
    gang = provider.start(ready(provider, command=command), command, attempt=1)
    ends_at = time.monotonic() + 2

    def break_now_and_then(events):
        if time.monotonic() < ends_at:
            for transport in list(emulator.server._transports):
                emulator.server._loop.call_soon_threadsafe(transport.abort)
        return any(isinstance(one, Ended) for one in events)

    events = gather(gang, break_now_and_then)
    for host in gang.hosts:
        lines = [one.text for one in of(Line, events) if one.host == host.name]
        assert lines == [*map(str, range(120)), "end"]
    gang.close()


def test_a_gang_is_followed_over_a_restart_to_its_end(emulator, provider):
    command = python(STEPS)
    gang = provider.start(ready(provider, command=command), command, attempt=1)
    events = gather(gang, lambda events: len(of(StepCompleted, events)) > 5)
    emulator.mishaps.evict(emulator.mishaps.pods_of("gem-a1")[2])
    events += gather(gang)
    (restarted,) = of(Restarted, events)
    assert (restarted.attempt, restarted.ending.cause) == (2, Cause.DRAIN)
    assert restarted.ending.host == "gem-a1-slice-0-2"
    assert events[-1].ending.cause is Cause.DONE
    at_restart = events.index(restarted)
    for host in gang.hosts:
        after = [one.text for one in of(Line, events[at_restart:]) if one.host == host.name]
        assert after == [f"line 1 {step}" for step in range(1, 101)]
    steps = [one.step for one in of(StepCompleted, events[at_restart:])]
    assert steps == list(range(1, 101))
    assert {one.loss for one in of(StepCompleted, events)} == {1.5}
    gang.close()


EVICTIONS = {
    "preempt_by_scheduler": Cause.SCHEDULER,
    "evict": Cause.DRAIN,
    "starve": Cause.PRESSURE,
    "preempt_for_critical": Cause.SCHEDULER,
    "kill": Cause.KILLED,
    "shut_down": Cause.SPOT,
    "remove": Cause.NODE_GONE,
    "taint": Cause.DRAIN,
    "maintain": Cause.MAINTENANCE,
}


@pytest.mark.parametrize("mishap", EVICTIONS)
def test_every_eviction_is_told_apart(emulator, provider, mishap):
    command = Command(argv=("sleep", "60"))
    spot = PodConfig(tpu_type="v6e-16", tier=Tier.SPOT)
    gang = follow(provider, spot, command)
    target = until(lambda: len(pods := emulator.mishaps.pods_of("gem-a1")) == 4 and pods[1])
    node = target["spec"]["nodeName"]
    on_node = mishap in ("shut_down", "remove", "taint", "maintain")
    back = {"back_after_s": 0.0} if mishap == "remove" else {}
    getattr(emulator.mishaps, mishap)(node if on_node else target, **back)
    if mishap in ("taint", "maintain"):
        until(lambda: len(emulator.mishaps.pods_of("gem-a1")) < 4)
        until(lambda: not emulator.mishaps._pods_on(node))
        getattr(emulator.mishaps, {"taint": "untaint", "maintain": "uncordon"}[mishap])(node)
    events = gather(gang, lambda events: of(Restarted, events))
    assert of(Restarted, events)[0].ending.cause is EVICTIONS[mishap]
    gang.close()
    if mishap == "maintain":
        store, label = emulator.cluster.store, "cloud.google.com/active-node-maintenance"
        found = store.get(NODE, "", node)
        store.change(NODE, found, lambda one: one["metadata"]["labels"].pop(label))


def test_a_preemption_by_kueue_is_waited_out(emulator, queued):
    provider = GKEProvider(queued)
    command = Command(argv=("sleep", "60"))
    gang = follow(provider, PodConfig(tpu_type="v6e-16"), command)
    until(lambda: len(emulator.mishaps.pods_of("gem-a1")) == 4)
    emulator.mishaps.preempt_in_queue("gem-a1")
    events = gather(gang, lambda events: of(Restarted, events))
    (restarted,) = of(Restarted, events)
    assert restarted.ending.cause is Cause.QUEUE
    until(lambda: provider.get("gem-a1", zone="").is_ready)
    gang.close()


@pytest.mark.parametrize(
    ("code", "cause"),
    [(1, Cause.FAILED), (2, Cause.BAD_INPUT), (3, Cause.DIVERGED), (4, Cause.OUT_OF_MEMORY)],
)
def test_errors_of_the_program_end_it(emulator, provider, code, cause):
    command = python(ON_ONE_HOST.format(host=3, what=f"sys.exit({code})"))
    gang = provider.start(ready(provider, command=command), command, attempt=1)
    (ended,) = of(Ended, gather(gang))
    assert (ended.ending.cause, ended.ending.host) == (cause, "gem-a1-slice-0-3")
    assert ended.ending.cause.kind is Kind.APPLICATION
    gang.close()


def test_a_killed_process_is_restarted_and_charged(emulator, provider):
    command = python(ON_ONE_HOST.format(host=1, what="os.kill(os.getpid(), 9)"))
    gang = provider.start(ready(provider, command=command), command, attempt=1)
    events = gather(gang)
    assert [one.ending.cause for one in of(Restarted, events)] == [Cause.KILLED] * 2
    assert events[-1].ending.cause is Cause.KILLED
    assert "ReachedMaxRestarts" in events[-1].ending.evidence
    gang.close()


def test_an_image_that_cannot_be_pulled_ends_it(emulator, provider):
    emulator.cluster.kubelet.bad_images.add("registry/jax:1")
    gang = provider.start(ready(provider), SLEEP, attempt=1)
    (ended,) = of(Ended, gather(gang))
    assert ended.ending.cause is Cause.IMAGE
    gang.close()


def running(emulator, name="gem-a1"):
    return len(emulator.mishaps.pods_of(name))


def test_silence_ends_nothing(emulator, provider):
    command = Command(argv=("sleep", "60"), first_step_s=0.1, step_s=0.1)
    gang = provider.start(ready(provider, command=command), command, attempt=1)
    until(lambda: running(emulator) == 4)
    events = gang.wait(1.0) + gang.wait(0.5)
    assert not of(Ended, events)
    gang.close()
    assert running(emulator) == 4
    assert provider.get("gem-a1", zone="").is_ready


def test_an_image_that_is_missing_after_a_restart_is_waited_for(emulator, provider):
    gang = follow(provider, CONFIG, SLEEP)
    until(lambda: running(emulator) == 4 and len(gang._streams) == 4)
    emulator.cluster.kubelet.bad_images.add("registry/jax:1")
    emulator.mishaps.evict(emulator.mishaps.pods_of("gem-a1")[1])
    events = gather(gang, lambda events: of(Restarted, events))
    events += gang.wait(1.0)
    assert not of(Ended, events)
    assert emulator.cluster.store.items(JOBSET)
    gang.close()


def test_a_jobset_deleted_by_hand_is_over(emulator, provider):
    gang = provider.start(ready(provider), SLEEP, attempt=1)
    gang.wait(0.3)
    emulator.cluster.store.delete(JOBSET, "default", "gem-a1")
    (ended,) = of(Ended, gather(gang))
    assert ended.ending.cause is Cause.STOPPED
    gang.close()


def test_an_outage_of_the_api_is_waited_out(emulator, provider):
    command = python("import time; time.sleep(1.5); print('still here')")
    gang = provider.start(ready(provider, command=command), command, attempt=1)
    emulator.faults.add(Fault(Mishap.OUTAGE, "*", times=12))
    for transport in list(emulator.server._transports):
        emulator.server._loop.call_soon_threadsafe(transport.abort)
    events = gather(gang)
    assert len([one for one in of(Line, events) if one.text == "still here"]) == 4
    assert events[-1].ending.cause is Cause.DONE
    gang.close()


def test_a_supervisor_sees_a_job_through(emulator, provider):
    events = []
    supervisor = Supervisor("gem", CONFIG, python(STEPS), provider, tell=events.append)

    def evict_once(event):
        events.append(event)
        if isinstance(event, StepCompleted) and event.step == 20 and not of(Restarted, events):
            emulator.mishaps.evict(emulator.mishaps.pods_of("gem-a1")[1])

    supervisor._tell = supervisor._pods._tell = evict_once
    outcome = supervisor.run()
    assert outcome.is_done, outcome
    assert [attempt.ending.cause for attempt in outcome.attempts] == [Cause.DRAIN, Cause.DONE]
    until(lambda: not provider.list())  # its Pods take a moment to end


UNTIL_TOLD = """
import json, os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
step = 0
while not os.path.exists(sys.argv[1]):
    step += 1
    print('@tpukit ' + json.dumps({"step": step}), flush=True)
    time.sleep(0.02)
"""


def supervised(provider, journal, end, act):
    """Run a supervisor of a job that goes on until a file exists; `act` is called at step 20."""
    done = []

    def tell(event):
        if isinstance(event, StepCompleted) and event.step >= 20 and not done:
            done.append(act(supervisor))

    command = Command(argv=("python3", "-c", UNTIL_TOLD, str(end)))
    supervisor = Supervisor("gem", CONFIG, command, provider, journal, tell=tell)
    return supervisor.run()


def test_a_supervisor_that_leaves_or_fails_ends_nothing(emulator, provider, tmp_path):
    journal, end = MemoryJournal(), tmp_path / "end"

    def fail(_):
        raise RuntimeError("of the supervisor")

    for act, error in ((Supervisor.leave, LeftRunning), (fail, RuntimeError)):
        with pytest.raises(error):
            supervised(provider, journal, end, act)
        assert running(emulator) == 4
    (jobset,) = emulator.cluster.store.items(JOBSET)
    assert not jobset.get("status", {}).get("restarts")
    outcome = supervised(provider, journal, end, lambda _: end.touch())
    assert outcome.is_done
    assert [attempt.pod for attempt in outcome.attempts] == ["gem-a1"]
    until(lambda: not provider.list())


def test_a_supervisor_that_is_told_to_stop_ends_it(emulator, provider, tmp_path):
    outcome = supervised(provider, MemoryJournal(), tmp_path / "end", Supervisor.stop)
    assert outcome.ending.cause is Cause.STOPPED
    until(lambda: not provider.list())


def test_a_queue_is_waited_for_without_limit_also_by_who_comes_later(emulator, provider):
    emulator.cluster.scheduler.is_stopped = True
    journal = MemoryJournal()
    waiting = Supervisor("gem", replace(CONFIG, queue_timeout_s=0.1), SLEEP, provider, journal)
    leaves = threading.Timer(2.0, waiting.leave)
    leaves.start()
    with pytest.raises(LeftRunning):
        waiting.run()
    (jobset,) = emulator.cluster.store.items(JOBSET)
    later = Supervisor("gem", CONFIG, SLEEP, provider, journal)
    threading.Timer(2.0, later.leave).start()
    with pytest.raises(LeftRunning):
        later.run()
    assert emulator.cluster.store.items(JOBSET)[0]["metadata"]["uid"] == jobset["metadata"]["uid"]


def test_a_job_is_followed_by_its_labels_alone(emulator, launch):
    config = CONFIG.with_labels(owner="somebody", job="gem", attempt="1")
    ready(GKEProvider(launch), config=config, command=python(STEPS))
    elsewhere = GKEProvider(launch)  # with no store
    pod = find_job(elsewhere, "gem")
    events = []
    assert follow_job(elsewhere, pod, events.append).cause is Cause.DONE
    assert [one.step for one in of(StepCompleted, events)][-1] == 399
    assert find_job(elsewhere, "gem-a1").name == "gem-a1"
    with pytest.raises(TPUValidationError, match="Did you mean 'gem'"):
        find_job(elsewhere, "germ")


def test_who_comes_after_a_killed_supervisor_follows_the_same_job(emulator, launch):
    command = python(STEPS)
    first = GKEProvider(launch)
    left = first.start(ready(first, command=command), command, attempt=1)
    gather(left, lambda events: len(of(StepCompleted, events)) > 5)
    second = GKEProvider(launch)
    pod = second.create("gem-a1", CONFIG, command=command)
    gang = second.start(pod, command, attempt=1)
    events = gather(gang)
    assert events[-1].ending.cause is Cause.DONE
    assert not of(Restarted, events)
    steps = [one.step for one in of(StepCompleted, events)]
    assert steps[-1] == 399
    assert steps == sorted(set(steps))
    gang.close()
    left.close()


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")
def test_a_person_gets_a_shell_on_a_host(emulator, provider, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))  # kubectl keeps a cache there
    pod = ready(provider)
    until(lambda: len(emulator.mishaps.pods_of("gem-a1")) == 4)
    argv = provider.login(pod, pod.hosts[2])
    done = subprocess.run(
        argv, input="echo $HOSTNAME; exit 3\n", capture_output=True, text=True, timeout=60
    )
    assert (done.stdout.strip(), done.returncode) == (pod.hosts[2].name, 3), done.stderr


# Preflight.


def test_preflight_finds_what_stands_in_the_way(emulator, launch, queued, monkeypatch, tmp_path):
    fine = GKEProvider(queued).preflight(PodConfig(tpu_type="v6e-16"))
    assert {one.severity for one in fine} == {"ok"}
    seen = {
        one.id: one.seen
        for settings, on in (
            ({"namespace": "defualt"}, "v6e-16"),
            ({"queue": "tpus"}, "v6e-16"),
            ({}, "v5p-32"),
        )
        for one in GKEProvider(launch.model_copy(update=settings)).preflight(PodConfig(tpu_type=on))
        if one.severity == "error"
    }
    assert "no namespace 'defualt'" in seen["gke.manifest"]
    assert "Did you mean 'tpu'" in seen["gke.queue"]
    assert "would never be placed: no node pool matches" in seen["slice.placement"]
    (image,) = GKEProvider(launch.model_copy(update={"image": None})).preflight(CONFIG)
    assert "launch.image" in image.seen
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    (access,) = GKEProvider(launch).preflight(CONFIG)
    assert access.id == "gke.access"


@pytest.mark.parametrize("installed", [Installed(kueue=("v1beta1",), jobset=(0, 8)), Installed()])
def test_the_versions_that_a_cluster_has_are_used(launch, monkeypatch, tmp_path, installed):
    with KubernetesEmulator([tpu_pool("v6e-16", name="a")], installed=installed) as emulator:
        monkeypatch.setenv("KUBECONFIG", str(emulator.kubeconfig))
        queued = launch.model_copy(update={"queue": "tpu"})
        apply(emulator, queue_documents(PodConfig(tpu_type="v6e-16"), queued))
        provider = GKEProvider(queued)
        config = PodConfig(tpu_type="v6e-16", priority=5)
        assert {one.severity for one in provider.preflight(config)} == {"ok"}
        assert ready(provider, config=config).labels is not None
        (jobset,) = emulator.cluster.store.items(JOBSET)
        has_patterns = "onJobFailureMessagePatterns" in str(jobset["spec"]["failurePolicy"])
        assert has_patterns is (installed.jobset >= (0, 10))
        assert provider.list()[0].is_ready, "with its Workload"


def test_a_field_that_the_cluster_does_not_know_is_refused(emulator, provider):
    manifest = provider.plan("gem-a1", CONFIG)
    manifest.jobset["spec"]["failurepolicy"] = {}
    with pytest.raises(ProviderError, match="unknown field"):
        provider._make(manifest)
    assert not emulator.cluster.store.items(JOBSET)


def test_who_may_not_list_nodes_may_launch(emulator, provider, monkeypatch):
    listed = provider._api.list

    def refuse(path, **query):
        if path.endswith("/nodes"):
            raise ProviderError("Not allowed to list nodes (403)")
        return listed(path, **query)

    monkeypatch.setattr(provider._api, "list", refuse)
    assert provider.create("gem-a1", CONFIG, command=SLEEP).name == "gem-a1"
    assert {one.severity for one in provider.preflight(CONFIG)} == {"ok", "info"}


def test_what_gke_does_not_offer_is_refused(provider):
    with pytest.raises(ConfigError, match="GKE offers no"):
        provider.create("gem-a1", PodConfig(tpu_type="v2-8"), command=SLEEP)


def test_no_more_chips_are_asked_for_than_were_granted(emulator, launch, tmp_path):
    row = ChipLimit(zone=CONFIG.zones[0], type="v6e", chips=16)
    limited = launch.model_copy(update={"limits": (row,)})
    store = Store(tmp_path)
    manager = TpuManager(provider="gke", launch=limited, state=store)
    asked = PodConfig(tpu_type="v6e-16")
    pod = manager.allocate_pod(asked, name="one")
    assert pod.zone == row.zone, "the zone of the table, where none is named"
    with pytest.raises(PodUnavailable, match=r"16 are in use \(one-a1\)"):
        manager.allocate_pod(asked, name="two")
    manager.release("one")
    assert manager.allocate_pod(asked, name="two").zone == row.zone
    manager.release("two")
    store.close()
