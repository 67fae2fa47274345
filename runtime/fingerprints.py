"""Hashes of files and model folders that are cheap at any size: whether what a run or an output was made of is still
what stands there."""

import dataclasses
import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_WEIGHTS = tuple(f"{part}{kind}" for part in ("", "reference/")
                 for kind in ("*.safetensors", "pytorch_model*.bin", "adapter_model*.bin"))  # fmt: skip
_SETTINGS = ("log_ratio_reward.json", "adapter_config.json", "generation_config.json")
_TOKENIZER = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model",
              "*.tiktoken", "tekken.json", "chat_template*", "additional_chat_templates/*")  # fmt: skip
_BESIDE = ("reference/*.safetensors", "reference/*.bin")
_PIECE, _FEWEST, _APART = 4096, 64, 1 << 24


def model_fingerprint(path: str) -> str:
    """Return `BEGINNINGS:WEIGHTS:SETTINGS`, three hashes of a model folder; "" for a hub name, and where there are no
    weights.

    The first, all that earlier versions stored, is of its config and of every weight file's size, first and last MiB;
    of a reward model of two policies both count, and its scale. The second is of its config, of every weight file's
    size and of pieces of 4 KiB all over it (one in 16 MiB, 64 at least), the third of the other settings' files and of
    the tokenizer's. Whole weights would take minutes at full size. A manifest is not read: a copy without it is the
    same model.
    """
    kinds = ("*.safetensors", "*.bin", "config.json", "log_ratio_reward.json", *_BESIDE)
    folder = Path(path)
    beginnings = _fingerprint([file for kind in kinds for file in sorted(folder.glob(kind))])
    if not beginnings:
        return ""
    return f"{beginnings}:{_pieces(folder, ('config.json',), _WEIGHTS)}:{_pieces(folder, (*_SETTINGS, *_TOKENIZER))}"


def same_fingerprint(one: str, other: str) -> bool:
    """Say whether two fingerprints are of the same; of one that an earlier version stored as much as it says is
    compared."""
    return all(mine == its for mine, its in zip(one.split(":"), other.split(":"), strict=False))


def same_weights(one: str, other: str) -> bool:
    """Say whether two fingerprints are of the same network, whatever its tokenizer and its other settings are."""
    mine, its = one.split(":"), other.split(":")
    place = min(1, len(mine) - 1, len(its) - 1)
    return mine[place] == its[place]


def input_fingerprints(config: Any) -> dict[str, str]:
    """Return a hash, of sizes, first and last MiB, of every file and model folder that the config (or a node of one)
    names and that is there, by path. What lies in the output directory, and logs, are no inputs."""
    made = config if isinstance(config, dict) else dataclasses.asdict(config)
    found = {}
    for key, path in _strings(made):
        if (
            not path
            or key in ("output", "output_dir")
            or key.endswith("log")
            or _is_below(path, made.get("output_dir"))
        ):
            continue
        try:
            digest = _fingerprint([Path(path)]) if Path(path).is_file() else model_fingerprint(path)
        except (OSError, ValueError):  # no path: too long for a name, or with a zero byte
            continue
        if digest:
            found[path] = digest
    return found


def changed_input(stored: dict[str, str], mine: dict[str, str]) -> str:
    """Return the first path whose hash is another than the stored one, "" where none is. Paths that only one of them
    has pass: what is named where is the config's affair."""
    return next((path for path, digest in mine.items() if not same_fingerprint(stored.get(path, digest), digest)), "")


def _pieces(folder: Path, whole: Iterable[str], sampled: Iterable[str] = ()) -> str:
    digest = hashlib.sha256()
    for kinds, is_whole in ((sampled, False), (whole, True)):
        for file in sorted({file for kind in kinds for file in folder.glob(kind) if file.is_file()}):
            size = file.stat().st_size
            digest.update(f"{file.relative_to(folder)}:{size}:".encode())
            number = max(_FEWEST, size // _APART)
            with file.open("rb", buffering=0) as stream:
                if is_whole or size <= number * _PIECE:
                    digest.update(stream.readall())
                    continue
                for place in range(number):
                    stream.seek(place * (size - _PIECE) // (number - 1))
                    digest.update(stream.read(_PIECE))
    return digest.hexdigest()


def _fingerprint(files: Iterable[Path], block: int = 1 << 20) -> str:
    digest, is_empty = hashlib.sha256(), True
    for file in files:
        is_empty, size = False, file.stat().st_size
        with file.open("rb") as stream:
            digest.update(f"{file.name}:{size}".encode() + stream.read(block))
            stream.seek(max(0, size - block))
            digest.update(stream.read(block))
    return "" if is_empty else digest.hexdigest()


def _strings(value: Any, key: str = "") -> list[tuple[str, str]]:
    if isinstance(value, dict):
        return [row for name, one in value.items() for row in _strings(one, str(name))]
    if isinstance(value, list | tuple):
        return [row for one in value for row in _strings(one, key)]
    return [(key, value)] if isinstance(value, str) else []


def _is_below(path: str, folder: str | None) -> bool:
    return bool(folder) and Path(path).absolute().is_relative_to(Path(str(folder)).absolute())
