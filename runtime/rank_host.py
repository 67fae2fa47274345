"""The actor that starts a rank of a run on its node and says how it ended (`runtime.ray_launcher`)."""

import asyncio
import os
import signal
import socket
import subprocess
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO

from espalier.runtime.process_lifetime import die_with_parent
from espalier.runtime.ray_cluster import TOKEN_VARIABLES, place_of_actor

_CHUNK = 1 << 16


class RankHost:
    """An actor, one for each rank: it starts the rank's process on its node, which dies with it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._readers: list[threading.Thread] = []
        self._said: deque[tuple[int, bytes]] = deque()
        self._num_printed = 0  # lines that the launcher has
        self._last_serial = 0  # of a signal

    async def place(self) -> tuple[str, str, list[str]]:
        """Return its node, the address of that, and its GPUs."""
        return place_of_actor()

    async def free_port(self) -> int:
        """Return a port on which rank 0 can listen."""
        with socket.create_server(("", 0)) as door:
            return int(door.getsockname()[1])

    async def start(self, command: Sequence[str], folder: str, variables: Mapping[str, str]) -> str:
        """Start the rank in that working directory with these variables beside the node's own. Return what forbids it,
        "" where nothing does."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        environment |= {name: value for name, value in os.environ.items() if name.startswith(TOKEN_VARIABLES)}
        try:
            self._process = subprocess.Popen(
                command,
                cwd=folder,
                env=environment | dict(variables),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        except OSError as error:
            return f"{error.filename}: {error.strerror}: have checkout and environment at the same path on every node"
        for number, stream in ((1, self._process.stdout), (2, self._process.stderr)):
            assert stream is not None
            self._readers.append(threading.Thread(target=self._read, args=(number, stream), daemon=True))
            self._readers[-1].start()
        return ""

    def _read(self, number: int, stream: IO[bytes]) -> None:
        for line in iter(lambda: stream.readline(_CHUNK), b""):
            self._said.append((number, line))

    async def output(self, num_printed: int) -> tuple[list[tuple[int, bytes]], int | None]:
        """Return what it has said behind its first `num_printed` lines, which the launcher has, by lines with the
        stream's number, waiting for some; and its exit code once it has ended and nothing more comes. An answer that
        was lost on its way is given again."""
        assert self._process is not None
        while self._num_printed < num_printed:
            self._said.popleft()
            self._num_printed += 1
        code = None
        while not self._said:
            code = self._process.poll()
            if code is not None:  # what its own children still hold open is not waited for
                for reader in self._readers:
                    await asyncio.to_thread(reader.join, 1.0)
                break
            await asyncio.sleep(0.05)
        said = list(self._said)
        return said, code if not said else None

    async def tell(self, number: int, serial: int = 0) -> None:
        """Send the rank a signal; SIGKILL to all of its session. One with the `serial` number of an earlier one is that
        one, whose answer was lost: a rank takes a second signal as a wish to end without saving."""
        if self._process is None or (serial and serial <= self._last_serial):
            return
        self._last_serial = max(serial, self._last_serial)
        with suppress(ProcessLookupError):
            if number == signal.SIGKILL:
                os.killpg(self._process.pid, number)
            else:
                self._process.send_signal(number)

    async def end(self) -> None:
        """Leave nothing of it behind."""
        await self.tell(signal.SIGKILL)
