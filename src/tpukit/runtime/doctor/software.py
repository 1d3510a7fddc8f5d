"""Checks of installed software: Python, jax and jaxlib, their libtpu, and extras."""

import platform
import re
import sys
from collections.abc import Iterator

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from .finding import Check, DoctorFinding, Severity, Site

_EXTRA = re.compile(r"""extra == ["'](?P<extra>[^"']+)["']""")
OLDEST_PYTHON = (3, 11)
CUDA_PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin")


def check_python(_: Site) -> Iterator[DoctorFinding]:
    """Check that Python is new enough."""
    seen = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    if sys.version_info >= OLDEST_PYTHON:
        yield DoctorFinding("python", "software", "ok", seen)
    else:
        oldest = ".".join(map(str, OLDEST_PYTHON))
        yield DoctorFinding("python", "software", "error", seen, f"Use Python {oldest} or newer.")


def check_jax(site: Site) -> Iterator[DoctorFinding]:
    """Check that tpukit supports this jax, and that this jax supports its jaxlib."""
    jax, jaxlib = site.version_of("jax"), site.version_of("jaxlib")
    if jax is None or jaxlib is None:
        missing = "jax" if jax is None else "jaxlib"
        seen, fix = f"{missing} is not installed", "pip install tpukit, which brings both."
        yield DoctorFinding("jax", "software", "error", seen, fix)
        return
    ours = _specifier(site, "tpukit", "jax", extra=None)
    if is_excluded(jax, ours):
        seen = f"jax {jax}; tpukit is made for jax{ours}"
        yield DoctorFinding("jax", "software", "error", seen, f"pip install 'jax{ours}'")
        return
    theirs = _specifier(site, "jax", "jaxlib", extra=None)
    if is_excluded(jaxlib, theirs):
        seen = f"jaxlib {jaxlib} with jax {jax}, which needs jaxlib{theirs}"
        yield DoctorFinding("jax", "software", "error", seen, f"pip install 'jaxlib{theirs}'")
        return
    yield DoctorFinding("jax", "software", "ok", f"jax {jax} with jaxlib {jaxlib}")


def check_libtpu(site: Site) -> Iterator[DoctorFinding]:
    """Check that libtpu is the version that jax's own `tpu` extra names."""
    libtpu, jax = site.version_of("libtpu"), site.version_of("jax")
    if site.version_of("libtpu-nightly"):
        yield DoctorFinding(
            "libtpu_nightly",
            "software",
            "error" if libtpu else "warning",
            "libtpu-nightly is installed"
            + (" beside libtpu: one overwrites the other" * bool(libtpu)),
            "pip uninstall libtpu-nightly libtpu, then pip install 'tpukit[tpu]'.",
        )
    if libtpu is None:
        on_tpu = site.here.kind == "tpu"
        yield DoctorFinding(
            "libtpu",
            "software",
            "error" if on_tpu else "warning",
            "libtpu is not installed, so "
            + ("the TPU here cannot be used" if on_tpu else "nothing can be compiled for TPU here"),
            "pip install 'tpukit[tpu]'",
        )
        return
    wanted = _specifier(site, "jax", "libtpu", extra="tpu")
    if not wanted:
        seen = f"libtpu {libtpu}; jax {jax} does not name its libtpu"
        yield DoctorFinding("libtpu", "software", "info", seen)
    elif is_excluded(libtpu, wanted):
        yield DoctorFinding(
            "libtpu",
            "software",
            "error",
            f"libtpu {libtpu} with jax {jax}, which pins libtpu{wanted}: a mismatched pair cannot "
            "always print its HLO and may place memory differently",
            f"pip install 'jax[tpu]=={jax}'",
        )
    else:
        yield DoctorFinding("libtpu", "software", "ok", f"libtpu {libtpu}, which matches jax {jax}")


def check_cuda_plugin(site: Site) -> Iterator[DoctorFinding]:
    """Check on a GPU machine that jax's CUDA plugin is installed and matches."""
    if site.here.kind != "gpu":
        return
    jaxlib = site.version_of("jaxlib")
    found = {name: version for name in CUDA_PLUGINS if (version := site.version_of(name))}
    if not found:
        seen = "jax has no CUDA plugin, so it runs on the CPU of this GPU machine"
        yield DoctorFinding("cuda_plugin", "software", "warning", seen, "pip install 'jax[cuda13]'")
    for name, version in found.items():
        seen = f"{name} {version} with jaxlib {jaxlib}"
        if version == jaxlib:
            yield DoctorFinding("cuda_plugin", "software", "ok", seen)
        else:
            yield DoctorFinding(
                "cuda_plugin", "software", "warning", seen, f"pip install '{name}=={jaxlib}'"
            )


def check_extras(site: Site) -> Iterator[DoctorFinding]:
    """Report which optional parts of tpukit are installed."""
    lines = site.requirements_of("tpukit")
    if not lines:
        seen = "tpukit runs from its sources and is not installed, so its extras are not known"
        yield DoctorFinding("extras", "software", "info", seen, "pip install -e . installs it.")
        return
    needs: dict[str, list[str]] = {}
    for line in lines:
        requirement, extra = parse_requirement(line)
        if requirement and extra and extra != "dev":
            needs.setdefault(extra, []).append(requirement.name.lower())
    # The extra `tpu` asks for jax itself; its real part is libtpu, which has its own check.
    needs.pop("tpu", None)
    missing = {
        extra: absent
        for extra, names in sorted(needs.items())
        if (absent := [name for name in names if site.version_of(name) is None])
    }
    here = ", ".join(extra for extra in sorted(needs) if extra not in missing) or "none"
    absent = ", ".join(f"{extra} ({', '.join(names)})" for extra, names in missing.items())
    severity: Severity = "info" if missing else "ok"
    seen = f"extras installed: {here}" + (f"; not installed: {absent}" if missing else "")
    fix = f"If you need one: pip install 'tpukit[{next(iter(missing))}]'" if missing else None
    yield DoctorFinding("extras", "software", severity, seen, fix)


def _specifier(site: Site, package: str, needed: str, *, extra: str | None) -> str:
    for line in site.requirements_of(package):
        requirement, stated_extra = parse_requirement(line)
        if requirement and (requirement.name.lower(), stated_extra) == (needed, extra):
            return str(requirement.specifier)
    return ""


def parse_requirement(line: str) -> tuple[Requirement | None, str | None]:
    """Return a parsed `Requires-Dist` line and its extra; None where it cannot be parsed."""
    try:
        requirement = Requirement(line)
    except InvalidRequirement:
        return None, None
    extra = _EXTRA.search(str(requirement.marker or ""))
    return requirement, extra["extra"] if extra else None


def is_excluded(version: str, specifier: str) -> bool:
    """Whether a specifier such as `==0.0.42.*` excludes a version; False if either is invalid."""
    try:
        return not SpecifierSet(specifier).contains(Version(version), prereleases=True)
    except (InvalidSpecifier, InvalidVersion):
        return False


CHECKS: tuple[Check, ...] = (
    check_python,
    check_jax,
    check_libtpu,
    check_cuda_plugin,
    check_extras,
)
