"""Settings of a provider, merged from a job's launch section, the environment and arguments."""

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..job.config import TPUConfig
from ..job.document import Document, Origin
from ..job.sections import CloudSettings, LaunchSettings
from ..job.settings import Settings
from .config import PodConfig
from .pod import Tier
from .providers.registry import DEFAULT, VARIABLE

# Values set in Python override the environment, as arguments do.
_SAID_IN_PYTHON = ("argument", "assigned")
_LEFT_OPEN = (
    *("zones", "network", "software_version", "enable_ip_alias"),
    *("max_price_per_hour", "queue_timeout_s", "priority"),
)


class PodSettings(LaunchSettings, Settings):
    """The settings of a manager; `origin_of` returns the source of each."""

    @classmethod
    def gather(
        cls,
        section: Mapping[str, Any] | None = None,
        arguments: Mapping[str, Any] | None = None,
        *,
        origins: Mapping[str, Origin] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> "PodSettings":
        """Merge a launch section, the environment and arguments; later ones override earlier ones.

        Args:
            section: Values of a job's `launch:` section or of a flat file.
            arguments: Values given in Python; None means not given.
            origins: Sources of the values in `section`, by name.
            environment: `os.environ` by default.

        Raises:
            ConfigError: A key is unknown or a value wrong; the message names the source.
        """
        variables = os.environ if environment is None else environment
        document = Document(frozenset())
        for name, value in (section or {}).items():
            document.add({name: value}, (origins or {}).get(name, Origin("file", "launch:")))
        variables_document = Document(frozenset())
        variables_document.add_environment(variables, TPUConfig.model_fields)
        taken = variables_document.take(CloudSettings.model_fields)
        for name, value in taken.values.items():
            if document.origins.get(name, Origin("default")).kind not in _SAID_IN_PYTHON:
                document.add({name: value}, taken.origins[name])
        before = document.origins.get("provider", Origin("default"))
        if variables.get(VARIABLE) and before.kind not in _SAID_IN_PYTHON:
            document.add({"provider": variables[VARIABLE]}, Origin("environment", VARIABLE))
        given = {name: value for name, value in (arguments or {}).items() if value is not None}
        document.add(given, Origin("argument"))
        return cls.from_document(document)

    @classmethod
    def of_config(cls, config: TPUConfig, arguments: Mapping[str, Any]) -> "PodSettings":
        """Make settings from a `TPUConfig`, overridden by the environment and by arguments."""
        values = config.model_dump(mode="json", include=set(CloudSettings.model_fields))
        section = {name: value for name, value in values.items() if name in config.model_fields_set}
        origins = {name: config.origin_of(name) for name in section}
        return cls.gather(section, arguments, origins=origins)

    @property
    def provider_name(self) -> str:
        """Name of the provider, with the default filled in."""
        return self.provider or DEFAULT

    def complete(self, config: PodConfig) -> PodConfig:
        """Return a request with its open values filled in from these settings."""
        if config.tpu_type is None:
            return config.build()  # raises an error that names what is missing
        own, plain = PodConfig.of(self, config.tpu_type), PodConfig()
        filled: dict[str, Any] = {
            name: getattr(own, name)
            for name in _LEFT_OPEN
            if getattr(config, name) == getattr(plain, name)
        }
        if config.tier is Tier.ON_DEMAND:
            filled |= {"tier": own.tier, "reservation": own.reservation}
        return replace(config, **filled).build()
