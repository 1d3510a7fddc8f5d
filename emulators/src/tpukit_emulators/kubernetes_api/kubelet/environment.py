"""The environment of a container: its variables, its files, and names that resolve.

What the machine cannot do is done by replacing text in arguments and variables: a path under a
mount becomes the path of the files on this machine, and the name of a Pod under a headless
Service becomes an address of its own on loopback (all of 127.0.0.0/8 is).
"""

import base64
import ipaddress
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tpukit.pods.manifests.reading import at, mapping, sequence, texts

from .. import well_known
from ..admission import chips_of
from ..kinds import CONFIG_MAP, SECRET, SERVICE
from ..store import Object, Store

_HOST = re.compile(r"([a-z0-9][-a-z0-9]*)\.([a-z0-9][-a-z0-9]*)((?:\.[a-z0-9-]+)*)")
_VARIABLE = re.compile(r"\$\$|\$\(([-._A-Za-z][-._A-Za-z0-9]*)\)")
_FIELD = re.compile(r"metadata\.(labels|annotations)\['([^']+)'\]")
_FIRST_ADDRESS = ipaddress.IPv4Address("127.96.0.1")  # emulated machines have those below
# The image: what a process here needs of this one's environment.
_INHERITED = (
    *("HOME", "LANG", "PYTHONPATH", "VIRTUAL_ENV", "TZ"),
    *("TPU_SKIP_MDS_QUERY", "NO_GCE_CHECK", "TPUKIT_CACHE_DIR"),
)


class ConfigError(Exception):
    """A container cannot be made, because something that it refers to is missing."""


class Addresses:
    """Loopback addresses of Pods by their names, the same as long as the cluster lives."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._given: dict[tuple[str, str, str], str] = {}

    def of(self, namespace: str, hostname: str, subdomain: str) -> str:
        """Return the address of a Pod's name."""
        key = (namespace, hostname, subdomain)
        if key not in self._given:
            self._given[key] = str(_FIRST_ADDRESS + len(self._given))
        return self._given[key]

    def resolve(self, namespace: str, text: str) -> str:
        """Return text in which names of Pods under a headless Service are addresses."""

        def address(found: re.Match[str]) -> str:
            service = self._store.find(SERVICE, namespace, found[2])
            tail = found[3]
            is_local = tail in ("", f".{namespace}", f".{namespace}.svc")
            if at(service, "spec", "clusterIP") != "None":
                return found[0]
            if not is_local and not tail.startswith(f".{namespace}.svc."):
                return found[0]
            return self.of(namespace, found[1], found[2])

        return _HOST.sub(address, text)


class Environment:
    """Makes the files, variables and arguments of containers."""

    def __init__(self, store: Store, addresses: Addresses) -> None:
        self._store = store
        self._addresses = addresses

    def variables(self, pod: Object, container: Object, folder: Path) -> dict[str, str]:
        """Return a container's variables.

        Raises:
            ConfigError: A Secret, a ConfigMap or a key of one is missing.
        """
        stated: dict[str, str] = {}
        for source in sequence(container.get("envFrom")):
            for kind, field in ((SECRET, "secretRef"), (CONFIG_MAP, "configMapRef")):
                if reference := mapping(at(source, field)):
                    found = self._data(pod, kind, str(reference["name"]))
                    prefix = str(at(source, "prefix") or "")
                    stated |= {prefix + key: one.decode() for key, one in found.items()}
        for one in sequence(container.get("env")):
            value = self._value(pod, one)
            if value is not None:
                stated[one["name"]] = expand(value, stated)
        mounts = self.mounts(pod, container, folder)
        stated = {key: self._translate(pod, value, mounts) for key, value in stated.items()}
        own = {"HOSTNAME": str(at(pod, "spec", "hostname") or pod["metadata"]["name"])}
        return _image(folder) | _devices(pod) | stated | own

    def arguments(
        self, pod: Object, container: Object, variables: Mapping[str, str], folder: Path
    ) -> list[str]:
        """Return a container's argument list."""
        words = [*sequence(container.get("command")), *sequence(container.get("args"))]
        mounts = self.mounts(pod, container, folder)
        return [self._translate(pod, expand(str(word), variables), mounts) for word in words]

    def mounts(self, pod: Object, container: Object, folder: Path) -> dict[str, str]:
        """Return where the mounts of a container are on this machine, by their paths."""
        return {
            one["mountPath"].rstrip("/"): str(folder / "volumes" / one["name"])
            for one in sequence(container.get("volumeMounts"))
        }

    def write_volumes(self, pod: Object, folder: Path) -> None:
        """Write the files of a Pod's volumes; each is a folder.

        Raises:
            ConfigError: A Secret or a ConfigMap is missing.
        """
        for volume in sequence(at(pod, "spec", "volumes")):
            place = folder / "volumes" / volume["name"]
            place.mkdir(parents=True, exist_ok=True)
            sources = [
                (CONFIG_MAP, at(volume, "configMap", "name")),
                (SECRET, at(volume, "secret", "secretName")),
            ]
            for part in sequence(at(volume, "projected", "sources")):
                sources.append((CONFIG_MAP, at(part, "configMap", "name")))
                sources.append((SECRET, at(part, "secret", "name")))
            for kind, source in sources:
                for name, content in (self._data(pod, kind, source) if source else {}).items():
                    (place / name).write_bytes(content)

    def _translate(self, pod: Object, text: str, mounts: Mapping[str, str]) -> str:
        for path, real in mounts.items():
            text = re.sub(rf"(?<![\w/.-]){re.escape(path)}(?=/|$|[\s:,'\"])", real, text)
        return self._addresses.resolve(pod["metadata"]["namespace"], text)

    def _value(self, pod: Object, variable: Object) -> str | None:
        if "value" in variable:
            return str(variable["value"])
        source = mapping(variable.get("valueFrom"))
        if path := at(source, "fieldRef", "fieldPath"):
            return _field(pod, str(path))
        for kind, field in ((SECRET, "secretKeyRef"), (CONFIG_MAP, "configMapKeyRef")):
            if reference := mapping(source.get(field)):
                found = self._data(pod, kind, str(reference["name"])).get(reference["key"])
                if found is None and not reference.get("optional"):
                    raise ConfigError(
                        f"couldn't find key {reference['key']} in {kind.name} "
                        f"{pod['metadata']['namespace']}/{reference['name']}"
                    )
                return None if found is None else found.decode()
        return ""

    def _data(self, pod: Object, kind: Any, name: str) -> dict[str, bytes]:
        found = self._store.find(kind, pod["metadata"]["namespace"], name)
        if found is None:
            raise ConfigError(f'{kind.name.lower()} "{name}" not found')
        encoded = texts(found.get("data" if kind is SECRET else "binaryData"))
        plain = {} if kind is SECRET else texts(found.get("data"))
        return {key: base64.b64decode(one) for key, one in encoded.items()} | {
            key: one.encode() for key, one in plain.items()
        }


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Return text in which `$(NAME)` is a variable's value and `$$` is `$`."""

    def value(found: re.Match[str]) -> str:
        return "$" if found[0] == "$$" else variables.get(found[1], found[0])

    return _VARIABLE.sub(value, text)


def _field(pod: Object, path: str) -> str:
    if found := _FIELD.fullmatch(path):
        return str(at(pod, "metadata", found[1], found[2]) or "")
    value = at(pod, *path.split("."))
    return "" if value is None else str(value)


def _image(folder: Path) -> dict[str, str]:
    python = os.path.dirname(sys.executable)
    path = os.pathsep.join(dict.fromkeys((python, *os.environ.get("PATH", os.defpath).split(":"))))
    kept = {key: os.environ[key] for key in _INHERITED if key in os.environ}
    return kept | {"PATH": path, "TMPDIR": str(folder)}


def _devices(pod: Object) -> dict[str, str]:
    """Show the chips of a Pod as virtual devices of the CPU."""
    if not (chips := chips_of(pod)):
        return {}
    doubled = texts(at(pod, "spec", "nodeSelector")).get(well_known.ACCELERATOR) == "tpu7x"
    devices = chips * (2 if doubled else 1)
    return {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }
