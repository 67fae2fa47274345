"""The weights of a model that ZeRO-3 has cut over the ranks: whole for a moment, a few at a time, and saved so.

No rank and no host ever has to hold all of them. To gather is a collective: every rank makes the same calls in the same
order, from its main thread.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter

from espalier.models.in_parts import whole_shape
from espalier.models.merged import Merged, merge_plan
from espalier.runtime.distributed import is_main_rank
from espalier.training.weight_files import join_folders, join_model

GROUP_BYTES = 4 * 2**20  # gathered at once: less is mostly waiting
FILE_BYTES = 2 * 2**30  # of weights in one file of a saved model

Gather = Callable[..., AbstractContextManager[Any]]


class Shards:
    """`tensors`: the parameters and buffers of `module` by their names there, tied ones one object; a buffer is whole
    on every rank. `gather`: deepspeed.zero.GatheredParameters; nothing has to be gathered where all are whole."""

    def __init__(self, module: torch.nn.Module, gather: Gather = nullcontext):
        self.module = module
        self.tensors: dict[str, torch.Tensor] = dict(module.state_dict(keep_vars=True))
        self._gather = gather

    @staticmethod
    def size(tensor: torch.Tensor) -> int:
        """Return the bytes of the whole."""
        return whole_shape(tensor).numel() * tensor.dtype.itemsize

    def whole(self, tensors: Sequence[torch.Tensor]) -> AbstractContextManager[Any]:
        """Have these whole within, not to be written to; entered by every rank, left by each when it likes."""
        return self._gather(list(tensors))


class GatheredWeights:
    """The weights of a sharded model as rank 0 delivers or saves them: by the names of the plain model, adapters
    (`scalings` of `models.merged`) merged."""

    def __init__(self, shards: Shards, scalings: Mapping[str, float]):
        self.shards = shards
        self.plan: dict[str, Merged] = merge_plan(shards.tensors, scalings)
        self._held = ExitStack()

    def first(self, name: str) -> torch.Tensor:
        """Return the tensor of the model that this weight is, or that adapters are added to."""
        return self.shards.tensors[self.plan[name].sources[0]]

    def carriers(self, name: str) -> list[str]:
        """Return the model's names of this weight, or of what adapters are added to, and of the tensor that gives its
        rows their length, where there is one (DoRA's magnitude)."""
        return [*self.plan[name].sources[:1], *self.plan[name].sources[3:]]

    @property
    def kinds(self) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Return whole shapes and dtypes by name, in the order in which they come; nothing is gathered."""
        tensors = self.shards.tensors
        return {name: how.kind(*(tensors[source] for source in how.sources)) for name, how in self.plan.items()}

    @property
    def first_names(self) -> dict[str, str]:
        """Return by every name the first one of the same tensor: another one for the later names of tied weights."""
        owners: dict[int, str] = {}
        return {name: owners.setdefault(id(self.first(name)), name) for name in self.plan}

    def groups(self, limit: int = GROUP_BYTES) -> list[list[str]]:
        """Return the names in their order, in groups of at most so many bytes, or of one name."""
        return groups_of({name: self._size(name) for name in self.plan}, limit)

    def gather(
        self, names: Sequence[str], making: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] | None = None
    ) -> list[tuple[str, torch.Tensor]]:
        """Return these weights on rank 0, until `release` or the next call, and nothing on the others; on every rank.
        `making[name]` of a tensor of the model takes its place, before adapters are merged."""
        self.release()
        tensors = self.shards.tensors
        needed = {id(tensors[source]): tensors[source] for name in names for source in self.plan[name].sources}
        self._held.enter_context(self.shards.whole([*needed.values()]))
        if not is_main_rank():
            self.release()
            return []
        found = {source: tensors[source].detach() for name in names for source in self.plan[name].sources}
        for source, make in (making or {}).items():
            if source in found:
                found[source] = make(found[source])
        return [(name, self.plan[name](*(found[one] for one in self.plan[name].sources))) for name in names]

    def release(self) -> None:
        """Let go of what was gathered, on this rank."""
        self._held.close()

    def save(self, model: Any, folder: Path, limit: int = FILE_BYTES) -> None:
        """Write a standard folder of `model`, a transformers one, in files of `limit` bytes or a layer; on every rank.
        Rank 0 writes what it has gathered before it gathers more: a weight or `GROUP_BYTES`, or a layer of a network
        whose layers transformers cuts or joins."""
        names_of: dict[str, list[str]] = {}  # tied names in the file of the first: transformers knows which one to keep
        for name, first in self.first_names.items():
            names_of.setdefault(first, []).append(name)
        sizes = {first: self._size(first) for first in names_of}
        atom_of = layer_of if converts_weights(model) else str
        files = groups_of(sizes, limit, layer_of)
        written: list[Path] = []
        for names in files:
            place = folder if len(files) == 1 else folder / f"part-{len(written) + 1}"
            pieces: list[Path] = []
            for group in groups_of({name: sizes[name] for name in names}, GROUP_BYTES, atom_of):
                pieces.append(place / f"piece-{len(pieces) + 1}")
                self._write(model, group, names_of, pieces[-1])
            if is_main_rank():
                join_folders(pieces, place)
                written.append(place)
        if is_main_rank() and len(files) > 1:
            join_model(written, folder, sum(sizes.values()))

    def _write(self, model: Any, names: Sequence[str], names_of: Mapping[str, list[str]], folder: Path) -> None:
        """Write these weights, each under all of its names; on every rank."""
        found: dict[str, torch.Tensor] = {}
        for name, value in self.gather(names):
            # Several that are gathered at once may share memory, by which transformers would take them for tied.
            found.update(dict.fromkeys(names_of[name], value.to("cpu", copy=len(names) > 1)))
        if is_main_rank():
            model.save_pretrained(folder, state_dict=found, max_shard_size=2**62)  # pops what it has written
        self.release()

    def _size(self, name: str) -> int:
        return sum(self.shards.size(self.shards.tensors[source]) for source in self.plan[name].sources)


def groups_of(sizes: Mapping[str, int], limit: int, atom_of: Callable[[str], str] = str) -> list[list[str]]:
    """Return names in their order, in groups of at most `limit` bytes or of one atom: neighbours of one `atom_of`."""
    groups: list[list[str]] = []
    filled = 0
    for names in (list(found) for _, found in groupby(sizes, atom_of)):
        size = sum(sizes[name] for name in names)
        if groups and filled + size <= limit:
            groups[-1] += names
            filled += size
        else:
            groups.append(names)
            filled = size
    return groups


def layer_of(name: str) -> str:
    """Return a weight's name as far as its first number: within a layer transformers cuts and joins weights, so that
    they are written as they were published."""
    words = name.split(".")
    return ".".join(words[: next((place for place, word in enumerate(words) if word.isdigit()), len(words)) + 1])


def converts_weights(model: PreTrainedModel) -> bool:
    """Say whether transformers writes a network's weights otherwise than it holds them (fused experts): those of a
    layer have to be written together."""
    known = getattr(model, "_weight_conversions", None)
    found = get_model_conversion_mapping(model, add_legacy=False) if known is None else known
    return any(isinstance(one, WeightConverter) for one in found)
