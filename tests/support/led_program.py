"""Two ranks, and rank 0 leads, for `test_leading.py`: `python led_program.py output=SCENARIO`, behind a launcher."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch

from espalier.data.records import BadInput
from espalier.runtime import peers
from espalier.runtime.distributed import barrier, from_main_rank, gather_over_ranks, process_group, rank, sum_over_ranks
from espalier.runtime.entrypoint import entrypoint
from espalier.runtime.errors import Stopped
from espalier.runtime.leading import ask, ask_alike, lead
from espalier.runtime.logs import set_up_logging
from espalier.runtime.schemas import StageConfig

LIMIT = 2.0


@dataclass
class Phases:
    """Notes the phases of calls on this rank."""

    current: str = ""
    seen: list[str] = field(default_factory=list)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Be in it."""
        before, self.current = self.current, name
        yield
        self.current = before

    @contextmanager
    def call(self, name: str) -> Iterator[None]:
        """Note it."""
        self.seen.append(name)
        yield


class Held:
    """What a rank has of its own, under one name on all."""

    def __init__(self) -> None:
        self.network = torch.nn.Linear(2, 1)
        self.number = 10 * (rank() + 1)

    def add(self, numbers: list[int]) -> tuple[int, list[int]]:
        """Say who adds, and what comes out."""
        return rank(), [self.number + number for number in numbers]

    def sum(self) -> float:
        """Of all ranks: a collective within a call."""
        (found,) = sum_over_ranks([float(self.number)])
        return found

    def reads(self, network: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
        """Say that the network is this rank's own."""
        assert network is self.network
        return rows * self.number

    def fails(self, number: int) -> None:
        """Raise an error on this rank."""
        if rank() == number:
            raise BadInput("y.jsonl:7: no id")


def work(scenario: str, held: Held, phases: Phases) -> str:
    """What rank 0 does."""
    if scenario == "fails":
        raise BadInput("x.jsonl:3: no id")
    if scenario == "stopped":
        raise Stopped
    if scenario == "collective":
        sum_over_ranks([1.0])
    elif scenario == "meets":
        gather_over_ranks(1)
    elif scenario in ("rank_0", "rank_1"):
        ask_alike(partial(held.fails, int(scenario[-1])))
    elif scenario == "network":
        ask_alike(partial(held.reads, torch.nn.Linear(2, 1), torch.ones(1)))
    elif scenario == "inner":

        def inner() -> int:
            return 1

        ask_alike(inner)
    elif scenario == "twice":
        lead(held.sum, [], phases)
    time.sleep(LIMIT + 0.7)  # longer than a collective may take
    with phases.phase("adding"):
        assert ask([partial(held.add, [1]), partial(held.add, [2, *range(20)])]) == [
            (0, [11]), (1, [22, *range(20, 40)])
        ]  # fmt: skip
        assert ask_alike(held.sum) == 30.0
    assert from_main_rank(rank) == 0  # rank 0 is alone
    rows = torch.arange(300_000, dtype=torch.float32)
    one, other = ask([partial(held.reads, held.network, rows[:7]), partial(held.reads, held.network, rows)])
    assert (one[-1], other[-1]) == (60.0, 299_999 * 20.0)
    assert torch.equal(other, rows * 20)
    return "led"


@entrypoint(StageConfig, config_name="values/cut_states", config_folder="stage", is_on_ranks=True)
def main(config: StageConfig) -> None:
    """Two ranks that wait `LIMIT` seconds for one another."""
    torch.set_num_threads(1)
    set_up_logging()
    peers.ASK_SECONDS = 1.0
    with process_group(LIMIT):
        held, phases = Held(), Phases()
        try:
            found = lead(lambda: work(str(config.output), held, phases), [None, held, held.network], phases)
            assert found == ("led" if rank() == 0 else None)
            assert phases.seen == ["adding", "adding", ""]
        except Stopped:
            assert config.output == "stopped"
        barrier()  # all are together again
        assert sum_over_ranks([1.0]) == [2.0]
        try:
            ask_alike(held.sum)
        except RuntimeError as error:
            print(f"rank {rank()}: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
