"""Checks of environment variables, against each other, the machine and the installation."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ...errors import FlagError, SliceError
from ...hardware import Slice
from ..child import ChildError
from ..flags import FlagRegistry, parse_flags
from ..flags.flag import VARIABLES
from ..flags.registry import TPU_FAMILIES, registry_path
from ..multihost import EXEMPTIONS, PROXY_VARIABLES
from .finding import Check, DoctorFinding, Site

JAX_PLATFORM_NAMES = ("cpu", "cuda", "gpu", "rocm", "tpu", "METAL", "mps", "proxy")
HOST_DEVICES = "xla_force_host_platform_device_count"
# Variables that mean something only together.
TOGETHER = (
    ("TPU_PROCESS_BOUNDS", "TPU_CHIPS_PER_PROCESS_BOUNDS"),
    ("TPU_PROCESS_ADDRESSES", "TPU_PROCESS_PORT"),
    ("MEGASCALE_COORDINATOR_ADDRESS", "MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID"),
    ("TPUKIT_NUM_HOSTS", "TPUKIT_HOST_ID", "TPUKIT_COORDINATOR"),
)
FILES = ("TPU_LIBRARY_PATH", "GOOGLE_APPLICATION_CREDENTIALS")


def check_platforms(site: Site) -> Iterator[DoctorFinding]:
    """Check that JAX_PLATFORMS names existing platforms, and one of this machine."""
    value = site.environment.get("JAX_PLATFORMS", "")
    names = [name.strip() for name in value.split(",") if name.strip()]
    unknown = [name for name in names if name not in JAX_PLATFORM_NAMES]
    wanted = "gpu" if names and names[0] in ("cuda", "rocm") else (names or [""])[0]
    if unknown:
        yield _warning(
            "jax_platforms",
            f"JAX_PLATFORMS={value}: jax has no platform {', '.join(unknown)} of its own",
            "Use tpu, cuda or cpu, or unset it.",
        )
    elif wanted in ("tpu", "gpu") and site.here.kind != wanted:
        yield _error(
            "jax_platforms",
            f"JAX_PLATFORMS={value}, and there is no {wanted.upper()} here: jax will not start",
            "unset JAX_PLATFORMS, or set it to cpu",
        )
    elif wanted == "cpu" and site.here.kind != "cpu":
        yield _warning(
            "jax_platforms",
            f"JAX_PLATFORMS={value}, so the {site.here.kind.upper()} here stays idle",
            "unset JAX_PLATFORMS",
        )
    else:
        seen = f"JAX_PLATFORMS={value}" if value else "JAX_PLATFORMS is not set: jax chooses"
        yield DoctorFinding("jax_platforms", "environment", "ok", seen)


def check_flag_syntax(site: Site) -> Iterator[DoctorFinding]:
    """Check that XLA_FLAGS and LIBTPU_INIT_ARGS can be parsed."""
    for variable in VARIABLES.values():
        try:
            parse_flags(site.environment.get(variable, ""))
        except FlagError as error:
            yield _error("flag_syntax", f"{variable}: {error}", f"Correct or unset {variable}.")


def check_flag_routing(site: Site) -> Iterator[DoctorFinding]:
    """Check that XLA_FLAGS has no TPU flag, which would end the process at start-up."""
    names = _flag_names(site, "XLA_FLAGS")
    misplaced = [name for name in names if name.startswith(TPU_FAMILIES)]
    if misplaced:
        yield _error(
            "tpu_flag_in_xla_flags",
            f"XLA_FLAGS holds {', '.join(misplaced)}, which jaxlib does not know: the process "
            "ends when jax starts",
            "Move it to LIBTPU_INIT_ARGS, or use tpukit.set_xla_flags, which puts each flag in "
            "its place.",
        )
    if HOST_DEVICES in names:
        yield DoctorFinding(
            "virtual_devices",
            "environment",
            "info",
            f"XLA_FLAGS sets {HOST_DEVICES}: jax shows virtual CPU devices",
        )


def check_flag_names(site: Site) -> Iterator[DoctorFinding]:
    """Check that the installed parsers know every flag that is set."""
    names = {
        name: variable for variable in VARIABLES.values() for name in _flag_names(site, variable)
    }
    jaxlib = site.version_of("jaxlib")
    if not names or jaxlib is None:
        return
    if not site.deep and not registry_path(jaxlib, site.version_of("libtpu")).exists():
        seen = "flags are set and were not checked, because that takes some seconds at first"
        yield DoctorFinding("flags", "environment", "info", seen, "tpukit flags check")
        return
    try:
        registry = FlagRegistry.installed()
    except ChildError as error:
        seen = f"the known flags cannot be read from the installation: {error}"
        yield _warning("flags", seen, "Install the matching pair: pip install 'tpukit[tpu]'.")
        return
    unknown = {
        name: variable
        for name, variable in names.items()
        if name not in registry and name.removeprefix("no") not in registry
    }
    for name, variable in unknown.items():
        yield _error(
            "unknown_flag",
            f"{variable} holds --{name}, which ends the process at start-up: "
            + registry.unknown(name),
            "Remove it, or use the name meant; tpukit flags list shows all.",
        )
    if not unknown:
        seen = f"every flag set is one of {registry.described}"
        yield DoctorFinding("flags", "environment", "ok", seen)


def check_groups(site: Site) -> Iterator[DoctorFinding]:
    """Check that variables which belong together are all set, or none of them."""
    for group in TOGETHER:
        there = [name for name in group if site.environment.get(name)]
        missing = [name for name in group if name not in there]
        if there and missing:
            yield _warning(
                "half_set",
                f"{', '.join(there)} is set without {', '.join(missing)}",
                f"Set all of {', '.join(group)}, or unset {' '.join(there)}.",
            )


def check_worker(site: Site) -> Iterator[DoctorFinding]:
    """Check that TPU_WORKER_ID is an index into TPU_WORKER_HOSTNAMES."""
    workers = [name for name in site.environment.get("TPU_WORKER_HOSTNAMES", "").split(",") if name]
    worker = site.environment.get("TPU_WORKER_ID", "")
    if not worker and len(workers) < 2:  # one host needs no number
        return
    if not (worker.isdigit() and int(worker) < len(workers)):
        yield _error(
            "worker_id",
            f"TPU_WORKER_ID is {worker or 'not set'} and TPU_WORKER_HOSTNAMES names "
            f"{len(workers) or 'no'} hosts",
            "Name every host in TPU_WORKER_HOSTNAMES and give each its own TPU_WORKER_ID, from 0.",
        )


def check_megascale(site: Site) -> Iterator[DoctorFinding]:
    """Check that no MEGASCALE_* variable is left over from another job."""
    left = sorted(name for name in site.environment if name.startswith("MEGASCALE_"))
    if left and site.here.kind != "tpu":
        yield _warning(
            "megascale_leftovers",
            f"{', '.join(left)} set on a machine without a TPU, as left over from another job; "
            "stale ones make a multi-slice job wait for ever",
            f"unset {' '.join(left)}",
        )
    elif left:
        yield DoctorFinding(
            "megascale",
            "environment",
            "info",
            f"multi-slice variables are set: {', '.join(left)}",
            "After a slice was replaced, set them again: stale ones make the job wait for ever.",
        )


def check_accelerator_type(site: Site) -> Iterator[DoctorFinding]:
    """Check that TPU_ACCELERATOR_TYPE names an existing slice."""
    name = site.environment.get("TPU_ACCELERATOR_TYPE", "")
    if not name:
        return
    try:
        Slice.parse(name)
    except SliceError as error:
        yield _warning(
            "accelerator_type",
            f"TPU_ACCELERATOR_TYPE={name}: {error}",
            "unset it, or set it to the name of the slice",
        )


def check_files(site: Site) -> Iterator[DoctorFinding]:
    """Check that variables which name a file name an existing one."""
    for name in FILES:
        path = site.environment.get(name)
        if path and not Path(path).expanduser().is_file():
            yield _error(
                "missing_file",
                f"{name}={path}, and there is no such file",
                f"unset {name}, or correct the path",
            )


def check_proxies(site: Site) -> Iterator[DoctorFinding]:
    """Check that no HTTP proxy intercepts the connection between hosts."""
    proxies = [name for name in PROXY_VARIABLES if site.environment.get(name)]
    if proxies:
        yield DoctorFinding(
            "proxy",
            "environment",
            "info",
            f"{', '.join(proxies)} set: gRPC takes even loopback connections through a proxy, and "
            "a plain jax.distributed.initialize then aborts",
            f"MultiHostConfig.setup() exempts the coordinator; elsewhere set {EXEMPTIONS[0]}.",
        )


def _flag_names(site: Site, variable: str) -> list[str]:
    try:
        return list(parse_flags(site.environment.get(variable, "")))
    except FlagError:
        return []  # check_flag_syntax says so


def _warning(id_: str, seen: str, fix: str) -> DoctorFinding:
    return DoctorFinding(id_, "environment", "warning", seen, fix)


def _error(id_: str, seen: str, fix: str) -> DoctorFinding:
    return DoctorFinding(id_, "environment", "error", seen, fix)


@dataclass(frozen=True)
class Notebook:
    """A service that hosts notebooks.

    Attributes:
        name: Its usual name.
        variables: Environment variables; any of them identifies the service.
        choose_tpu: How to select a TPU.
        lost: Which files are lost when the session ends, and how to keep them.
    """

    name: str
    variables: tuple[str, ...]
    choose_tpu: str
    lost: str


NOTEBOOKS = (
    Notebook(
        name="Google Colab",
        variables=("COLAB_RELEASE_TAG", "COLAB_BACKEND_VERSION", "COLAB_GPU"),
        choose_tpu="Runtime > Change runtime type > a TPU; it starts a new machine.",
        lost="/content is gone when the runtime ends: keep checkpoints in a bucket (gs://…) or on "
        "a mounted Drive",
    ),
    Notebook(
        name="Kaggle",
        variables=("KAGGLE_KERNEL_RUN_TYPE", "KAGGLE_URL_BASE"),
        choose_tpu="Settings > Accelerator > a TPU; it starts a new machine.",
        lost="only /kaggle/working is kept, and only when the version is saved: write checkpoints "
        "there or to a bucket (gs://…)",
    ),
)


def check_notebook(site: Site) -> Iterator[DoctorFinding]:
    """Report the hosted notebook service, how to get a TPU there, and which files are lost."""
    for notebook in NOTEBOOKS:
        variable = next((name for name in notebook.variables if name in site.environment), None)
        if variable is None:
            continue
        seen = f"this is {notebook.name} ({variable} is set); {notebook.lost}"
        fix = None if site.here.kind == "tpu" else notebook.choose_tpu
        yield DoctorFinding("notebook", "environment", "info", seen, fix)


CHECKS: tuple[Check, ...] = (
    check_platforms,
    check_flag_syntax,
    check_flag_routing,
    check_flag_names,
    check_groups,
    check_worker,
    check_megascale,
    check_accelerator_type,
    check_files,
    check_proxies,
    check_notebook,
)
