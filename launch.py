"""Start a program on several ranks, as torchrun does and with its arguments, and end with the program's exit code.

    python launch.py --nproc_per_node 2 main.py -cn exp/ppo/ppo_word_arithmetic model.path=MODEL output_dir=RUN
    python launch.py --nnodes 2 --node_rank 0 --nproc_per_node 8 --master_addr HOST trainer_base_ds_mul.py -cn ...

torchrun itself ends with 1 whatever the program ended with, and prints a table of it. Here the exit code is that of
docs/architecture.md, or 128 + the number of the signal that ended a rank before it could say why. SIGTERM and SIGINT go
on to the ranks, which have `--shutdown_timeout` seconds (240 unless given) to save: then 143 or 130.

`--max-restarts N` starts a run anew that lost a rank, an engine, a server or a machine (exit code 3, or a signal), on
every machine, N times at most; it goes on from its last checkpoint. Not after other errors, as torchrun does. Machines
that notice it at different times wait for one another: one failure is one start more on each of them.
"""

import argparse
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from espalier.runtime.machine_starts import START, MachinesApart, MachineStarts
from espalier.runtime.ranks import exit_code_of_ranks, may_start_again

SHUTDOWN_SECONDS = 240
PAUSE_SECONDS = 2.0


def main(arguments: Sequence[str]) -> int:
    """Launch the ranks of this machine and wait for them, again where they may end otherwise; the exit code."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import SignalException

    if arguments and arguments[0] in ("-h", "--help"):
        print(f"{__doc__}\ntorchrun's own arguments:\n")
    parsed = run.parse_args([f"--shutdown_timeout={SHUTDOWN_SECONDS}", *arguments])
    restarts, parsed.max_restarts = parsed.max_restarts, 0  # torchrun would start them again after any error
    starts = _starts_of(parsed) if restarts else None
    try:
        code = _launch(parsed, starts)
        for number in range(restarts):
            if not may_start_again(code):
                break
            print(f"the ranks ended with exit code {code}: started again ({number + 1} of {restarts})", file=sys.stderr)
            time.sleep(PAUSE_SECONDS)
            code = _launch(parsed, starts)
    except SignalException as error:  # torchrun's own handler stays, also between two starts
        return 128 + int(error.sigval)
    return code


def _starts_of(parsed: argparse.Namespace) -> MachineStarts | None:
    """Return where the starts of all machines are counted; None where each start makes a store of its own."""
    from torch.distributed import run

    try:
        fewest, num_machines = run.parse_min_max_nnodes(parsed.nnodes)
    except (RuntimeError, ValueError):  # torchrun says it
        return None
    is_static = parsed.rdzv_backend == "static" and not parsed.rdzv_endpoint and not parsed.standalone
    if not is_static or fewest != num_machines or (num_machines == 1 and parsed.master_port is None):
        return None
    return MachineStarts(parsed.master_addr, parsed.master_port or 29500, parsed.node_rank == 0, num_machines)


def _launch(parsed: argparse.Namespace, starts: MachineStarts | None) -> int:
    from torch.distributed import DistError, run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # What it says of ranks that end early is said by these, or below.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    logging.getLogger("torch.distributed.elastic.agent.server.api").setLevel(logging.ERROR)
    if not (parsed.module or parsed.no_python or Path(parsed.training_script).is_file()):
        print(
            f"error: {parsed.training_script}: no such program: name main.py or trainer_base_ds_mul.py", file=sys.stderr
        )
        return 2
    try:
        if starts is not None:
            parsed.rdzv_id = os.environ[START] = starts.next()
        run.run(parsed)
    except ValueError as error:  # a number of ranks that is none, say
        print(f"error: launch.py: {error}", file=sys.stderr)
        return 2
    except ChildFailedError as error:
        ended = sorted((failure.timestamp, rank, failure.exitcode) for rank, failure in error.failures.items())
        for _, rank, code in ended:
            if code < 0 and code != -signal.SIGTERM:
                print(f"rank {rank} was ended by {signal.Signals(-code).name}", file=sys.stderr)
        return exit_code_of_ranks(code for *_, code in ended)
    except (DistError, MachinesApart) as error:
        print(f"error: the machines of the run did not find one another: {str(error).splitlines()[0]}", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
