"""What would stand in the way of a pod on Cloud TPU, found without asking for one."""

import shutil
from collections.abc import Callable, Iterator

from google.cloud import tpu_v2alpha1

from ....errors import TPUError, did_you_mean
from ....runtime.doctor.finding import DoctorFinding
from ...config import PodConfig
from .api import CloudTPU
from .reading import read_pod
from .request import IP_ALIAS, accelerator_type
from .runtimes import SOURCE, runtime_version


def find_obstacles(
    api: CloudTPU, config: PodConfig, zone_of: Callable[[PodConfig], str]
) -> list[DoctorFinding]:
    """Return what was seen, up to the first thing without which the rest cannot be seen."""
    findings: list[DoctorFinding] = []
    try:
        findings.extend(_look(api, config, zone_of))
    except TPUError as error:
        said = str(error)
        findings.append(DoctorFinding("gcp-refused", "environment", "error", said, fix=said))
    return findings


def _look(
    api: CloudTPU, config: PodConfig, zone_of: Callable[[PodConfig], str]
) -> Iterator[DoctorFinding]:
    if shutil.which("ssh") is None:
        yield DoctorFinding(
            *("gcp-ssh", "environment", "error", "There is no program ssh here"),
            fix="Install OpenSSH's client: hosts are reached through it.",
        )
    if not config.enable_ip_alias:
        seen = f"enable_ip_alias=False: {IP_ALIAS}"
        yield DoctorFinding("gcp-ip-alias", "environment", "error", seen, fix="Leave it out.")
    wanted, image = (
        accelerator_type(config.slice),
        runtime_version(config.slice, config.software_version),
    )
    zone = zone_of(config)
    parent = api.parent(zone)
    yield DoctorFinding(
        *("gcp-credentials", "environment", "ok"),
        f"Credentials of {api.identity.source}, project {api.project}",
    )
    types = api.types_in(zone)
    yield DoctorFinding("gcp-zone", "environment", "ok", f"{zone} answers, and lets us look")
    yield _offered("gcp-type", f"{zone} offers {wanted}", wanted, types)
    versions = api.ask(
        lambda timeout_s: sorted(
            one.version
            for one in api.client.list_runtime_versions(
                parent=parent, retry=None, timeout=timeout_s
            )
        )
    )
    chosen = "" if config.software_version else f" (the default, by {SOURCE})"
    yield _offered("gcp-image", f"There is an image {image}{chosen}", image, versions)
    if config.reservation is not None:
        request = tpu_v2alpha1.ListReservationsRequest(parent=parent)
        names = api.ask(
            lambda timeout_s: [
                one.name.rsplit("/", 1)[1]
                for one in api.alpha.list_reservations(request, retry=None, timeout=timeout_s)
            ]
        )
        name = config.reservation.rsplit("/", 1)[-1]
        yield _offered("gcp-reservation", f"There is a reservation {name}", name, names)
    yield DoctorFinding(
        *("gcp-network", "environment", "info"),
        f"Hosts will be in the VPC network {config.network!r} "
        f"{'with' if api.launch.external_addresses else 'without'} external addresses, which this "
        "API does not show: its firewall must let ssh (port 22) in from here, and all ports "
        "between hosts",
    )
    yield _quota(api, zone)


def _offered(id_: str, seen: str, wanted: str, known: list[str]) -> DoctorFinding:
    if wanted in known:
        return DoctorFinding(id_, "resources", "ok", seen)
    return DoctorFinding(
        *(id_, "resources", "error", f"Not so: {seen}"),
        fix=f"Choose another of {', '.join(known) or 'none'}.{did_you_mean(wanted, known)}",
    )


def _quota(api: CloudTPU, zone: str) -> DoctorFinding:
    """The API does not show quota; what holds some for nothing can be seen."""
    pods = [read_pod(one, {}, notices={}) for one in api.list_queued(zone)]
    lost = [pod for pod in pods if pod is not None and pod.state.is_lost]
    if not lost:
        return DoctorFinding(
            *("gcp-quota", "resources", "info"),
            "This API does not show quota; a request above it is refused at once, with the limit. "
            "What your project was granted can stand in launch.limits, and is kept then",
        )
    chips = sum(pod.slice.chips for pod in lost)
    return DoctorFinding(
        *("gcp-quota", "resources", "warning"),
        f"{len(lost)} lost pods in {zone} still hold quota for {chips} chips: "
        + ", ".join(pod.name for pod in lost[:5]),
        fix="Delete them: tpukit pods down NAME.",
    )
