"""Every exception of tpukit, in one tree, so that `except TPUError` always works.

    TPUError                          also TpuError
    └── TPUBackendError               anything between your code and the chip
        ├── TPUNotAvailableError      no TPU (or no libtpu) where one is needed
        │   ├── MissingExtraError     an optional part of tpukit is not installed
        │   └── PodUnavailable        the requested slice is not available, or was taken away
        ├── ProviderError             a pod provider cannot be reached, or denies access
        │   └── ProviderSilent        it does not answer now; asking again may help
        ├── TPUDeviceError            a device is present but misbehaves
        ├── XLACompilationError       the compiler refused the program
        ├── XLARuntimeError           the compiled program failed while running
        ├── TrainingDiverged          the loss diverged, and rolling back did not help
        ├── TPUMemoryError            memory of a chip or a host
        │   ├── TPUOutOfMemoryError   does not fit (also exported as OutOfMemory)
        │   └── TPUMemoryPoolError    a pool was misused or is exhausted
        ├── TPUCacheError             a cache entry cannot be read or written
        ├── TPUCheckpointError        a checkpoint cannot be written, read or trusted
        │   └── TPUStorageError       the storage failed; the same call may succeed later
        ├── TPUModelError             the model does not fit the request
        ├── CaptureError              a program could not be captured
        ├── TPUOptimizationError      a requested optimization could not be made
        │   └── TargetNotReached      a search ended below its target; carries the best found
        ├── TPUDistributedError       several processes, hosts or slices
        │   └── CommunicationTimeout  a peer did not answer in time
        └── TPUValidationError        what you wrote is wrong (also a ValueError)
            ├── ConfigError           a configuration key or value
            ├── SliceError            a slice name, topology or generation
            ├── FlagError             an XLA or libtpu flag
            ├── MeshError             a mesh shape or axis
            ├── ShardingError         a strategy, rule or layout
            └── TPUKernelError        a kernel's implementation, blocks, dtype or shape

A message states what was seen, what was expected and a fix, in one or two sentences.
"""

import difflib
from collections.abc import Callable, Iterable
from typing import Annotated, TypeVar


class TPUError(Exception):
    """Root of every error tpukit raises."""


class TPUBackendError(TPUError):
    """Something between your code and the chip failed."""


class TPUNotAvailableError(TPUBackendError):
    """No TPU, or no libtpu, where one is needed."""


class MissingExtraError(TPUNotAvailableError, ImportError):
    """An optional part of tpukit is not installed; the message names the extra."""

    def __init__(self, extra: str, *, needed_for: str, module: str) -> None:
        self.extra = extra
        super().__init__(
            f"{needed_for} needs '{module}', which is not installed: pip install 'tpukit[{extra}]'."
        )


class PodUnavailable(TPUNotAvailableError):
    """The requested slice is not available, or was taken away.

    Attributes:
        cause: One word for why, a value of `tpukit.pods.Cause`: stockout, quota, spot, ….
    """

    def __init__(self, message: str, *, cause: str = "stockout") -> None:
        self.cause = cause
        super().__init__(message)


class ProviderError(TPUBackendError):
    """A pod provider cannot be reached, or denies access; nothing was created."""


class ProviderSilent(ProviderError):
    """A pod provider does not answer now, so the same request may succeed later."""


class TPUDeviceError(TPUBackendError):
    """A device is present but misbehaves."""


class XLACompilationError(TPUBackendError):
    """The compiler refused the program."""


class XLARuntimeError(TPUBackendError):
    """The compiled program failed while running."""


class TrainingDiverged(TPUBackendError):
    """The loss diverged, and the policy was to stop or rolling back did not help."""


class TPUMemoryError(TPUBackendError):
    """Memory of a chip or a host."""


OUT_OF_MEMORY_ADVICE = (
    "use a smaller batch, more microbatches, remat full, a mesh that shards more, or a larger slice"
)
"""What to change in a job that needs too much HBM; every message that gives advice ends in it."""


class TPUOutOfMemoryError(TPUMemoryError):
    """The program does not fit in memory."""


class TPUMemoryPoolError(TPUMemoryError):
    """A memory pool was misused or is exhausted."""


class TPUCacheError(TPUBackendError):
    """A cache entry cannot be read or written."""


class TPUCheckpointError(TPUBackendError):
    """A checkpoint cannot be written, read or trusted, or is of another model or run."""


class TPUStorageError(TPUCheckpointError):
    """The storage failed to write or read files; the same call may succeed later."""


class TPUModelError(TPUBackendError):
    """The model does not fit the request."""


class CaptureError(TPUBackendError):
    """A program could not be captured; the message names the reason and the way out."""


class TPUOptimizationError(TPUBackendError):
    """A requested optimization could not be made."""


class TargetNotReached(TPUOptimizationError):
    """A search ended below its target. `best` is the best result it found."""

    def __init__(self, message: str, best: object = None) -> None:
        self.best = best
        super().__init__(message)


class TPUDistributedError(TPUBackendError):
    """Several processes, hosts or slices could not join."""


class CommunicationTimeout(TPUDistributedError, TimeoutError):
    """A peer did not answer in time."""


class TPUValidationError(TPUBackendError, ValueError):
    """A request is not valid; the message names valid ones."""


class ConfigError(TPUValidationError):
    """A configuration key or value is wrong."""


class SliceError(TPUValidationError):
    """A slice name, topology or generation is unknown or impossible."""


class FlagError(TPUValidationError):
    """An XLA or libtpu flag is unknown, misplaced or has a bad value."""


class MeshError(TPUValidationError):
    """A mesh shape or axis is wrong."""


class ShardingError(TPUValidationError):
    """A sharding strategy, rule or layout is wrong."""


class TPUKernelError(TPUValidationError):
    """A kernel does not support the requested implementation, blocks, dtype or shape."""


LONGEST_MESSAGE = 4000
"""Characters of a message that are shown; the longest of tpukit's own has 900."""

# The documents use both names for the one condition, and for the root.
OutOfMemory = TPUOutOfMemoryError
TpuError = TPUError
_Value = TypeVar("_Value")
TpuResult = Annotated[_Value, TPUError]
"""Type of a result in signatures. Rust returns an error and Python raises it, so
`TpuResult[float]` is a float."""


def in_few_words(error: Exception) -> str:
    """Return an error's message in a form that is safe for a terminal.

    A message may quote any file: a long text is shortened in its middle, and control characters are
    written as escapes.
    """
    text = str(error)
    if len(text) > LONGEST_MESSAGE:
        half = LONGEST_MESSAGE // 2
        text = f"{text[:half]} […] {text[-half:]}"
    return "".join(
        letter if letter.isprintable() or letter == "\n" else ascii(letter)[1:-1] for letter in text
    )


def did_you_mean(
    seen: str, known: Iterable[str], *, most: int = 3, by: Callable[[str], str] = str
) -> str:
    """Return " Did you mean 'a' or 'b'?" for the known names nearest to `seen`, or "".

    Args:
        seen: The unknown name.
        known: The valid names.
        most: The most names to return.
        by: The part of a known name that `seen` is compared with.
    """
    compared = {by(name): name for name in sorted(known, reverse=True)}
    nearest = difflib.get_close_matches(seen, sorted(compared), n=most, cutoff=0.6)
    if not nearest:
        return ""
    return f" Did you mean {' or '.join(repr(compared[name]) for name in nearest)}?"
