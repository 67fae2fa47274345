"""Which start of a run its machines are at, where `launch.py` on each of them may start its ranks more than once.

Each machine notices by itself that its ranks have ended, one of them seconds or minutes before another. One that is
early must not meet what the start before has left: ranks that still come to their end, or what they said in the common
store. So every start has a name, which the machine of the store gives out; the others wait for one that is new, and all
that ranks and torchrun say in the store stands behind it. One failure is one start more on every machine.
"""

import logging
import secrets
import time
from datetime import timedelta
from typing import Any

from espalier.runtime.peers import START_SECONDS

log = logging.getLogger(__name__)

START = "ESPALIER_START"
"""The variable that tells a rank the name of its start."""
_NOW = "espalier/start"
_REACH = timedelta(seconds=5)
_GLANCE_SECONDS = 0.2
_SAY_SECONDS = 10.0


class MachinesApart(RuntimeError):
    """No new start is given out: the machine of the store is not there, or its ranks do not end."""

    exit_code = 3


class MachineStarts:
    """`host` and `port` of the common store; whether this machine `holds` it, as long as this object is there;
    `num_machines` of the run."""

    def __init__(self, host: str, port: int, holds: bool, num_machines: int):
        self.host = host.strip("[]")  # of IPv6, as torchrun takes it
        self.port, self.holds, self.num_machines = port, holds, num_machines
        self._store: Any = None
        self._taken: set[str] = set()

    def next(self) -> str:
        """Return the name of the next start; on a machine without the store once there is one. Raises MachinesApart."""
        started, why, is_said = time.monotonic(), "no new start was given out", False
        while True:
            try:
                if found := self._look():
                    return found
            except RuntimeError as error:  # of torch: nobody is there, or no more
                self._store, why = None, str(error).splitlines()[0]
            waited = time.monotonic() - started
            if waited > START_SECONDS or (self.holds and self._store is None):  # its own store is no wait for others
                raise MachinesApart(f"{self.host}:{self.port}: {why}")
            if waited > _SAY_SECONDS and not is_said:
                is_said = True
                log.warning("waiting for the machine of %s:%d, up to %.0f s: %s", self.host, self.port, START_SECONDS,
                            why)  # fmt: skip
            time.sleep(_GLANCE_SECONDS)

    def _look(self) -> str:
        """Return the name of a start that this machine is a part of, "" where there is none yet."""
        if self._store is None:
            self._open()
        if self.holds:
            name = secrets.token_hex(4)
            self._store.set(_NOW, name)
            return name
        if not self._store.check([_NOW]):
            return ""
        name = self._store.get(_NOW).decode()
        if name in self._taken:
            return ""
        self._taken.add(name)
        # a launcher that was itself started anew comes too late to the start that the one before was a part of
        is_there = self._store.add(f"{_NOW}/{name}", 1) < self.num_machines
        return name if is_there else ""

    def _open(self) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        own: dict[str, Any] = {
            "timeout": _REACH,
            "wait_for_workers": False,
            "multi_tenant": True,
        }  # torchrun's is this one then
        self._store = TCPStore(self.host, self.port, is_master=self.holds, **own)
