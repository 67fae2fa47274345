"""Start a program on several ranks, as torchrun does and with its arguments, and end with the program's exit code.

    python launch.py --nproc_per_node 2 main.py -cn exp/ppo/ppo_word_arithmetic model.path=MODEL output_dir=RUN
    python launch.py --nnodes 2 --node_rank 0 --nproc_per_node 8 --master_addr HOST trainer_base_ds_mul.py -cn ...

torchrun itself ends with 1 whatever the program ended with, and prints a table of it. Here the exit code is that of
docs/architecture.md, or 128 + the number of the signal that ended a rank before it could say why. SIGTERM and SIGINT go
on to the ranks, which have `--shutdown_timeout` seconds (240 unless given) to save: then 143 or 130.
"""

import logging
import signal
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

SHUTDOWN_SECONDS = 240


def exit_code_of_ranks(codes: Iterable[int]) -> int:
    """Return one exit code for ranks that ended with `codes` (a negative one: by that signal), in the order of their
    ends.

    A rank's own word comes before a signal that stopped another, and both before one that ended it without a word.
    """
    own = [code for code in codes if code != 0]
    for is_wanted in (lambda code: 0 < code < 128, lambda code: code in (130, 143), lambda code: code > 0):
        for code in own:
            if is_wanted(code):
                return code
    return 128 - own[0] if own else 0


def main(arguments: Sequence[str]) -> int:
    """Launch the ranks of this machine and wait for them; the exit code."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # What it says of ranks that end early is said by these, or below.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    logging.getLogger("torch.distributed.elastic.agent.server.api").setLevel(logging.ERROR)
    parsed = run.parse_args([f"--shutdown_timeout={SHUTDOWN_SECONDS}", *arguments])
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
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
