"""Providers by name. To add one, add a line here and a class that implements `Provider`."""

import os
from importlib import import_module
from typing import Any, cast

from ...errors import ConfigError, MissingExtraError, did_you_mean
from ...job.sections import PROVIDER_VARIABLE, LaunchSettings
from .protocol import Provider, check_terms

# Name: module, class, and the extra that installs its dependencies.
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
    """Open the provider of that name with a job's `launch:` settings.

    Args:
        name: By default `launch.provider`, then the variable TPUKIT_PROVIDER, then "local".
        launch: Has the project, zones, credentials and other settings.

    Raises:
        ConfigError: There is no such provider, or it does not offer the requested terms.
        MissingExtraError: The provider's library is not installed.
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
        opened: Any = getattr(import_module(module, __package__), kind)
    except ModuleNotFoundError as error:
        if extra is None or str(error.name).startswith("tpukit"):
            raise
        raise MissingExtraError(
            extra, needed_for=f"The provider {chosen!r}", module=str(error.name)
        ) from error
    provider = cast("Provider", opened(launch))
    check_terms(provider.name, provider.capabilities, launch)
    return provider
