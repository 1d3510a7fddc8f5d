"""How the API says no: by the status of a call, or inside an operation that had begun."""

from collections.abc import Sequence
from typing import Any

Json = dict[str, Any]


class Refused(Exception):
    """A call that the API refuses at once.

    Attributes:
        status: Of HTTP.
        reason: Google's word for it: "notFound", "alreadyExists", "forbidden", "invalid", ….
    """

    def __init__(self, status: int, reason: str, message: str) -> None:
        self.status, self.reason, self.message = status, reason, message
        super().__init__(message)

    def to_body(self) -> Json:
        """Return what the API answers."""
        one = {"message": self.message, "domain": "global", "reason": self.reason}
        if self.status == 401:
            one |= {"location": "Authorization", "locationType": "header"}
        return {"error": {"code": self.status, "message": self.message, "errors": [one]}}


def invalid(field: str, value: object, why: str) -> Refused:
    """Return the refusal of a value."""
    return Refused(400, "invalid", f"Invalid value for field '{field}': '{value}'. {why}")


def not_found(path: str) -> Refused:
    """Return the refusal of a name that nothing has."""
    return Refused(404, "notFound", f"The resource '{path}' was not found")


def in_use(kind: str, path: str, by: str) -> Refused:
    """Return the refusal to delete what something else needs."""
    return Refused(
        400,
        "resourceInUseByAnotherResource",
        f"The {kind} resource '{path}' is already being used by '{by}'",
    )


class OperationFailed(Exception):
    """Something that had begun and failed.

    Attributes:
        errors: As `error.errors` of the operation lists them.
        http: Status and words beside them; None: the API gives the errors alone, and a client
            that looks at the status takes the operation for a success.
    """

    def __init__(self, errors: Sequence[Json], http: tuple[int, str] | None = None) -> None:
        self.errors, self.http = list(errors), http
        super().__init__(errors[0]["message"])


def stock_out(zone_path: str, machine_type: str) -> Json:
    """Return the error of a zone that has none left.

    As users met it: kubernetes/k8s.io#9834, scylladb/scylla-cluster-tests#12477.
    """
    zone = zone_path.rsplit("/", 1)[1]
    metadata = {"zone": zone, "vmType": machine_type, "attachment": "", "zonesAvailable": ""}
    return {
        "code": "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS",
        "message": f"The zone '{zone_path}' does not have enough resources available to fulfill "
        "the request.  '(resource type:compute)'.",
        "errorDetails": [
            {
                "errorInfo": {
                    "reason": "resource_availability",
                    "domain": "compute.googleapis.com",
                    "metadatas": metadata,
                }
            },
            {
                "help": {
                    "links": [
                        {
                            "description": "Troubleshooting documentation",
                            "url": "https://cloud.google.com/compute/docs/resource-error",
                        }
                    ]
                }
            },
        ],
    }


def quota_exceeded(region: str, family: str, limit: int, *, spot: bool) -> Json:
    """Return the error of a project whose quota for a family of TPUs is used up."""
    metric = "preemptible_tpus_per_tpu_family" if spot else "tpus_per_tpu_family"
    named = metric.upper()
    return {
        "code": "QUOTA_EXCEEDED",
        "message": f"Quota '{named}' exceeded.  Limit: {float(limit)} in region {region}.",
        "errorDetails": [
            {
                "quotaInfo": {
                    "metricName": f"compute.googleapis.com/{metric}",
                    "limitName": f"{named.replace('_', '-')}-per-project-region",
                    "dimensions": {"region": region, "tpu_family": family},
                    "limit": float(limit),
                }
            }
        ],
    }
