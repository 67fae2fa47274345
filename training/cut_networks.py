"""Networks that are only read, whose weights ZeRO-3 cuts over the ranks: every pass of one is a pass of all ranks.

Each rank reads rows of its own, in as many passes as these need, and of several networks in whatever order (a reward of
two terms, the two policies of a log-ratio). So ranks take turns: before every pass each says which network it wants to
call, and all call the first of them in the order in which they were loaded; a rank that wanted another one, or is done,
does so with a row that means nothing, and asks again. A rank that fails ends the others (`runtime.peers`).
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from espalier.models.inputs import network
from espalier.runtime.distributed import gather_over_ranks, world_size
from espalier.training.deepspeed_engine import cut_over_ranks, cuts_weights, loading


class CutNetworks:
    """Those of a run, loaded in the same order on every rank. Args: `settings`, DeepSpeed's JSON with ZeRO-3."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.settings = settings
        self.networks: list[CutNetwork] = []
        self._is_open = False

    def loading(self, precision: str) -> AbstractContextManager[None]:
        """Have networks that are loaded within cut weight by weight; `precision` is the one in which they compute."""
        return loading(self.settings, precision)

    def take(self, model: Any, precision: str) -> "CutNetwork":
        """Return what was loaded so, to be called in turns."""
        return CutNetwork(cut_over_ranks(model, self.settings, precision), self)

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Every rank, around what it reads, were it nothing: passes are made within, and for the others until all are
        done."""
        self._is_open = True
        try:
            yield
        finally:
            self._is_open = False
        while (number := self._next(None)) is not None:
            self.networks[number].make_empty_pass()

    def wait_for_turn(self, number: int) -> None:
        """Make passes of the networks that come before, until it is this one's turn. Raises RuntimeError outside
        `shared`, where the other ranks would not come."""
        if world_size() == 1:
            return
        if not self._is_open:
            raise RuntimeError("a network that ZeRO-3 cuts over the ranks is read by all of them at once: read it by "
                               "read_shares (espalier/rl/row_shares.py)")  # fmt: skip
        while (first := self._next(number)) != number:
            assert first is not None
            self.networks[first].make_empty_pass()

    def _next(self, wanted: int | None) -> int | None:
        return min((number for number in gather_over_ranks(wanted) if number is not None), default=None)


class CutNetwork(torch.nn.Module):
    """One of them, called as the network itself. `takes_turns`: each rank makes as many passes as its rows need."""

    takes_turns = True

    def __init__(self, engine: Any, turns: CutNetworks):
        super().__init__()
        self.module, self.turns, self.number = engine, turns, len(turns.networks)
        turns.networks.append(self)

    @property
    def config(self) -> Any:
        """The network's."""
        return network(self.module).config

    def forward(self, **inputs: Any) -> Any:
        """Make a pass, when it is its turn."""
        self.turns.wait_for_turn(self.number)
        return self.module(**inputs)

    def make_empty_pass(self) -> None:
        """Make one for the others' sake, of two tokens that mean nothing."""
        ids = torch.zeros(1, 2, dtype=torch.long, device=next(self.parameters()).device)
        with torch.inference_mode():
            self.module.eval()
            self.module(input_ids=ids, attention_mask=torch.ones_like(ids))


_in_use: CutNetworks | None = None


def of_run(settings: Mapping[str, Any] | None) -> CutNetworks | None:
    """Begin a run: return what cuts the reward models that it loads, and takes turns from now on (`read_by_all_ranks`);
    None where `settings` cut no weights."""
    global _in_use
    _in_use = CutNetworks(settings) if settings and cuts_weights(settings) else None
    return _in_use


def read_by_all_ranks() -> AbstractContextManager[None]:
    """Every rank, around what it reads by reward models of its run, were it nothing (`CutNetworks.shared`)."""
    return _in_use.shared() if _in_use is not None else nullcontext()
