"""Requests to the API as data: which kind, which object, which verb, with which options."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..kinds import Installed, Kind
from ..refusal import Refusal

_RESOURCE = re.compile(
    r"/(?:api/(?P<core>v1)|apis/(?P<group>[^/]+)/(?P<version>[^/]+))"
    r"(?:/namespaces/(?P<namespace>[^/]+)(?=/))?/(?P<plural>[^/]+)"
    r"(?:/(?P<name>[^/]+)(?:/(?P<part>[^/]+))?)?"
)
_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


@dataclass(frozen=True)
class Call:
    """A request for objects.

    Attributes:
        part: A subresource, such as "status" or "log"; "" for the object itself.
        verb: As access rules name it.
    """

    kind: Kind
    verb: str
    namespace: str | None = None
    name: str | None = None
    part: str = ""
    options: Mapping[str, str] = field(default_factory=dict[str, str])
    version: str = ""

    @property
    def api_version(self) -> str:
        """The API version of the request, in which its answer is written."""
        return f"{self.kind.group}/{self.version}" if self.kind.group else self.version

    def is_set(self, option: str) -> bool:
        """Whether an option is true."""
        return self.options.get(option) in ("true", "1")

    def number(self, option: str) -> int | None:
        """Return an option's number, or None.

        Raises:
            Refusal: It is none.
        """
        text = self.options.get(option)
        if text is None or text == "":
            return None
        if not (text.isascii() and text.isdigit()):
            raise Refusal(400, f"{option}={text!r} is not a number")
        return int(text)

    def __str__(self) -> str:
        how = "dry-run " if self.options.get("dryRun") else ""
        return f"{how}{self.verb} {self.kind.plural}{'/' + self.part if self.part else ''}"


def read_call(
    method: str, path: str, options: Mapping[str, str], installed: Installed
) -> Call | None:
    """Return what a request asks for; None where its path names no objects.

    Raises:
        Refusal: There is no such kind.
    """
    found = _RESOURCE.fullmatch(path)
    if not found:
        return None
    group, version = found["group"] or "", found["core"] or found["version"]
    kind = installed.find(group, version, found["plural"])
    if kind is None:
        raise Refusal(404, "the server could not find the requested resource")
    if method == "GET":
        watches = options.get("watch") in ("true", "1")
        verb = "get" if found["name"] else "watch" if watches else "list"
    else:
        verb = _VERBS.get(method, method.lower())
        if verb == "delete" and not found["name"]:
            verb = "deletecollection"
    part = found["part"] or ""
    return Call(kind, verb, found["namespace"], found["name"], part, options, version)
