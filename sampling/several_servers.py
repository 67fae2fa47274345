"""Several vLLM servers of our own on one machine: started side by side, each on a port, cores and GPUs of its own."""

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from espalier.data.records import BadInput
from espalier.sampling.child_process import numbered
from espalier.sampling.client import ServerGone
from espalier.sampling.placement import deal_gpus, share_of_cores
from espalier.sampling.server import VLLMServer, free_port

log = logging.getLogger("sample")


class VLLMServers:
    """`with VLLMServers(model=..., log=..., num_servers=2) as servers: servers.base_url`, a list of addresses.

    `log` gets the server's number before its ending. Each server has `gpus_each` of the visible GPUs, or of `gpus`
    among them (`sampling.placement.deal_gpus`); without GPUs it computes with `num_threads` threads (0: an equal share
    of the cores). A server that dies is left to the client, which sends its problems to the others; only when none
    lives is the run over. With `has_controls` (they take new weights, as `VLLMServer` says) the run is over when the
    first one dies: all follow one policy.
    """

    def __init__(
        self,
        model: str,
        log: str,
        num_servers: int,
        gpus_each: int | None = None,
        gpus: Sequence[int | str] = (),
        max_model_len: int = 512,
        dtype: str = "bfloat16",
        start_seconds: float = 300.0,
        kv_cache_gib: int = 1,
        has_controls: bool = False,
        num_threads: int = 0,
        options: dict[str, Any] | None = None,
    ):
        if num_servers < 1:
            raise BadInput(f"server.num_servers must be at least 1, got {num_servers}")
        devices = deal_gpus(num_servers, gpus_each, gpus, options or {}, "server")
        if not any(devices) and not num_threads:
            num_threads = share_of_cores(num_servers)
        self.servers = [
            VLLMServer(
                model,
                str(numbered(Path(log), number)),
                max_model_len=max_model_len,
                dtype=dtype,
                start_seconds=start_seconds,
                kv_cache_gib=kv_cache_gib,
                has_controls=has_controls,
                num_threads=num_threads,
                options=options,
                devices=devices[number],
                first_core=number * num_threads,
            )
            for number in range(num_servers)
        ]
        self.has_controls = has_controls
        self.dtype, self.max_model_len = self.servers[0].dtype, self.servers[0].max_model_len
        self._stack = ExitStack()
        self._dead: set[int] = set()

    @property
    def base_url(self) -> list[str]:
        """Where they answer."""
        return [server.base_url for server in self.servers]

    def __enter__(self) -> Self:
        """Start all, then wait for each. Raises CannotStart where one does not come up; none stays behind then."""
        with self._stack:
            ports: set[int] = set()
            for server in self.servers:
                while server.port in ports or not server.port:
                    server.port = free_port(server.host)
                ports.add(server.port)
                self._stack.callback(server.stop)
                server.launch()
            for server in self.servers:
                server.wait_until_ready()
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def check(self) -> None:
        """Warn once where a server has died. Raises ServerGone where all have, or where none may be missing."""
        for number, server in enumerate(self.servers):
            if self.has_controls and not server.is_alive():
                raise ServerGone(f"{server.base_url}: {server.death_message()}")
            if number not in self._dead and not server.is_alive():
                self._dead.add(number)
                if len(self._dead) == len(self.servers):
                    raise ServerGone(f"no server lives any more; the last to die: {server.death_message()}")
                first_line = server.death_message().split("\n")[0]
                log.warning("%s (%s): its problems go to the other servers", first_line, server.log)
