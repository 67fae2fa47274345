"""Several vLLM engines on this machine without a server, each in a process of its own, behind one client
(`sampling.engine_pool`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from espalier.sampling.child_engine import ChildEngine
from espalier.sampling.child_process import engine_environment, numbered
from espalier.sampling.engine_arguments import num_devices
from espalier.sampling.engine_pool import EnginePool
from espalier.sampling.kept_engines import engine_name
from espalier.sampling.placement import core_list, deal_gpus, share_of_cores


@dataclass(eq=False)
class DataParallelEngines(EnginePool):
    """Args, beside those of every pool: each engine has as many devices as its `options` say: GPUs of the visible ones,
    or of `gpus` among them (`gpus_each` 0: all see all; `sampling.placement.deal_gpus`), else `num_threads` threads (0:
    an equal share of the cores; bound to cores from `first_core` on where that is given).
    """

    gpus_each: int | None = None
    gpus: Sequence[int | str] = ()
    num_threads: int = 0
    first_core: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.devices = deal_gpus(self.num_engines, self.gpus_each, self.gpus, self.options)

    def can_sleep(self) -> bool:
        """Say whether this machine has a GPU: vLLM has no sleep mode on CPUs."""
        import torch

        return torch.accelerator.is_available()

    def make_engine(self, number: int) -> ChildEngine:
        """Return engine `number`, which is not started yet."""
        path = numbered(Path(self.log), number)
        name = engine_name(number, self.num_engines)
        return ChildEngine(name, str(path), self.program, self.settings(number), self._lose)

    def environment(self, number: int) -> dict[str, str]:
        """Of one engine's process."""
        found = engine_environment(self.kv_cache_gib, self.devices[number])
        each = num_devices(self.options)
        threads = self.num_threads or share_of_cores(self.num_engines * each)
        bound = "nobind"
        if self.first_core is not None:
            first = self.first_core + number * each * threads
            bound = "|".join(core_list(first + rank * threads, threads) for rank in range(each))
        return found | {"OMP_NUM_THREADS": str(threads), "VLLM_CPU_OMP_THREADS_BIND": bound}
