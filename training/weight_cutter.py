"""How ZeRO-3 cuts weights over the ranks while a network is loaded (`models.in_parts.Cutter`)."""

from collections.abc import Mapping
from functools import cached_property
from typing import Any, TypeVar

import torch

from espalier.runtime.distributed import gather_over_ranks, limit_all_groups
from espalier.training.deepspeed_library import library

T = TypeVar("T")


class ZeroCutter:
    """Args: `settings`, DeepSpeed's JSON without an optimizer.

    DeepSpeed sends a whole weight from rank 0 to all ranks before it cuts it. Weights of which ranks have read their
    own stretches it cuts without that, by a method of `zero.Init` that is not public: where a version lacks it, or
    nodes are to hold second copies (hpZ), all weights are read whole.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.settings = settings
        copies = settings["zero_optimization"].get("zero_hpz_partition_size") or 1
        self.reads_parts = copies == 1 and hasattr(library().zero.Init, "_convert_to_deepspeed_param")

    @cached_property
    def _first(self) -> tuple[Any, torch.nn.Parameter]:
        """DeepSpeed's cutter, and a parameter of one number that it has cut; that of others goes by one."""
        holder = torch.nn.Module()
        holder.weight = torch.nn.Parameter(torch.zeros(1))
        init = library().zero.Init(holder, config_dict_or_path=dict(self.settings))
        limit_all_groups()
        return init, holder.weight

    def stretch(self, size: int) -> tuple[int, int]:
        """Return (start, stop): rank r of N keeps the r-th N-th, rounded up, of a flattened weight."""
        if not self.reads_parts:
            return 0, size
        init, _ = self._first
        length = -(-size // init.num_partitions)
        return min(size, init.get_partition_rank() * length), min(size, (init.get_partition_rank() + 1) * length)

    def cut(self, parameter: torch.nn.Parameter) -> None:
        """Leave a parameter with this rank's part of what it is on rank 0."""
        _, first = self._first
        first.convert_to_zero_parameters(param_list=[parameter])  # type: ignore[attr-defined]

    def cut_own(self, parameter: Any) -> None:
        """Leave a parameter with this rank's stretch of it. Raises RuntimeError where DeepSpeed keeps another one."""
        init, _ = self._first
        init._convert_to_deepspeed_param(parameter)
        parameter.partition()
        parameter.data = parameter.data.to(init.local_device)  # of no numbers: where it is gathered
        start, stop = self.stretch(parameter.ds_numel)
        if not stop - start <= parameter.ds_tensor.ds_numel == -(-parameter.ds_numel // init.num_partitions):
            raise RuntimeError(f"DeepSpeed keeps {parameter.ds_tensor.ds_numel} numbers of {parameter.ds_numel}, not "
                               f"{stop - start}: the versions of requirements.txt are needed")  # fmt: skip

    def of_all_ranks(self, value: T) -> list[T]:
        """Return the value of every rank, which all ask."""
        return gather_over_ranks(value)
