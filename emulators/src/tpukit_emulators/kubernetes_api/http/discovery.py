"""What the API says of itself: versions, groups, kinds, and as much OpenAPI as kubectl needs."""

from typing import Any

from ..kinds import KINDS, Installed, Kind

VERBS = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]
VERSION = {
    "major": "1",
    "minor": "34",
    "gitVersion": "v1.34.3-gke.emulated",
    "gitCommit": "",
    "gitTreeState": "clean",
    "buildDate": "2026-01-01T00:00:00Z",
    "goVersion": "",
    "compiler": "",
    "platform": "linux/amd64",
}


def groups(installed: Installed) -> list[tuple[str, str]]:
    """Return the groups with their versions, the preferred version of a group first."""
    return list(
        dict.fromkeys(
            (kind.group, version) for kind in KINDS for version in installed.versions_of(kind)
        )
    )


def api_versions(address: str) -> dict[str, Any]:
    """Answer GET /api."""
    by_client = [{"clientCIDR": "0.0.0.0/0", "serverAddress": address}]
    return {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": by_client}


def group_list(installed: Installed) -> dict[str, Any]:
    """Answer GET /apis."""
    names = dict.fromkeys(group for group, _ in groups(installed) if group)
    found = [group_entry(name, installed) for name in names]
    return {"kind": "APIGroupList", "apiVersion": "v1", "groups": found}


def group_entry(name: str, installed: Installed) -> dict[str, Any]:
    """Answer GET /apis/GROUP."""
    served = [
        {"groupVersion": f"{group}/{version}", "version": version}
        for group, version in groups(installed)
        if group == name
    ]
    kind = {"kind": "APIGroup", "apiVersion": "v1"}
    return {**kind, "name": name, "versions": served, "preferredVersion": served[0]}


def resource_list(group: str, version: str, installed: Installed) -> dict[str, Any]:
    """Answer GET /api/v1 and /apis/GROUP/VERSION."""
    resources: list[dict[str, Any]] = []
    for kind in KINDS:
        if kind.group != group or version not in installed.versions_of(kind):
            continue
        entry: dict[str, Any] = {
            "name": kind.plural,
            "singularName": kind.name.lower(),
            "namespaced": kind.is_namespaced,
            "kind": kind.name,
            "verbs": VERBS,
        }
        if kind.short_names:
            entry["shortNames"] = list(kind.short_names)
        resources.append(entry)
        for part in (*(("status",) if kind.has_status else ()), *kind.subresources):
            resources.append(
                {
                    "name": f"{kind.plural}/{part}",
                    "singularName": "",
                    "namespaced": kind.is_namespaced,
                    "kind": "Eviction" if part == "eviction" else kind.name,
                    "verbs": ["create"] if part == "eviction" else ["get", "patch", "update"],
                    **({"group": "policy", "version": "v1"} if part == "eviction" else {}),
                }
            )
    full = f"{group}/{version}" if group else version
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": full,
        "resources": resources,
    }


def openapi_index(installed: Installed) -> dict[str, Any]:
    """Answer GET /openapi/v3."""
    paths = [
        f"apis/{group}/{version}" if group else "api/v1" for group, version in groups(installed)
    ]
    return {"paths": {path: {"serverRelativeURL": f"/openapi/v3/{path}?hash=1"} for path in paths}}


def openapi_document(group: str, version: str, installed: Installed) -> dict[str, Any]:
    """Answer GET /openapi/v3/…: enough for `kubectl apply` to let the server validate fields."""
    paths: dict[str, Any] = {}
    for kind in KINDS:
        if kind.group == group and version in installed.versions_of(kind):
            paths[_path(kind, version)] = {
                "patch": {
                    "operationId": f"patch{kind.name}",
                    "parameters": [
                        {"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}
                    ],
                    "responses": {"200": {"description": "OK"}},
                    "x-kubernetes-action": "patch",
                    "x-kubernetes-group-version-kind": {
                        "group": kind.group,
                        "version": version,
                        "kind": kind.name,
                    },
                }
            }
    title = {"title": "Kubernetes (emulated)", "version": VERSION["gitVersion"]}
    return {"openapi": "3.0.0", "info": title, "paths": paths, "components": {"schemas": {}}}


def _path(kind: Kind, version: str) -> str:
    start = f"/apis/{kind.group}/{version}" if kind.group else f"/api/{version}"
    inside = "/namespaces/{namespace}" if kind.is_namespaced else ""
    return f"{start}{inside}/{kind.plural}/{{name}}"
