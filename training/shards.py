"""The weights of a model that ZeRO-3 has cut over the ranks: whole for a moment, a few at a time, and saved so; large
ones never, but slice by slice.

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
from espalier.runtime.distributed import device, is_main_rank, rank, send_from, world_size
from espalier.training.weight_files import grown, join_folders, join_model

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

    def has_stretches(self, tensor: torch.Tensor) -> bool:
        """Say whether `numbers` gives a tensor: rank r of N has the r-th N-th of it, as it is. Not where it is whole on
        every rank, on an NVMe, rounded, or cut over fewer ranks than all."""
        own = getattr(tensor, "ds_tensor", None)
        if own is None or own.device.type not in ("cpu", device().type) or own.dtype != tensor.dtype:
            return False
        is_plain = getattr(own, "ds_quant_scale", None) is None and own.numel() == own.ds_numel
        return is_plain and own.ds_numel == -(-whole_shape(tensor).numel() // world_size())

    def numbers(self, tensor: Any, start: int, stop: int) -> torch.Tensor:
        """Return [stop - start] of a flattened tensor that `has_stretches`; on every rank, where it may be dropped."""
        own = tensor.ds_tensor.reshape(-1)
        found, length = torch.empty(stop - start, dtype=own.dtype, device=device()), len(own)
        for owner in range(start // length, -(-stop // length)):
            first, end = max(start, owner * length), min(stop, (owner + 1) * length)
            part = found[first - start : end - start]
            if owner == rank():
                part.copy_(own[first - owner * length : end - owner * length])
            send_from(owner, part)
        return found


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

    def is_in_slices(self, names: Sequence[str]) -> bool:
        """Say whether a group is one large weight whose slices can be had (`slice_of`)."""
        first = self.first(names[0])
        is_plain = len(names) == 1 and len(self.plan[names[0]].sources) == 1
        return is_plain and self.shards.size(first) > GROUP_BYTES and self.shards.has_stretches(first)

    @torch.no_grad()
    def slice_of(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return [stop - start] of the flattened weight; on every rank."""
        return self.shards.numbers(self.first(name), start, stop)

    def save(self, model: Any, folder: Path, limit: int = FILE_BYTES) -> None:
        """Write a standard folder of `model`, a transformers one, in files of `limit` bytes or a layer; on every rank.
        Rank 0 writes what it has gathered before it gathers more: `GROUP_BYTES`, of small weights or of a large one; or
        a layer of a network whose layers transformers cuts or joins."""
        names_of: dict[str, list[str]] = {}  # tied names in the file of the first: transformers knows which one to keep
        for name, first in self.first_names.items():
            names_of.setdefault(first, []).append(name)
        sizes = {first: self._size(first) for first in names_of}
        is_converted = converts_weights(model)
        atom_of = layer_of if is_converted else str
        files = groups_of(sizes, limit, layer_of)
        written: list[Path] = []
        for names in files:
            place = folder if len(files) == 1 else folder / f"part-{len(written) + 1}"
            pieces: list[Path] = []
            for group in groups_of({name: sizes[name] for name in names}, GROUP_BYTES, atom_of):
                pieces.append(place / f"piece-{len(pieces) + 1}")
                write = self._write_slices if not is_converted and self.is_in_slices(group) else self._write
                write(model, group, names_of, pieces[-1])
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

    def _write_slices(self, model: Any, names: Sequence[str], names_of: Mapping[str, list[str]], folder: Path) -> None:
        """Write one large weight under all of its names, of which no rank holds more than a slice."""
        whole = self.first(names[0])
        size = whole_shape(whole).numel()
        if is_main_rank():  # transformers chooses the names, and sees one number
            found = dict.fromkeys(names_of[names[0]], torch.zeros(1, dtype=whole.dtype))
            model.save_pretrained(folder, state_dict=found)
        with grown(folder / "model.safetensors", whole_shape(whole)) if is_main_rank() else nullcontext() as write:
            step = GROUP_BYTES // whole.dtype.itemsize
            for start in range(0, size, step):
                part = self.slice_of(names[0], start, min(size, start + step))
                if write is not None:
                    write(part.cpu().view(torch.uint8).numpy().data)

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
