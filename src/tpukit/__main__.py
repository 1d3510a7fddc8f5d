"""`python -m tpukit`: the command `tpukit`, for hosts on which its script is not on the path."""

from .cli.main import run

if __name__ == "__main__":
    run()
