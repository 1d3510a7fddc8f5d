"""Who asks Google's APIs, whom, and at whose cost."""

from functools import cached_property
from typing import ClassVar

from ....errors import ConfigError
from ....job.sections import LaunchSettings
from ....runtime.google_credentials import Identity, find_identity

HOST_KEYS = "hostkeys/"
"""Guest attributes in which Google's guest agent publishes a host's ssh keys."""


class GoogleProject:
    """One project, as a job's `launch:` section and its credentials name it.

    Args:
        launch: Project, credentials and endpoint.
    """

    default_endpoint: ClassVar[str]

    def __init__(self, launch: LaunchSettings) -> None:
        self.launch = launch

    @cached_property
    def identity(self) -> Identity:
        """Who asks."""
        return find_identity(self.launch.credentials_file)

    @property
    def endpoint(self) -> str:
        """Whom we ask."""
        return self.launch.endpoint or self.default_endpoint

    @property
    def project(self) -> str:
        """In whose name, and at whose cost.

        Raises:
            ConfigError: Neither the job nor the credentials name one.
        """
        project = self.launch.project or self.identity.project
        if not project:
            raise ConfigError("Say which Google Cloud project pays: launch.project.")
        return project
