"""A program on ranks for `test_peers.py`: `python rank_program.py output=SCENARIO`, behind a launcher."""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

from espalier.data.records import BadInput
from espalier.runtime import peers
from espalier.runtime.distributed import (
    barrier,
    from_main_rank,
    is_main_rank,
    limit_all_groups,
    process_group,
    rank,
    sum_over_ranks,
    wait_visibly,
    waits_heard_by,
)
from espalier.runtime.entrypoint import entrypoint
from espalier.runtime.errors import Stopped
from espalier.runtime.logs import set_up_logging
from espalier.runtime.schemas import StageConfig, TrainConfig
from espalier.sampling.client import ServerGone
from espalier.training import run_precision
from tests.support.root_config import root_config

LIMIT = 3.0


def phase(seconds: float) -> str:
    """What rank 0 does for all."""
    time.sleep(seconds)
    return "an answer"


def raise_(error: BaseException) -> None:
    """Raise it."""
    raise error


def work(scenario: str) -> None:
    """One of the ways in which a run of two ranks goes on or ends."""
    if scenario == "long":  # longer than a collective may take
        assert from_main_rank(lambda: phase(LIMIT + 1)) == "an answer"
        assert sum_over_ranks([rank() + 1.0]) == [3.0]
        made = dist.new_group([0, 1])  # as others make them, with torch's own limit
        limit_all_groups()
        assert made._get_backend(torch.device("cpu")).options._timeout.total_seconds() == LIMIT
    elif scenario == "late":
        barrier()
        time.sleep((LIMIT + 1.2) * rank())
        barrier()
    elif scenario == "bad_input":
        from_main_rank(lambda: raise_(BadInput("x.jsonl:3: no id")))
    elif scenario == "server_gone":
        from_main_rank(lambda: raise_(ServerGone("no server answers")))
    elif scenario == "interrupted":  # all go on together
        for _ in range(2):
            try:
                from_main_rank(lambda: raise_(Stopped()))
            except Stopped:
                assert sum_over_ranks([rank() + 1.0]) == [3.0]
    elif scenario == "rank_1":  # while rank 0 waits in a collective
        if rank() == 1:
            raise BadInput("y.jsonl:7: no id")
        sum_over_ranks([1.0])
    elif scenario == "rank_1_early":  # while rank 0 works for all
        if rank() == 1:
            raise MemoryError("no room for a batch")
        from_main_rank(lambda: phase(60))
    elif scenario == "killed":
        if rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        from_main_rank(lambda: phase(60))
    elif scenario == "stopped":
        barrier()
        if is_main_rank():
            os.kill(os.getpid(), signal.SIGSTOP)
        from_main_rank(lambda: phase(0))
    elif scenario == "astray":
        barrier() if is_main_rank() else from_main_rank(lambda: phase(0))
    elif scenario == "unlike":  # bfloat16 is fast on one of two machines
        run_precision.has_fast_bf16 = lambda kind: rank() == 0
        assert run_precision.settle_precision(root_config(TrainConfig)).precision == "fp32"
        assert run_precision.settle_precision(root_config(TrainConfig, precision="bf16")).precision == "bf16"
    elif scenario == "stuck":  # alive, and not where the other is
        if is_main_rank():
            time.sleep(30)
        sum_over_ranks([1.0])
    elif scenario == "heard":  # the last that came is known everywhere; waits of a collective have its limit
        waits: list[tuple[int, float, float]] = []
        with waits_heard_by(lambda *wait: waits.append(wait)):
            barrier()
            time.sleep(0.3 * rank())
            barrier()
            time.sleep(0.3 * (1 - rank()))
            wait_visibly("a collective")
            assert [last for last, _, _ in waits[1:]] == [1, 0]
            own = [ended - begun for _, begun, ended in waits[1:]]
            assert own[rank()] > 0.2 > own[1 - rank()], own
            time.sleep(30 * rank())
            wait_visibly("a collective")


@entrypoint(StageConfig, config_name="values/cut_states", config_folder="stage", is_on_ranks=True)
def main(config: StageConfig) -> None:
    """Two ranks that wait `LIMIT` seconds for one another."""
    torch.set_num_threads(1)
    set_up_logging()
    peers.ASK_SECONDS = 1.0
    if config.output == "apart" and rank() == 1:
        raise BadInput("z.jsonl: rank 1 does not see it")
    if config.output == "ends":
        return
    with process_group(LIMIT):
        work(config.output)
    print(f"rank {rank()} is done", file=sys.stderr)


if __name__ == "__main__":
    main()
