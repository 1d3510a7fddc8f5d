"""Which packages are installed here, in which version, and what they require."""

from importlib.metadata import PackageNotFoundError, distributions, requires, version

NOT_INSTALLED = "none"
"""What a table of versions says of a package that is not there."""


def installed_version(package: str) -> str | None:
    """The version of an installed package, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def installed_versions(*packages: str) -> dict[str, str]:
    """The version of each package, `NOT_INSTALLED` where there is none."""
    return {package: installed_version(package) or NOT_INSTALLED for package in packages}


def installed_requirements(package: str) -> list[str]:
    """What an installed package requires, as written in its metadata; nothing where it is not."""
    try:
        return requires(package) or []
    except PackageNotFoundError:
        return []


def is_any_installed(prefix: str) -> bool:
    """Whether a package is installed whose name starts so."""
    names = (str(distribution.metadata["Name"]).lower() for distribution in distributions())
    return any(name.startswith(prefix) for name in names)
