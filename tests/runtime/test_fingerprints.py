"""Fingerprints of models: what they see, what they pass over, and those that earlier versions stored."""

import hashlib
import random
import shutil
from pathlib import Path

import pytest

from espalier.runtime.fingerprints import (
    changed_input,
    input_fingerprints,
    model_fingerprint,
    same_fingerprint,
    same_weights,
)

MIB = 1 << 20
SIZE = 5 * MIB


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder: weights of 5 MiB and of 3 bytes, settings, a tokenizer and files that nobody loads."""
    made = tmp_path / "model"
    made.mkdir()
    (made / "model-1.safetensors").write_bytes(random.Random(0).randbytes(SIZE))
    (made / "model-2.safetensors").write_bytes(b"abc")
    for name in ("config.json", "tokenizer.json", "README.md", "manifest.json"):
        (made / name).write_text("{}")
    return made


def before(folder: Path) -> str:
    """The fingerprint that earlier versions stored, written out."""
    digest = hashlib.sha256()
    for name in ("model-1.safetensors", "model-2.safetensors", "config.json"):
        data = (folder / name).read_bytes()
        digest.update(f"{name}:{len(data)}".encode() + data[:MIB] + data[-MIB:])
    return digest.hexdigest()


def overwrite(path: Path, start: int, size: int) -> None:
    with path.open("r+b") as file:
        file.seek(start)
        file.write(random.Random(1).randbytes(size))


@pytest.mark.parametrize("start", range(MIB, 4 * MIB, MIB // 2))
def test_weights_that_were_trained_again_are_seen_wherever_they_stand(start: int, folder: Path) -> None:
    known = model_fingerprint(str(folder))
    overwrite(folder / "model-1.safetensors", start, MIB // 2)
    assert before(folder) == known.partition(":")[0], "beginning and end are as they were"
    assert not same_fingerprint(known, model_fingerprint(str(folder)))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "vocab.txt",
                                  "adapter_config.json", "generation_config.json", "config.json"])  # fmt: skip
def test_settings_and_the_tokenizers_files_are_seen(name: str, folder: Path) -> None:
    known = model_fingerprint(str(folder))
    (folder / name).write_text('{"is": "another"}')
    assert changed_input({str(folder): known}, input_fingerprints({"policy": str(folder)})) == str(folder)


def test_a_copy_is_the_same_model_without_what_nobody_loads(folder: Path, tmp_path: Path) -> None:
    known = model_fingerprint(str(folder))
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "manifest.json").unlink()
    (copy / "README.md").write_text("# A model")
    assert model_fingerprint(str(copy)) == known
    assert model_fingerprint("org/model") == ""


def test_what_an_earlier_version_stored_is_compared_as_far_as_it_goes(folder: Path) -> None:
    stored = {str(folder): before(folder)}
    assert changed_input(stored, input_fingerprints({"policy": str(folder)})) == ""
    (folder / "tokenizer.json").write_text("another")
    overwrite(folder / "model-1.safetensors", 2 * MIB, 1000)
    assert changed_input(stored, input_fingerprints({"policy": str(folder)})) == ""
    overwrite(folder / "model-1.safetensors", 1000, 1000)
    assert changed_input(stored, input_fingerprints({"policy": str(folder)})) == str(folder)


def test_the_same_weights_are_known_with_another_template_or_none(folder: Path) -> None:
    before = model_fingerprint(str(folder))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "generation_config.json").write_text('{"do_sample": true}')
    (folder / "training_args.bin").write_bytes(b"of a trainer")
    after = model_fingerprint(str(folder))
    assert not same_fingerprint(before, after)
    assert same_weights(before, after)
    assert same_weights("a:b:c", "x:b:d")
    assert not same_weights("a:b:c", "a:x:c")
    assert not same_weights("a", "x:b:c")


def test_fingerprints_are_the_same_where_both_say_the_same() -> None:
    assert same_fingerprint("a:b", "a:b")
    assert same_fingerprint("a", "a:b")
    assert same_fingerprint("a:b", "a")
    assert not same_fingerprint("a:b", "a:c")
    assert not same_fingerprint("b", "a:b")
    assert not same_fingerprint("", "a:b")
