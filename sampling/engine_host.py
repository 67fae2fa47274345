"""What runs on a node of a Ray cluster beside an engine: it starts the engine's process there, with the node's devices,
and says how it ended.

The engine talks with the program that asks it over a socket of its own, not through Ray: requests cost what they cost
on one machine, and go on while a raylet is silent. The two find each other by an address and a token.
"""

import asyncio
import hmac
import os
import shutil
import socket
import sys
import tempfile
from pathlib import Path

from espalier.runtime.fingerprints import model_fingerprint, same_weights
from espalier.runtime.ray_cluster import node_address
from espalier.sampling.child_process import ChildProcess, engine_environment
from espalier.sampling.client import ServerGone

TOKEN_BYTES = 32
_END_SECONDS = 0.05
_LOG_BYTES = 1 << 20


class EngineHost:
    """An actor, one for each engine. Args: `name` of the engine in messages; `program`, the module to run, which is
    given a socket's descriptor; `kv_cache_gib` and `num_threads` of the engine on a CPU. The process dies with it."""

    def __init__(self, name: str, program: str, kv_cache_gib: int, num_threads: int):
        self.program = program
        self.kv_cache_gib = kv_cache_gib
        self.num_threads = num_threads
        folder = tempfile.mkdtemp(prefix="espalier-engine-")
        self.child = ChildProcess(name, os.path.join(folder, "engine.log"))
        self._door: socket.socket | None = None

    async def listen(self) -> tuple[str, int]:
        """Return this node's address and the port that the engine's one caller must come to."""
        address = node_address()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._door = socket.create_server((address, 0), family=family, backlog=8)
        return address, self._door.getsockname()[1]

    async def start(self, token: bytes, model: str, fingerprint: str, seconds: float) -> str:
        """Wait for the caller who knows the `token` and start the engine at the other end of that socket. Return what
        forbids it, "" where nothing does: the model folder here is none, or holds other weights than the caller's
        `fingerprint` says ("" of a hub name), or nobody came within `seconds`."""
        if not Path(model).is_dir() and os.path.isabs(model):
            return f"there is no folder {model} on this node: put models where every node sees them"
        if fingerprint and not same_weights(model_fingerprint(model), fingerprint):
            return f"{model} is another model on this node than where the program runs: put the same one there"
        try:
            async with asyncio.timeout(seconds):
                end = await self._caller(token)
        except TimeoutError:
            return f"nobody came to its socket in {seconds:g} s: the nodes of the cluster must reach each other"
        environment = engine_environment(self.kv_cache_gib)
        environment.update(OMP_NUM_THREADS=str(self.num_threads), VLLM_CPU_OMP_THREADS_BIND="nobind")
        with end:
            command = [sys.executable, "-P", "-m", self.program, str(end.fileno())]
            self.child.begin(command, environment, [end.fileno()])
        return ""

    async def wait(self) -> str:
        """Return, when the engine's process has ended, why."""
        while self.child.is_alive():
            await asyncio.sleep(_END_SECONDS)
        return self.child.death_message()

    async def tail(self) -> str:
        """Return the last lines of the engine's log."""
        return self.child.tail()

    async def end(self) -> bytes:
        """End the engine's process; return the end of its log."""
        await asyncio.to_thread(self.child.stop)
        try:
            return self.child.log.read_bytes()[-_LOG_BYTES:]
        except OSError:
            return b""
        finally:
            shutil.rmtree(self.child.log.parent, ignore_errors=True)

    async def _caller(self, token: bytes) -> socket.socket:
        if self._door is None:
            raise ServerGone("EngineHost.listen() has not been called")
        loop = asyncio.get_running_loop()
        self._door.setblocking(False)
        with self._door:
            while True:
                end, _ = await loop.sock_accept(self._door)
                try:
                    async with asyncio.timeout(5):
                        shown = await _receive(end, TOKEN_BYTES)
                except (TimeoutError, ConnectionError):
                    shown = b""
                if hmac.compare_digest(shown, token):
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    return end
                end.close()


async def _receive(end: socket.socket, size: int) -> bytes:
    loop, found = asyncio.get_running_loop(), b""
    end.setblocking(False)
    while len(found) < size:
        part = await loop.sock_recv(end, size - len(found))
        if not part:
            raise ConnectionError("closed")
        found += part
    return found
