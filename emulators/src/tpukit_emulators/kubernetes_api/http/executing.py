"""Commands that a person runs in a container: `kubectl exec`, over a WebSocket.

Every message begins with the number of its channel, as the protocol v5.channel.k8s.io has it:
https://github.com/kubernetes/enhancements/tree/master/keps/sig-api-machinery/4006-transition-spdy-to-websockets
A terminal is not emulated: with `-t` both outputs come on one channel, and that is all.
"""

import asyncio
import json
import os
import signal
from contextlib import suppress

from aiohttp import WSMsgType, web

from tpukit.pods.manifests.reading import at, sequence

from ..cluster import Cluster
from ..refusal import Refusal
from ..store import Object
from .requests import Call

PROTOCOLS = ("v5.channel.k8s.io", "v4.channel.k8s.io")
STDIN, STDOUT, STDERR, STATUS, CLOSE = 0, 1, 2, 3, 255
_CHUNK = 1 << 15


async def execute(
    cluster: Cluster, call: Call, request: web.Request, pod: Object
) -> web.StreamResponse:
    """Run a command beside a container's own, and carry what it reads and prints.

    Raises:
        Refusal: The container does not run, or the client speaks another protocol.
    """
    if at(pod, "status", "phase") != "Running":
        raise Refusal(400, f"container not found in pod {pod['metadata']['name']}: not running")
    names = [one["name"] for one in sequence(at(pod, "spec", "containers"))]
    container = call.options.get("container") or names[0]
    if container not in names:
        raise Refusal(400, f"container {container} is not valid for the pod")
    if request.headers.get("Upgrade", "").lower() != "websocket":
        raise Refusal(400, "unable to upgrade: this API offers exec over WebSockets alone")
    argv = request.query.getall("command", [])
    words, variables, folder = cluster.kubelet.command_in(pod, container, argv)
    socket = web.WebSocketResponse(protocols=PROTOCOLS)
    await socket.prepare(request)
    joined = asyncio.subprocess.STDOUT if call.is_set("tty") else asyncio.subprocess.PIPE
    try:
        process = await asyncio.create_subprocess_exec(
            *words,
            env=variables,
            cwd=folder,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=joined,
            start_new_session=True,
        )
    except OSError as error:
        await _close(socket, 126, str(error))
        return socket
    copying = [
        asyncio.ensure_future(_copy(stream, socket, channel))
        for stream, channel in ((process.stdout, STDOUT), (process.stderr, STDERR))
        if stream is not None
    ]
    reading = asyncio.ensure_future(_feed(process, socket))
    try:
        await asyncio.wait({reading, *copying}, return_when=asyncio.FIRST_COMPLETED)
        if reading.done() and socket.closed:  # the person has gone
            _end(process)
        await asyncio.gather(*copying)
        await _close(socket, await process.wait())
    finally:
        _end(process)
        for task in (reading, *copying):
            task.cancel()
    return socket


async def _copy(stream: asyncio.StreamReader, socket: web.WebSocketResponse, channel: int) -> None:
    while part := await stream.read(_CHUNK):
        if not socket.closed:
            await socket.send_bytes(bytes([channel]) + part)


async def _feed(process: asyncio.subprocess.Process, socket: web.WebSocketResponse) -> None:
    """Give a process what the client sends, until it sends no more or goes away."""
    given = process.stdin
    assert given is not None
    async for message in socket:
        if message.type is not WSMsgType.BINARY or not message.data:
            continue
        channel, content = message.data[0], message.data[1:]
        with suppress(ConnectionError):
            if channel == STDIN:
                given.write(content)
                await given.drain()
            elif channel == CLOSE and content == bytes([STDIN]):
                given.close()


async def _close(socket: web.WebSocketResponse, code: int, said: str = "") -> None:
    status: Object = {"metadata": {}, "status": "Success"}
    if code:
        status |= {
            "status": "Failure",
            "reason": "NonZeroExitCode",
            "message": said or f"command terminated with non-zero exit code: exit status {code}",
            "details": {"causes": [{"reason": "ExitCode", "message": str(code)}]},
        }
    with suppress(ConnectionError):
        await socket.send_bytes(bytes([STATUS]) + json.dumps(status).encode())
        await socket.close()


def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
