"""A rank that reads a rearranged checkpoint later than the others, for `test_checkpoints.py`: `slow_reader.py FOLDER`,
behind a launcher."""

import sys
import time
from pathlib import Path

from espalier.runtime.distributed import process_group, rank
from espalier.training import deepspeed_checkpoint


def main() -> None:
    """Rank 1 comes to its file when rank 0 is done."""
    deepspeed_checkpoint.make_universal = lambda _, made: (made / "part").write_text("")  # type: ignore[assignment]
    with process_group(timeout_seconds=60), deepspeed_checkpoint.for_any_ranks(Path(sys.argv[1])) as made:
        time.sleep(rank())
        assert (made / deepspeed_checkpoint.TAG / "part").is_file()


if __name__ == "__main__":
    main()
