"""Networks of which ranks read stretches, for `test_read_slices.py`: `slice_ranks.py FOLDER NAME ...`, behind a
launcher. `FOLDER/NAME` are model folders; what each rank read is written to `FOLDER/read RANK.json`."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import modeling_utils

from benchmarks.processes.sides import peak_rss
from benchmarks.sizes.tensor_memory import reset_peak_rss
from espalier.models.in_parts import loaded_in_parts
from espalier.models.load import load_policy, load_reference
from espalier.runtime.distributed import process_group, rank
from espalier.runtime.logs import set_up_logging
from espalier.training.deepspeed_engine import loading
from espalier.training.weight_cutter import ZeroCutter

ZERO: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
ALIKE = ("requires_grad", "dtype", "device", "shape", "ds_shape", "ds_numel", "ds_numel_aligned", "ds_persist",
         "_is_hf_initialized")  # fmt: skip


class Counted:
    """safetensors' open file, or one slice object of it, that notes the bytes of what it gives."""

    def __init__(self, held: Any, name: str, note: Callable[[str, int], None]) -> None:
        self.held, self.name, self.note = held, name, note

    def __getattr__(self, name: str) -> Any:
        return getattr(self.held, name)

    def __exit__(self, *error: Any) -> Any:
        return self.held.__exit__(*error)

    def get_slice(self, name: str) -> "Counted":
        """A weight."""
        return Counted(self.held.get_slice(name), name, self.note)

    def __getitem__(self, index: Any) -> torch.Tensor:
        found: torch.Tensor = self.held[index]
        self.note(self.name, found.nbytes)
        return found


@contextmanager
def counted() -> Iterator[list[tuple[str, int]]]:
    """(weight, bytes) of everything that is read within."""
    found: list[tuple[str, int]] = []
    opened = modeling_utils.safe_open
    modeling_utils.safe_open = lambda *args, **options: Counted(
        opened(*args, **options), "", lambda name, size: found.append((name, size))
    )
    try:
        yield found
    finally:
        modeling_utils.safe_open = opened


def read_whole(load: Callable[[str], Any], path: str, is_half: bool) -> Any:
    """A network of which every weight is read whole by every rank and cut by DeepSpeed's public call."""
    cutter = ZeroCutter(ZERO)
    cutter.reads_parts = False
    with loaded_in_parts(cutter, is_half=is_half):
        return load(path)


def assert_same(model: Any, other: Any) -> None:
    """Each weight's part is the same to the last bit, and so is all else about it."""
    own, expected = dict(model.named_parameters()), dict(other.named_parameters())
    assert list(own) == list(expected)
    for name, value in own.items():
        assert type(value) is torch.nn.Parameter, name
        known = expected[name]
        assert [getattr(value, key) for key in ALIKE] == [getattr(known, key) for key in ALIKE], name
        assert vars(value).keys() == vars(known).keys(), name
        length = known.ds_tensor.ds_numel  # type: ignore[attr-defined]
        kept = max(0, min(length, known.ds_numel - rank() * length))  # type: ignore[attr-defined]
        assert value.ds_tensor.dtype == known.ds_tensor.dtype, name  # type: ignore[attr-defined]
        one, two = (part.ds_tensor[:kept].view(torch.uint8) for part in (value, known))  # type: ignore[attr-defined]
        assert torch.equal(one, two), name
    buffers = dict(other.named_buffers())
    for name, value in model.named_buffers():
        assert type(value) is torch.Tensor, name
        assert torch.equal(value, buffers[name]), name


def main() -> None:
    """Check each folder."""
    torch.set_num_threads(1)
    set_up_logging()
    folder, read = Path(sys.argv[1]), {}
    with process_group(timeout_seconds=120, is_needed_alone=True):
        for name in sys.argv[2:]:
            path = str(folder / name)
            with counted() as found, loading(ZERO):
                before = reset_peak_rss()
                model = load_policy(path)
                rise = peak_rss() - before
            read[name] = {"bytes": found, "rise": rise}
            if name != "wide":
                assert_same(model, read_whole(load_policy, path, is_half=False))
                with loading(ZERO, "bf16"):
                    model = load_reference(path)
                assert_same(model, read_whole(load_reference, path, is_half=True))
    (folder / f"read {rank()}.json").write_text(json.dumps(read))


if __name__ == "__main__":
    main()
