"""Buckets of weights in memory that the trainer and its engines see alike: of one GPU that they share, or of one
machine's CPUs.

What a learner sends to an engine on its own GPU need not leave it: the trainer fills one of two buckets there, an
engine copies it into memory of its own, where a weight may be kept, and says so; the connection carries a byte for each
bucket. CUDA gives a process a handle of another's memory (IPC), which is good as long as the memory is held. On CPUs a
file in memory is shared, which has no name any more once all have opened it; so it is between several GPUs of one
machine.

Who opens it finds a mark there: a container of its own may have another file of that name, and says nothing.
"""

import os
import secrets
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import torch

from espalier.sampling.weight_buckets import BUCKET_BYTES, HOST, NUM_HELD
from espalier.sampling.weight_digest import DeviceDigest

NUM_SHARED = 2  # buckets: one is filled while the other is read
GPU_BUCKET_BYTES = 32 * 2**20  # takes many times as long as the turn of a bucket
_FOLDER, _MARK = "/dev/shm", 16

Handle = dict[str, Any]
"""What opens shared memory in another process; of JSON's types."""


def places_of(device: torch.device | None) -> dict[str, torch.device]:
    """Return where a process with that device can share memory, the best first: by names that are the same in every
    process that sees it, the device that holds it. Nothing where nothing is to be shared (None)."""
    if device is None:
        return {}
    found = {}
    if device.type == "cuda":
        found[f"GPU {torch.cuda.get_device_properties(device).uuid}"] = device
    boot = Path("/proc/sys/kernel/random/boot_id")
    if boot.is_file():
        found[f"machine {boot.read_text().strip()}"] = HOST
    return found


def bucket_bytes_on(device: torch.device) -> int:
    """Return how large buckets there are best."""
    return GPU_BUCKET_BYTES if device.type == "cuda" else BUCKET_BYTES


_made: dict[tuple[str, int], torch.Tensor] = {}
"""Shared memory of GPUs, which is made once: torch does not free what a process that was killed had opened."""


def _of_gpu(device: torch.device, size: int) -> torch.Tensor:
    place = str(device), size
    if place not in _made:
        torch.cuda.empty_cache()  # so that it lies in no large block that others have left, and that it would keep
        _made[place] = torch.empty(size, dtype=torch.uint8, device=device)
    return _made[place]


def sender_bytes(device_type: str) -> int:
    """Return what a delivery takes of the trainer's device at most: shared buckets, and on a GPU the digest of one."""
    if device_type == "cuda":
        return NUM_SHARED * GPU_BUCKET_BYTES + DeviceDigest.NUM_BYTES
    return NUM_SHARED * BUCKET_BYTES


def receiver_bytes(vocabulary: int, hidden: int) -> int:
    """Return what it takes of an engine's GPU at most beside its weights, where they come by one, in bf16: buckets, the
    embedding, which is put together there, and vLLM's (0.32) second one, into which it is loaded; where vLLM pads the
    vocabulary it keeps what came until the end, the head's too."""
    largest = 2 * vocabulary * hidden
    return NUM_HELD * GPU_BUCKET_BYTES + (3 if vocabulary % 64 else 2) * largest + DeviceDigest.NUM_BYTES


def kept_bytes(num_engines: int) -> int:
    """Return what trainer and engines keep of one GPU between deliveries."""
    return (NUM_SHARED + num_engines * NUM_HELD) * GPU_BUCKET_BYTES


class SharedBuckets:
    """`memory`: [NUM_SHARED x bytes of a bucket], of which one process is the owner."""

    def __init__(self, memory: torch.Tensor, path: str = ""):
        self.memory = memory
        self._path = path

    @classmethod
    def make(cls, device: torch.device, size: int) -> "SharedBuckets":
        """Return buckets of `size` bytes there. Raises OSError, RuntimeError where there is no room."""
        size = NUM_SHARED * (-(-max(size, _MARK) // 16) * 16)
        if device.type == "cuda":
            made = cls(_of_gpu(device, size))
        else:
            file, path = tempfile.mkstemp(prefix="weights-", dir=_FOLDER)
            try:
                os.posix_fallocate(file, 0, size)  # writing to what a full disk cannot hold would end the process
                made = cls(torch.from_file(path, shared=True, size=size, dtype=torch.uint8), path)
            except BaseException:
                os.unlink(path)
                raise
            finally:
                os.close(file)
        made.memory[:_MARK] = torch.tensor(list(secrets.token_bytes(_MARK)), dtype=torch.uint8)
        made.settle()
        return made

    def handle(self) -> Handle:
        """Return what one other process opens them by: each needs its own."""
        mark = self.memory[:_MARK].tolist()
        if self._path:
            return {"mark": mark, "path": self._path, "size": len(self.memory)}
        storage = cast(Any, self.memory.untyped_storage())
        _, *parts = storage._share_cuda_()
        return {"mark": mark, "cuda": [part.hex() if isinstance(part, bytes) else part for part in parts]}

    @classmethod
    def open(cls, handle: Handle, device: torch.device) -> "SharedBuckets":
        """Return those of another process, on the same `device` where they lie on a GPU. Raises OSError, RuntimeError
        where they cannot be had."""
        if "path" in handle:
            path = handle["path"]
            if os.stat(path).st_size < handle["size"]:  # nor is one made where there is none
                raise OSError(f"{path} is another file here")
            found = cls(torch.from_file(path, shared=True, size=handle["size"], dtype=torch.uint8))
        else:
            memory, size, offset, counter, counter_offset, event, is_waiting = handle["cuda"]
            storage = cast(Any, torch.UntypedStorage)._new_shared_cuda(
                device.index or 0, bytes.fromhex(memory), size, offset, bytes.fromhex(counter), counter_offset,
                bytes.fromhex(event), is_waiting,
            )  # fmt: skip
            found = cls(torch.empty(0, dtype=torch.uint8, device=device).set_(storage))
        if found.memory[:_MARK].tolist() != handle["mark"]:
            raise OSError("what is there is not what the trainer made")
        return found

    def hide(self) -> None:
        """Let nobody else open them: a process that is killed leaves nothing behind from now on."""
        if self._path:
            with suppress(FileNotFoundError):
                os.unlink(self._path)

    def bucket(self, number: int, size: int) -> torch.Tensor:
        """Return the memory of a bucket of that number [size]."""
        start = number % NUM_SHARED * (len(self.memory) // NUM_SHARED)
        return self.memory[start : start + size]

    def settle(self) -> None:
        """Return when what was asked of the device is done: other processes see it."""
        if self.memory.is_cuda:
            torch.cuda.current_stream(self.memory.device).synchronize()
