"""Exit codes of tpukit's commands, its training processes and the agents that start them.

3, 4 and 5 have two names each. `check`, `compile`, `plan`, `flags tune` and `kernel bench` answer
a question, and these numbers are answers. `train` and `launch` run a job, and the same numbers tell
how the job ended. No command can end with both meanings of a number.
"""

from enum import IntEnum


class ExitCode(IntEnum):
    """What an exit code means.

    A supervisor restarts a training process from its newest checkpoint on `HUNG`, `PEER_LOST`,
    `STORAGE` and death by a signal. Those three are in 127 to 255, which XPK's job templates treat
    as restartable too.
    """

    DONE = 0
    """The command or job finished, or a run was told to stop and saved."""
    FAILED = 1
    """The command found errors, missed a target, or was ended by an error it does not handle."""
    BAD_INPUT = 2
    """An option, a file, a job, a flag or a checkpoint was refused."""

    DOES_NOT_FIT = 3
    """`check`, `compile`, `flags tune`: the program needs more memory than the slice has.
    `plan`: no layout meets the limits."""
    COULD_NOT_TELL = 4
    """`check`, `compile`, `flags tune`, `kernel bench`: the compiler gave no answer."""
    WORSE_THAN_BASELINE = 5
    """`check --baseline`: the program fits, but is worse than in the earlier report."""

    DIVERGED = 3
    """`train`, `launch`: the loss went bad, and rolling back was not allowed or did not help."""
    OUT_OF_MEMORY = 4
    """`train`, `launch`: the devices have not enough memory for the program."""
    NO_CAPACITY = 5
    """`launch`, `pods up`: no zone has the slice."""
    GAVE_UP = 6
    """`launch`: too many failures, an eviction without auto-restart, or no provider to ask."""

    ABORTED = 134
    """SIGABRT ended the process: jax does so when another process of the job is silent."""
    INTERRUPTED = 130
    """Ctrl-C ended the command."""
    TERMINATED = 143
    """SIGTERM ended the command."""

    HUNG = 200
    """A training process completed no step in time; its stacks are in the run directory."""
    PEER_LOST = 201
    """A collective failed because another training process is gone."""
    DIRTY_HOST = 202
    """The agent refused an order: another process holds a TPU of this host."""
    SETUP_FAILED = 203
    """The agent refused an order or its bundle, or a setup command failed."""
    NOT_STARTED = 204
    """The agent could not start the command: there is no such program, or it is not permitted."""
    STORAGE = 205
    """Checkpoints could not be written, or the run directory could not be used, for too long."""
    SETUP_INTERRUPTED = 206
    """A host could not make the job's Python environment, for example without a network."""

    @property
    def is_worth_restarting(self) -> bool:
        """Whether starting a training process again from its newest checkpoint can help."""
        return self in (ExitCode.HUNG, ExitCode.PEER_LOST, ExitCode.STORAGE)


SIGNALLED = 128
"""A process that signal n ended has exit code 128 + n, as shells count."""
