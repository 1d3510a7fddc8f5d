"""Where pods are asked for, and as whom: a job's launch section, the environment, arguments."""

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

# A change made in Python goes before the environment, as an argument does.
_SAID_IN_PYTHON = ("argument", "assigned")
_LEFT_OPEN = (
    *("zones", "network", "software_version", "enable_ip_alias"),
    *("max_price_per_hour", "queue_timeout_s", "priority"),
)


class PodSettings(LaunchSettings, Settings):
    """The settings of a manager; `origin_of` says where each came from."""

    @classmethod
    def gather(
        cls,
        section: Mapping[str, Any] | None = None,
        arguments: Mapping[str, Any] | None = None,
        *,
        origins: Mapping[str, Origin] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> "PodSettings":
        """Join a launch section, the environment and arguments; each wins over those before.

        Args:
            section: Values of a job's `launch:` section or of a flat file.
            arguments: What was said in Python; None counts as not said.
            origins: Where values of `section` came from, by name.
            environment: `os.environ` by default.

        Raises:
            ConfigError: A key is unknown or a value wrong; the message says where it came from.
        """
        variables = os.environ if environment is None else environment
        document = Document(frozenset())
        for name, value in (section or {}).items():
            document.add({name: value}, (origins or {}).get(name, Origin("file", "launch:")))
        found = Document(frozenset())
        found.add_environment(variables, TPUConfig.model_fields)
        taken = found.take(CloudSettings.model_fields)
        for name, value in taken.values.items():
            if document.origins.get(name, Origin("default")).kind not in _SAID_IN_PYTHON:
                document.add({name: value}, taken.origins[name])
        before = document.origins.get("provider", Origin("default"))
        if variables.get(VARIABLE) and before.kind not in _SAID_IN_PYTHON:
            document.add({"provider": variables[VARIABLE]}, Origin("environment", VARIABLE))
        said = {name: value for name, value in (arguments or {}).items() if value is not None}
        document.add(said, Origin("argument"))
        return cls.from_document(document)

    @classmethod
    def of_config(cls, config: TPUConfig, arguments: Mapping[str, Any]) -> "PodSettings":
        """Take what a `TPUConfig` says of the cloud, under the environment and arguments."""
        said = config.model_dump(mode="json", include=set(CloudSettings.model_fields))
        section = {name: value for name, value in said.items() if name in config.model_fields_set}
        origins = {name: config.origin_of(name) for name in section}
        return cls.gather(section, arguments, origins=origins)

    @property
    def provider_name(self) -> str:
        """Who provides pods."""
        return self.provider or DEFAULT

    @property
    def all_zones(self) -> tuple[str, ...]:
        """The zone and the further zones, in the order to try them in."""
        first = () if self.zone is None else (self.zone,)
        return tuple(dict.fromkeys((*first, *self.zones)))

    def complete(self, config: PodConfig) -> PodConfig:
        """Return a request with what it leaves open filled in from these settings."""
        if config.tpu_type is None:
            return config.build()  # which says what is missing
        own, plain = PodConfig.of(self, config.tpu_type), PodConfig()
        filled: dict[str, Any] = {
            name: getattr(own, name)
            for name in _LEFT_OPEN
            if getattr(config, name) == getattr(plain, name)
        }
        if config.tier is Tier.ON_DEMAND:
            filled |= {"tier": own.tier, "reservation": own.reservation}
        return replace(config, **filled).build()
