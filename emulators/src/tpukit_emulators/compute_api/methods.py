"""Which calls the API has, recorded from the installed client itself, so they cannot drift."""

import re
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

from google.cloud import compute_v1

# What pods need; other services of Compute Engine are not there.
SERVICES = (
    "GlobalOperations",
    "InstanceGroupManagers",
    "InstanceTemplates",
    "Instances",
    "MachineTypes",
    "RegionOperations",
    "Regions",
    "Reservations",
    "ResourcePolicies",
    "ZoneOperations",
    "Zones",
)
_WORD = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_VARIABLE = re.compile(r"\{(\w+)\}")
# Where a permission's verb is not the method's own name.
_VERBS = {
    "insert": "create",
    "aggregated_list": "list",
    "list_managed_instances": "get",
    "list_errors": "get",
    "resize": "update",
    "wait": "get",
}


@dataclass(frozen=True)
class Method:
    """One method of the API.

    Attributes:
        service: "InstanceGroupManagers".
        name: "list_managed_instances".
        verb: "GET", "POST", "DELETE", "PATCH".
        path: Matches its paths, with the variables as groups.
    """

    service: str
    name: str
    verb: str
    path: re.Pattern[str]

    @property
    def full_name(self) -> str:
        """As Google writes it: "instanceGroupManagers.listManagedInstances"."""
        return f"{_first_small(self.service)}.{_camel(self.name)}"

    @property
    def permission(self) -> str:
        """What its caller needs: "compute.instanceGroupManagers.create"."""
        verb = _VERBS.get(self.name, _camel(self.name))
        return f"compute.{_first_small(self.service)}.{verb}"


def recorded_methods() -> list[Method]:
    """Return the methods that the installed client calls."""
    found: list[Method] = []
    for service in SERVICES:
        base = _transport(service)
        for name, kind in vars(base).items():
            options = getattr(kind, "_get_http_options", None)
            if options is None or not name.startswith("_Base"):
                continue
            for option in options():
                pattern = re.sub(_VARIABLE, r"(?P<\1>[^/]+)", option["uri"])
                method = _snake(name.removeprefix("_Base"))
                verb = option["method"].upper()
                found.append(Method(service, method, verb, re.compile(pattern)))
    return found


def _transport(service: str) -> Any:
    package: ModuleType = import_module(
        f"{compute_v1.__name__}.services.{_snake(service)}.transports.rest_base"
    )
    return getattr(package, f"_Base{service}RestTransport")


def _snake(name: str) -> str:
    return _WORD.sub("_", name).lower()


def _camel(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(word.capitalize() for word in others)


def _first_small(name: str) -> str:
    return name[0].lower() + name[1:]
