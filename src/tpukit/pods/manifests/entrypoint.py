"""What a container runs first: a constant program that prepares a host and runs the command.

It travels in the manifest as text, needs only Python 3, and stays the parent of the command:
a command that was told to stop, saved and ended with 0 has not finished, and Kubernetes would
count its host as done for ever. Then the container ends with 143, which restarts the job.
"""

# A later attempt takes another port, in case an earlier process still holds its own; the first is
# `runtime.multihost.DEFAULT_PORT`.
PROGRAM = """\
import json, os, signal, subprocess, sys, tarfile, tempfile
env, told, running = os.environ, [], []
def forward(number, frame):
    told.append(number)
    for process in running:
        process.send_signal(number)
signal.signal(signal.SIGTERM, forward)
attempt = int(env.get("TPUKIT_ATTEMPT") or 0)
first = int(env.get("TPUKIT_SLICE_ID") or 0) * int(env["TPUKIT_HOSTS_PER_SLICE"])
env["TPUKIT_HOST_ID"] = str(first + int(env.get("JOB_COMPLETION_INDEX") or 0))
env["TPUKIT_COORDINATOR"] = env["TPUKIT_COORDINATOR_HOST"] + ":" + str(8482 + attempt % 16)
if env.get("TPUKIT_BUNDLE"):
    os.chdir(tempfile.mkdtemp(prefix="tpukit-"))
    with tarfile.open(env["TPUKIT_BUNDLE"]) as files:
        files.extractall(filter="data")
for step in json.loads(env.get("TPUKIT_SETUP") or "[]"):
    subprocess.run(step, check=True)
if told:
    sys.exit(143)
running.append(subprocess.Popen(sys.argv[1:]))
if told:
    running[0].send_signal(signal.SIGTERM)
status = running[0].wait()
sys.exit(143 if told and status == 0 else status if status >= 0 else 128 - status)
"""

IDLE = ("sleep", "infinity")
