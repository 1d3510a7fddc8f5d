"""Providers by name. A new one is a line here and a class that `Provider` describes."""

import os
from importlib import import_module
from typing import Any, cast

from ...errors import ConfigError, MissingExtraError, did_you_mean
from ...job.sections import PROVIDER_VARIABLE, LaunchSettings
from .protocol import Provider
from .terms import check_terms

# Name: module, class, and the extra that brings what it imports.
PROVIDERS: dict[str, tuple[str, str, str | None]] = {
    "local": (".local.provider", "LocalProvider", None),
    "gcp": (".gcp.provider", "CloudTPUProvider", "gcp"),
    "gke": (".gke.provider", "GKEProvider", "gke"),
    "gce": (".gce.provider", "ComputeEngineProvider", "gce"),
    "ssh": (".ssh.provider", "SSHProvider", None),
}
DEFAULT = "local"
VARIABLE = PROVIDER_VARIABLE


def open_provider(name: str | None = None, launch: LaunchSettings | None = None) -> Provider:
    """Return the provider of that name, with a job's `launch:` settings.

    Args:
        name: By default `launch.provider`, then the variable TPUKIT_PROVIDER, then "local".
        launch: Project, zones, credentials and the like.

    Raises:
        ConfigError: There is no such provider, or it does not have the terms that are set.
        MissingExtraError: The library it speaks through is not installed.
    """
    launch = launch or LaunchSettings()
    chosen = name or launch.provider or os.environ.get(VARIABLE) or DEFAULT
    if chosen not in PROVIDERS:
        raise ConfigError(
            f"There is no provider {chosen!r}; known are {', '.join(PROVIDERS)}."
            + did_you_mean(chosen, PROVIDERS)
        )
    module, kind, extra = PROVIDERS[chosen]
    try:
        made: Any = getattr(import_module(module, __package__), kind)
    except ModuleNotFoundError as error:
        if extra is None or str(error.name).startswith("tpukit"):
            raise
        raise MissingExtraError(
            extra, needed_for=f"The provider {chosen!r}", module=str(error.name)
        ) from error
    provider = cast("Provider", made(launch))
    check_terms(provider.name, provider.capabilities, launch)
    return provider
