"""What the API answers when it refuses: Statuses, as clients read them."""

from typing import Any

from .kinds import Kind

REASONS = {
    400: "BadRequest",
    401: "Unauthorized",
    403: "Forbidden",
    404: "NotFound",
    405: "MethodNotAllowed",
    409: "Conflict",
    410: "Expired",
    415: "UnsupportedMediaType",
    422: "Invalid",
    429: "TooManyRequests",
    500: "InternalError",
    503: "ServiceUnavailable",
    504: "Timeout",
}


class Refusal(Exception):
    """A request was refused."""

    def __init__(
        self,
        code: int,
        message: str,
        *,
        reason: str | None = None,
        details: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.reason = reason or REASONS[code]
        self.details = details or {}

    def to_status(self) -> dict[str, Any]:
        """The answer's body."""
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "reason": self.reason,
            "details": self.details,
            "code": self.code,
        }


def not_found(kind: Kind, name: str) -> Refusal:
    """There is no such object."""
    details = {"name": name, "group": kind.group, "kind": kind.plural}
    return Refusal(404, f'{kind} "{name}" not found', details=details)


def already_there(kind: Kind, name: str) -> Refusal:
    """There is such an object."""
    details = {"name": name, "group": kind.group, "kind": kind.plural}
    return Refusal(409, f'{kind} "{name}" already exists', reason="AlreadyExists", details=details)


def conflict(kind: Kind, name: str) -> Refusal:
    """The object has changed since it was read."""
    return Refusal(
        409,
        f'Operation cannot be fulfilled on {kind} "{name}": the object has been modified; please '
        "apply your changes to the latest version and try again",
        details={"name": name, "group": kind.group, "kind": kind.plural},
    )


def invalid(kind: Kind, name: str, causes: list[tuple[str, str]]) -> Refusal:
    """Fields have values that are not allowed."""
    said = [
        {"reason": "FieldValueInvalid", "message": message, "field": field}
        for field, message in causes
    ]
    text = ", ".join(f"{field}: {message}" for field, message in causes)
    return Refusal(
        422,
        f'{kind.name}.{kind.group} "{name}" is invalid: {text}',
        details={"name": name, "group": kind.group, "kind": kind.name, "causes": said},
    )
