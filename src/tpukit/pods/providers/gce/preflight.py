"""What would stand in the way of a pod on Compute Engine, found without asking for one."""

import shutil
from collections.abc import Callable, Iterator

from google.cloud import compute_v1

from ....errors import TPUError, did_you_mean
from ....runtime.doctor.finding import DoctorFinding
from ...config import PodConfig
from ...pod import Pod
from .api import ComputeEngine
from .machines import SOURCE, machine_type, source_image
from .request import IP_ALIAS

ADDRESSES = "IN_USE_ADDRESSES"


def find_obstacles(
    api: ComputeEngine,
    config: PodConfig,
    zone_of: Callable[[PodConfig], str],
    list_pods: Callable[[], list[Pod]],
) -> list[DoctorFinding]:
    """Return what was seen, up to the first thing without which the rest cannot be seen."""
    findings: list[DoctorFinding] = []
    try:
        findings.extend(_look(api, config, zone_of, list_pods))
    except TPUError as error:
        said = str(error)
        findings.append(DoctorFinding("gce-refused", "environment", "error", said, fix=said))
    return findings


def _look(
    api: ComputeEngine,
    config: PodConfig,
    zone_of: Callable[[PodConfig], str],
    list_pods: Callable[[], list[Pod]],
) -> Iterator[DoctorFinding]:
    if shutil.which("ssh") is None:
        yield DoctorFinding(
            *("gce-ssh", "environment", "error", "There is no program ssh here"),
            fix="Install OpenSSH's client: hosts are reached through it.",
        )
    if not config.enable_ip_alias:
        seen = f"enable_ip_alias=False: {IP_ALIAS}"
        yield DoctorFinding("gce-ip-alias", "environment", "error", seen, fix="Leave it out.")
    wanted = machine_type(config.slice)
    image = source_image(config.slice, config.software_version)
    zone = zone_of(config)
    yield DoctorFinding(
        *("gce-credentials", "environment", "ok"),
        f"Credentials of {api.identity.source}, project {api.project}",
    )
    request = compute_v1.ListMachineTypesRequest(zone=zone)
    types = sorted(
        one.name
        for one in api.list_all(api.machine_types.list, request)
        if one.name.startswith(("ct", "tpu"))
    )
    yield DoctorFinding("gce-zone", "environment", "ok", f"{zone} answers, and lets us look")
    seen = f"{zone} offers {config.slice.hosts} × {wanted} for {config.slice}"
    yield _offered("gce-machine-type", seen, wanted, types)
    chosen = "" if config.software_version else f" (the default, by {SOURCE})"
    yield DoctorFinding("gce-image", "resources", "info", f"Hosts boot from {image}{chosen}")
    if config.reservation is not None:
        name = config.reservation.rsplit("/", 1)[-1]
        request = compute_v1.ListReservationsRequest(zone=zone)
        names = sorted(one.name for one in api.list_all(api.reservations.list, request))
        yield _offered("gce-reservation", f"There is a reservation {name}", name, names)
    if api.launch.external_addresses:
        yield from _addresses(api, zone, config.slice.hosts)
    yield _quota(zone, list_pods())


def _offered(id_: str, seen: str, wanted: str, known: list[str]) -> DoctorFinding:
    if wanted in known:
        return DoctorFinding(id_, "resources", "ok", seen)
    return DoctorFinding(
        *(id_, "resources", "error", f"Not so: {seen}"),
        fix=f"Choose another; there are {', '.join(known) or 'none'}.{did_you_mean(wanted, known)}",
    )


def _addresses(api: ComputeEngine, zone: str, hosts: int) -> Iterator[DoctorFinding]:
    """Every host has an address of its own, and a region has quota for some."""
    region = api.find(api.regions.get, region=zone.rpartition("-")[0])
    if region is None:
        return
    for quota in region.quotas:
        if quota.metric != ADDRESSES:
            continue
        left = quota.limit - quota.usage
        seen = f"{left:g} of {quota.limit:g} external addresses are left in {region.name}"
        if left >= hosts:
            yield DoctorFinding("gce-addresses", "resources", "ok", seen)
        else:
            yield DoctorFinding(
                *("gce-addresses", "resources", "error", f"{seen}; {hosts} are needed"),
                fix="Ask for more quota (IN_USE_ADDRESSES), or choose a smaller slice.",
            )


def _quota(zone: str, pods: list[Pod]) -> DoctorFinding:
    """Quota for TPUs counts by family, which no call shows; what holds some for nothing is seen."""
    lost = [pod for pod in pods if pod.state.is_lost and pod.zone == zone]
    if not lost:
        return DoctorFinding(
            *("gce-quota", "resources", "info"),
            "Compute Engine does not show quota for TPUs (TPUS_PER_TPU_FAMILY); a request above "
            "it is refused with the limit",
        )
    chips = sum(pod.slice.chips for pod in lost)
    return DoctorFinding(
        *("gce-quota", "resources", "warning"),
        f"{len(lost)} lost pods in {zone} may still hold quota for {chips} chips: "
        + ", ".join(pod.name for pod in lost[:5]),
        fix="Delete them: tpukit pods down NAME.",
    )
