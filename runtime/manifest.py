"""Folders that are complete or absent, and that can prove it: `manifest.json` holds every file's size and SHA-256.

A folder is written under another name, fsynced, renamed: `kill -9` and power cuts leave the old one or the new
one. Bits that flip later, truncated copies and missing files are found by reading the files back against the
manifest; neither torch nor safetensors notices a flipped bit.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from espalier.runtime.distributed import barrier, from_main_rank

MANIFEST = "manifest.json"
_LOADED = (".safetensors", ".bin", ".pt", ".pth", ".index.json", "adapter_config.json", "chat_template.jinja",
           "generation_config.json")  # fmt: skip
PARTIAL, REPLACED = ".partial", ".replaced"


def fsync(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _files(folder: Path) -> list[Path]:
    """Return every file below the folder, the manifest left out, in the order of their names."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST)


def weight_files(model: Path) -> list[str]:
    """Return a model folder's files of weights: one, or as many as a large model was saved in; those of torch where it
    has no others."""
    found = sorted(model.glob("*.safetensors"))
    if not any(file.name.startswith("model") for file in found):  # a head alone, or an adapter
        found += sorted(model.glob("pytorch_model*.bin"))
    return [str(file) for file in found or [model / "model.safetensors"]]


def file_digest(path: Path) -> str:
    """Return SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_manifest(folder: Path) -> None:
    """Read every file back and write down its size and SHA-256."""
    paths = _files(folder)
    with ThreadPoolExecutor() as pool:
        digests = list(pool.map(file_digest, paths))
    rows = {
        str(path.relative_to(folder)): {"size": path.stat().st_size, "sha256": digest}
        for path, digest in zip(paths, digests, strict=True)
    }
    (folder / MANIFEST).write_text(json.dumps({"files": rows}, indent=1) + "\n")


def find_damage(folder: Path, *, is_whole: bool = True) -> str:
    """Return what is wrong with a folder that has a manifest, in a few words; "" where every byte is as it was
    written. Files that the manifest does not name are wrong where it `is_whole`, else those that a loader would read
    in place of what it names."""
    path = folder / MANIFEST
    if not path.is_file():
        return f"it has no {MANIFEST}"
    try:
        rows: dict[str, Any] = json.loads(path.read_text())["files"]
        expected = {name: (int(row["size"]), str(row["sha256"])) for name, row in rows.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"its {MANIFEST} is torn"
    for name, (size, _) in expected.items():
        if not (folder / name).is_file():
            return f"{name} is missing"
        if (folder / name).stat().st_size != size:
            return f"{name} has {(folder / name).stat().st_size} bytes, not {size}"
    strange = [path for path in _files(folder) if str(path.relative_to(folder)) not in expected]
    strange = [path for path in strange if is_whole or (path.parent == folder and path.name.endswith(_LOADED))]
    if strange:
        return f"{strange[0].relative_to(folder)} does not belong to it"
    with ThreadPoolExecutor() as pool:
        try:
            digests = list(pool.map(lambda name: file_digest(folder / name), expected))
        except OSError as error:
            return f"{error.filename} cannot be read ({error.strerror})"
    for (name, (_, digest)), found in zip(expected.items(), digests, strict=True):
        if digest != found:
            return f"{name} has other bytes than were written (SHA-256)"
    return ""


def write_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Call `write(partial)` on every rank; then manifest, fsync and rename on rank 0: complete or absent.

    An older folder of that name is moved aside only once its successor is complete, and then removed. Raises
    OSError where the disk is full, also where safetensors says so in words of its own.
    """
    partial, replaced = (folder.with_name(folder.name + ending) for ending in (PARTIAL, REPLACED))
    from_main_rank(lambda: _make_anew(partial))
    try:
        write(partial)
    except Exception as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None or isinstance(error, OSError):
            raise
        raise OSError(int(number.group(1)), os.strerror(int(number.group(1))), str(partial)) from error
    barrier()
    from_main_rank(lambda: _complete(folder, partial, replaced))


def _make_anew(partial: Path) -> None:
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)


def _complete(folder: Path, partial: Path, replaced: Path) -> None:
    write_manifest(partial)
    for path in [*partial.rglob("*"), partial]:
        fsync(path)
    if folder.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        folder.replace(replaced)
    partial.replace(folder)
    fsync(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def remove_folder(folder: Path) -> None:
    """Remove a folder; killed half-way, what is left no longer has its name."""
    replaced = folder.with_name(folder.name + REPLACED)
    shutil.rmtree(replaced, ignore_errors=True)
    folder.replace(replaced)
    shutil.rmtree(replaced)
