"""How a training process ends, so that its supervisor knows whether to start it again."""

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of a training process.

    A supervisor restarts from the newest checkpoint on `HUNG`, `PEER_LOST`, `STORAGE` and death by
    a signal. All three are in 127 to 255, which XPK's job templates treat as restartable too.

    Attributes:
        DONE: Finished, or asked to stop and saved: nothing was lost.
        FAILED: An error of the program; the same happens again. Also a hang in which Python
            itself was blocked, because then only the interpreter's own timer can end it.
        BAD_INPUT: A configuration, a file or a checkpoint was refused.
        DIVERGED: The loss went bad and the policy was to stop, or rolling back did not help.
        OUT_OF_MEMORY: The devices have not enough memory for the program.
        HUNG: No step was completed in time; the stacks are in the run directory.
        PEER_LOST: A collective failed because another process is gone.
        STORAGE: Checkpoints could not be written, or the run directory not be used, for too long.
    """

    DONE = 0
    FAILED = 1
    BAD_INPUT = 2
    DIVERGED = 3
    OUT_OF_MEMORY = 4
    HUNG = 200
    PEER_LOST = 201
    STORAGE = 205  # 202 to 204 are codes of the agent that starts processes

    @property
    def is_worth_restarting(self) -> bool:
        """Whether starting again from the last checkpoint can help."""
        return self in (ExitCode.HUNG, ExitCode.PEER_LOST, ExitCode.STORAGE)
