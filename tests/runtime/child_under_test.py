"""A child that behaves as badly as it is asked to."""

import os
import signal
import subprocess
import sys
import time

from tpukit.runtime.child import serve_request

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


def answer(request):
    what = request["do"]
    if what == "echo":
        return {"echo": request["say"]}
    if what == "raise":
        raise KeyError("no such thing")
    if what == "abort":
        sys.stderr.write("the last words\n")
        sys.stderr.flush()
        os.abort()
    if what == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if what == "exit":
        sys.stdout.write("leaving\n")
        sys.stdout.flush()
        os._exit(7)
    if what == "not json":
        return {"object": object()}
    if what == "chatter":
        os.write(1, b"\xff\xfe" + b"x" * request["bytes"])
        return {"chattered": request["bytes"]}
    if what == "big reply":
        return {"big": "y" * request["bytes"]}
    if what == "environment":
        return dict(os.environ)
    if what == "crash after the reply":
        import atexit

        atexit.register(os.abort)
        return {"said": "before"}
    if what == "leave a grandchild":
        return {"pid": subprocess.Popen(SLEEP).pid}
    if what == "hang with a grandchild":
        grandchild = subprocess.Popen(SLEEP)
        with open(request["note"], "w") as note:
            note.write(f"{os.getpid()} {grandchild.pid}")
        time.sleep(60)
    if what == "lose libtpu":
        raise RuntimeError(request["message"])
    raise AssertionError(what)


if __name__ == "__main__":
    serve_request(answer)
