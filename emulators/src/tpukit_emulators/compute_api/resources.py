"""What owners make: workload policies, instance templates and groups, and what is wrong in them."""

import math
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from google.cloud import compute_v1
from google.protobuf import json_format

from tpukit.errors import SliceError
from tpukit.hardware import Slice
from tpukit.hardware.topology import parse_shape

from ..holding import OverQuota
from .offers import MachineType
from .operations import SITE
from .refusals import Json, OperationFailed, Refused, invalid, not_found
from .times import written

MODELS = ("STANDARD", "SPOT", "RESERVATION_BOUND", "FLEX_START")
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
_LABEL = re.compile(r"[a-z0-9_-]{0,63}")


@dataclass
class Resource:
    """Something that an owner made.

    Attributes:
        path: `projects/P/regions/R/resourcePolicies/N` and the like.
        body: As it was asked for.
        is_ready: Whether the operation that makes it is done.
        is_leaving: Whether one that removes it has begun.
    """

    path: str
    body: Json
    number: int
    created_at: float
    is_ready: bool = False
    is_leaving: bool = False

    @property
    def name(self) -> str:
        """The last part of its path."""
        return self.path.rsplit("/", 1)[1]

    @property
    def link(self) -> str:
        """Its address."""
        return f"{SITE}/{self.path}"

    def to_body(self) -> Json:
        """Return it as the API shows it."""
        return {
            **self.body,
            "id": str(self.number),
            "name": self.name,
            "selfLink": self.link,
            "creationTimestamp": written(self.created_at),
        }


@dataclass
class Instance:
    """A machine of a group; it has an address once it starts."""

    name: str
    number: int
    worker: int
    address: str = ""


@dataclass
class Group(Resource):
    """A managed instance group.

    Attributes:
        size: Its target size.
        over_quota: Why no machine can be made, where quota is the reason.
        struck: Which machines alone are taken away, where not all are.
    """

    template: Resource = field(kw_only=True)
    policy: Resource | None = field(kw_only=True)
    machine: MachineType = field(kw_only=True)
    size: int = field(kw_only=True)
    instances: list[Instance] = field(default_factory=list[Instance])
    over_quota: OverQuota | None = None
    struck: Collection[int] | None = None

    @property
    def scheduling(self) -> Json:
        """How its machines may be taken away."""
        return self.template.body["properties"].get("scheduling", {})

    @property
    def model(self) -> str:
        """STANDARD, SPOT, RESERVATION_BOUND or FLEX_START."""
        return self.scheduling.get("provisioningModel", "STANDARD")

    @property
    def topology(self) -> str | None:
        """The shape of the slice that its machines form, where they do."""
        if self.policy is None:
            return None
        return self.policy.body["workloadPolicy"].get("acceleratorTopology")

    @property
    def is_bulk(self) -> bool:
        """Whether all machines are made at once."""
        return self.body.get("targetSizePolicy", {}).get("mode") == "BULK"

    @property
    def repairs(self) -> bool:
        """Whether it makes lost machines again; of spot ones it never does."""
        policy = self.body.get("instanceLifecyclePolicy", {})
        return self.model != "SPOT" and policy.get("defaultActionOnFailure") != "DO_NOTHING"

    @property
    def reservation(self) -> str | None:
        """The reservation it takes machines from."""
        affinity = self.template.body["properties"].get("reservationAffinity", {})
        if affinity.get("consumeReservationType") != "SPECIFIC_RESERVATION":
            return None
        return affinity["values"][0].rsplit("/", 1)[-1]

    def check_size(self, size: int) -> None:
        """Check that so many machines form the slice.

        Raises:
            OperationFailed: In the words of GoogleCloudPlatform/magic-modules#17153, which carry
                no status of HTTP.
        """
        if self.topology is None or size == 0:
            return
        wanted = math.prod(parse_shape(self.topology)) // self.machine.chips
        if size != wanted:
            raise OperationFailed(
                [
                    {
                        "code": "INVALID_USAGE",
                        "message": f"Target size should be {wanted} for given accelerator "
                        f"topology but was {size}.",
                    }
                ]
            )


def check_name(name: str) -> str:
    """Return a name that the API takes."""
    if not _NAME.fullmatch(name):
        raise invalid("resource.name", name, f"Must be a match of regex '{_NAME.pattern}'")
    return name


def check_fields(kind: str, body: Json) -> None:
    """Check that a body has no other fields than the client's own message of that kind."""
    message: Any = getattr(compute_v1, kind).pb()
    try:
        json_format.ParseDict(body, message())
    except json_format.ParseError as error:
        raise Refused(400, "invalid", f"Invalid JSON payload received. {error}") from error


def check_policy(body: Json) -> None:
    """Check a workload policy."""
    policy = body.get("workloadPolicy")
    if policy is None:
        raise invalid("resource.workloadPolicy", "", "Only workload policies are emulated.")
    if policy.get("type") not in ("HIGH_THROUGHPUT", "HIGH_AVAILABILITY"):
        raise invalid("resource.workloadPolicy.type", policy.get("type"), "Unknown type.")
    topology = policy.get("acceleratorTopology")
    try:
        if topology is not None:
            parse_shape(topology)
    except SliceError as error:
        raise invalid(
            "resource.workloadPolicy.acceleratorTopology", topology, "No such topology."
        ) from error


def check_template(body: Json) -> None:
    """Check an instance template."""
    properties = body.get("properties", {})
    for needed in ("machineType", "disks", "networkInterfaces"):
        if not properties.get(needed):
            raise Refused(
                400, "required", f"Required field 'resource.properties.{needed}' not specified"
            )
    scheduling = properties.get("scheduling", {})
    model = scheduling.get("provisioningModel", "STANDARD")
    if model not in MODELS:
        raise invalid("resource.properties.scheduling.provisioningModel", model, "Unknown.")
    if scheduling.get("onHostMaintenance") != "TERMINATE":
        raise invalid(
            "resource.properties.scheduling.onHostMaintenance",
            scheduling.get("onHostMaintenance", "MIGRATE"),
            "Instances with TPUs do not support live migration.",
        )
    if model == "FLEX_START" and "maxRunDuration" not in scheduling:
        raise invalid(
            "resource.properties.scheduling.maxRunDuration", "", "FLEX_START needs a run duration."
        )
    for key, value in properties.get("labels", {}).items():
        if not _LABEL.fullmatch(value):
            raise invalid(f"resource.properties.labels.{key}", value, "Invalid label value.")


def check_group(group: Group, bulk_models: Collection[str]) -> None:
    """Check that a group's parts fit each other.

    https://docs.cloud.google.com/compute/docs/instance-groups/about-bulk-mode
    """
    mode = "resource.targetSizePolicy.mode"
    if group.is_bulk and group.model not in bulk_models:
        raise invalid(
            mode, "BULK", f"Bulk mode does not support the provisioning model {group.model}."
        )
    action = group.body.get("instanceLifecyclePolicy", {}).get("defaultActionOnFailure")
    if group.model == "FLEX_START" and action != "DO_NOTHING":
        raise invalid(
            "resource.instanceLifecyclePolicy.defaultActionOnFailure",
            action or "REPAIR",
            "FLEX_START requires DO_NOTHING.",
        )
    if group.topology is not None:
        try:
            Slice.of(group.machine.generation, topology=group.topology)
        except SliceError as error:
            raise invalid(
                "resource.resourcePolicies.workloadPolicy",
                group.topology,
                f"Accelerator topology is not supported by {group.machine.name}.",
            ) from error
    for part in (group.template, group.policy):
        if part is not None and not part.is_ready:
            raise Refused(400, "resourceNotReady", f"The resource '{part.path}' is not ready")
        if part is not None and part.is_leaving:
            raise not_found(part.path)
