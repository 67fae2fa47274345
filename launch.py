"""Start a program on several ranks, as torchrun does and with its arguments, and end with the program's exit code.

    python launch.py --nproc_per_node 2 main.py -cn exp/ppo/ppo_word_arithmetic model.path=MODEL output_dir=RUN
    python launch.py --nnodes 2 --node_rank 0 --nproc_per_node 8 --master_addr HOST trainer_base_ds_mul.py -cn ...

torchrun itself ends with 1 whatever the program ended with, and prints a table of it. Here the exit code is that of
docs/architecture.md, or 128 + the number of the signal that ended a rank before it could say why. SIGTERM and SIGINT go
on to the ranks, which have `--shutdown_timeout` seconds (240 unless given) to save: then 143 or 130.

`--max-restarts N` starts a run anew that lost a rank, an engine, a server or a machine (exit code 3, or a signal), on
every machine, N times at most; it goes on from its last checkpoint. Not after other errors, as torchrun does.
"""

import argparse
import logging
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

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
    try:
        code = _launch(parsed)
        for number in range(restarts):
            if not may_start_again(code):
                break
            print(f"the ranks ended with exit code {code}: started again ({number + 1} of {restarts})", file=sys.stderr)
            time.sleep(PAUSE_SECONDS)
            code = _launch(parsed)
    except SignalException as error:  # torchrun's own handler stays, also between two starts
        return 128 + int(error.sigval)
    return code


def _launch(parsed: argparse.Namespace) -> int:
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
    except DistError as error:
        print(f"error: the machines of the run did not find one another: {str(error).splitlines()[0]}", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
