"""Installed packages: their versions and requirements."""

from importlib.metadata import PackageNotFoundError, distributions, requires, version

NOT_INSTALLED = "none"
"""What a table of versions says of a package that is not there."""


def installed_version(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def installed_versions(*packages: str) -> dict[str, str]:
    """Return the version of each package, `NOT_INSTALLED` for a missing one."""
    return {package: installed_version(package) or NOT_INSTALLED for package in packages}


def installed_requirements(package: str) -> list[str]:
    """Return the `Requires-Dist` lines of an installed package; empty if not installed."""
    try:
        return requires(package) or []
    except PackageNotFoundError:
        return []


def is_any_installed(prefix: str) -> bool:
    """Whether a package with this name prefix is installed."""
    names = (str(distribution.metadata["Name"]).lower() for distribution in distributions())
    return any(name.startswith(prefix) for name in names)
