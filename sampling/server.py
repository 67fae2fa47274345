"""A vLLM server of our own: started, watched and stopped by its own process id, on loopback only.

    python -m espalier.sampling.server policy=MODEL output=server.log server.max_model_len=2048

prints its address once it answers, and serves until SIGTERM or the end of the script that started it (ESPALIER_OWNER);
settings are those of a sampling program, whose problems are read before vLLM starts, as they may be none. Sampling
programs prefer the address in the environment variable ESPALIER_SERVER to a server of their own.

The server dies with the process that started it, even when that is killed with -9, so no port stays taken. It is
announced ready only after a warm-up request of 16 tokens: `/health` alone says 200 too early, and a shorter first
prompt kills vLLM's CPU worker.
"""

import http.client
import importlib.util
import json
import os
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from functools import cached_property
from typing import Any, Self

from espalier.data.records import BadInput
from espalier.runtime.entrypoint import build, entrypoint
from espalier.runtime.schemas import SampleConfig
from espalier.sampling.child_process import CannotStart, ChildProcess, engine_environment
from espalier.sampling.engine_arguments import engine_arguments, engine_dtype, is_one_process, spelled
from espalier.sampling.placement import core_list


class PortInUse(ValueError):
    """The asked port is taken by another program."""

    exit_code = 2


def free_port(host: str) -> int:
    """Return a port nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def check_port(host: str, port: int) -> None:
    """Raise PortInUse where something listens on the port already."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise PortInUse(f"port {port} on {host} is in use ({error.strerror}): choose server.port=0 for a free one"
                            ) from None  # fmt: skip


class VLLMServer(ChildProcess):
    """`with VLLMServer(model=..., log=...) as server: server.base_url`.

    `options` are the server's own flags (`max_num_seqs: 256` → `--max-num-seqs 256`). `has_controls` opens
    the development endpoints that take new weights (loopback only), and loads `sampling.weight_receipt`.
    `kv_cache_gib` and `num_threads` (from `first_core` on; 0: all cores) count on CPUs only. `devices` are the GPUs
    it may see, as CUDA_VISIBLE_DEVICES names them ("4,5"; empty: all that this program sees). `seed`: of what it
    draws for requests without one of their own.
    """

    def __init__(
        self,
        model: str,
        log: str,
        port: int = 0,
        max_model_len: int = 512,
        dtype: str = "auto",
        start_seconds: float = 300.0,
        kv_cache_gib: int = 1,
        has_controls: bool = False,
        num_threads: int = 0,
        options: dict[str, Any] | None = None,
        devices: str = "",
        first_core: int = 0,
        seed: int = 0,
    ):
        super().__init__("the vLLM server", log)
        self.model = model
        self.port = port
        self.start_seconds = start_seconds
        self.kv_cache_gib = kv_cache_gib
        self.has_controls = has_controls
        self.num_threads = num_threads
        self.options = spelled(options or {})
        own = str(self.options.get("max_model_len", max_model_len))
        self._dtype = dtype
        self.max_model_len = int(own) if own.isdecimal() else None  # vLLM's auto, 16k and the like
        self.devices = devices
        self.first_core = first_core
        self.seed = seed
        self.host = "127.0.0.1"

    @cached_property
    def dtype(self) -> str:
        """What it computes in; looked up when it starts, as a job that is done needs no torch."""
        return engine_dtype(self._dtype, self.options)

    @property
    def base_url(self) -> str:
        """Where it answers."""
        return f"http://{self.host}:{self.port}"

    def command(self) -> list[str]:
        """Return the server's command line."""
        flags = {
            "served_model_name": "policy",
            "host": self.host,
            "port": self.port,
            # how much of a prompt came from the prefix cache
            **({"enable_prompt_tokens_details": True} if self.has_controls else {}),
            "seed": self.seed,
            **engine_arguments(self.model, self.dtype, self.max_model_len, self.options, self.has_controls),
        }
        words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        for name, value in flags.items():
            flag = f"--{name.replace('_', '-')}"
            if value is True:
                words.append(flag)
            elif value not in (False, None):
                words += [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
        return words

    def environment(self) -> dict[str, str]:
        """Return an engine's, with the threads it is given, and controls when asked."""
        environment = engine_environment(self.kv_cache_gib, self.devices)
        if self.num_threads:
            environment["VLLM_CPU_OMP_THREADS_BIND"] = core_list(self.first_core, self.num_threads)
        elif is_one_process(self.options, self.has_controls):
            # a core is left to the part that answers, as vLLM leaves one to it
            spare = max(1, len(os.sched_getaffinity(0)) - 1)
            asked = environment.get("OMP_NUM_THREADS", "")
            environment["OMP_NUM_THREADS"] = str(min(spare, int(asked)) if asked.isdecimal() else spare)
        if self.has_controls:
            environment["VLLM_SERVER_DEV_MODE"] = "1"
        return environment

    def start(self) -> Self:
        """Start and wait until it has answered a request. Raises PortInUse, CannotStart."""
        self._launch()
        self._wait_until_ready()
        return self

    def _launch(self) -> None:
        if importlib.util.find_spec("vllm") is None:
            raise CannotStart("vllm is not installed: run bash scripts/install.sh")
        if self.port:
            check_port(self.host, self.port)
        else:
            self.port = free_port(self.host)
        self.begin(self.command(), self.environment())

    def _wait_until_ready(self) -> None:
        """Return when it has answered a request; stopped where it does not."""
        deadline = time.monotonic() + self.start_seconds
        try:
            self._poll(deadline, lambda: self._get("/health"), "healthy")
            self._poll(deadline, self._warm_up, "answering")
        except BaseException:
            self.stop()
            raise

    def _poll(self, deadline: float, probe: Callable[[], Any], state: str) -> None:
        while True:
            if not self.is_alive():
                raise CannotStart(self.death_message())
            try:
                probe()
                return
            except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError):
                if time.monotonic() > deadline:
                    raise CannotStart(f"the vLLM server is not {state} after {self.start_seconds:g} s:\n{self.tail()}"
                                      ) from None  # fmt: skip
                time.sleep(0.25)

    def _get(self, path: str) -> None:
        urllib.request.urlopen(f"{self.base_url}{path}", timeout=5).read()

    def _warm_up(self) -> None:
        body = {"model": "policy", "prompt": [0] * 16, "max_tokens": 2, "temperature": 0}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.base_url}/v1/completions", json.dumps(body).encode(), headers)
        json.loads(urllib.request.urlopen(request, timeout=60).read())

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


@entrypoint(SampleConfig, config_name="api/vllm/trajectories")
def main(config: SampleConfig) -> int:
    """Serve a model until this process is stopped, or the server dies.

    Raises BadInput where there is no such folder, no server in the config or a malformed problem, CannotStart,
    PortInUse.
    """
    if config.policy.startswith((".", "/", "~")) and not os.path.isdir(config.policy):
        raise BadInput(f"{config.policy}: no such model folder: check the path")
    if "_target_" not in (config.server or {}):
        raise BadInput("server=none: choose a server to start (server=own)")
    if "split" in config.requests:  # a file of states or trajectories says itself what is asked
        build(config.task).problems(config.requests["split"])
    with build(config.server, seed=config.seed) as server:
        print(server.base_url, flush=True)
        while server.is_alive():
            time.sleep(0.2)
        raise CannotStart(server.death_message())


if __name__ == "__main__":
    main()
