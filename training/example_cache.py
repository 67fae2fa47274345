"""Examples are tokenised once: one rank writes them, every rank maps what was written into memory, at this start and at
every later one.

A folder in `$HF_DATASETS_CACHE/espalier` (~/.cache/huggingface/datasets/espalier) is named by everything that the
tokens depend on: the bytes of the files that `examples` names, its settings, the tokenizer with its chat template, and
the code of `data`. Where one of them changes the name does, so an old folder is never read. It is complete or absent
(`runtime.manifest`), and may be removed at any time between runs. What was said when the examples were made is said
again whenever they are read.
"""

import hashlib
import json
import logging
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

import espalier.data
from espalier.data.examples.stored_examples import StoredExamples, open_examples, read_about, write_examples
from espalier.data.jsonl import file_sha256
from espalier.data.left_out import LeftOut, count_again, count_left_out
from espalier.data.records import BadInput
from espalier.runtime.distributed import from_main_rank
from espalier.runtime.entrypoint import build
from espalier.runtime.manifest import fsync
from espalier.runtime.process_lifetime import exclusive
from espalier.runtime.run_dir import versions
from espalier.training.guards import without_unread

log = logging.getLogger("train")
TRAINING, EVALUATION = "examples", "eval_examples"
_WAIT_SECONDS = 3600.0  # for another run that tokenises the same file
_TOKENIZER = ("config.json", "tokenizer*", "chat_template*", "special_tokens_map.json", "*.model", "vocab*", "merges*")


def stored_examples(node: Any, tokenizer: Any, role: str = TRAINING) -> StoredExamples:
    """Return the examples of a config node (conf/examples/), made where they are not in the cache; on every rank.

    Examples of which the loss reads nothing are left out. `role`: the node's place in the config; what is said of
    others than those to train on begins with it. Raises BadInput where the node's files are bad, where another node's
    file of the same name is another one, and where the cache cannot be written.
    """
    settings = _plain(node)
    opening = "" if role == TRAINING else f"{role}: "
    try:
        name = from_main_rank(lambda: _make(settings, tokenizer, opening))
        folder = cache_folder() / name
        about = read_about(folder)
        if about is None:  # a node with a disk of its own
            if _make(settings, tokenizer, opening) != name:
                raise BadInput(f"{_paths(settings)[0]} is another file here than on rank 0: copy it to every node "
                               "again")  # fmt: skip
            about = read_about(folder) or {}
    except BadInput as error:
        if not opening:
            raise
        raise BadInput(f"{opening}{error}: name others that are no training data, or set {role}=null "
                       "evaluation.every=0") from None  # fmt: skip
    _say_again(about, dict(zip(about["paths"], _names(settings, tokenizer), strict=True)), opening)
    return open_examples(folder, about)


def cache_folder() -> Path:
    """Return the folder of all stored examples, in that of the `datasets` library."""
    import datasets

    return Path(datasets.config.HF_DATASETS_CACHE) / "espalier"


def _plain(node: Any) -> dict[str, Any]:
    plain = OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
    return dict(plain)  # type: ignore[arg-type]


def files_read(nodes: Sequence[Any], model: str) -> list[str]:
    """Return the files that the examples of config nodes are made of, by the model folder's tokenizer; the model's
    config among them."""
    paths = [path for node in nodes if node for path in _paths(_plain(node))]
    own = [str(path) for name in _TOKENIZER for path in sorted(Path(model).glob(name)) if path.is_file()]
    return list(dict.fromkeys([*paths, *own]))


def _paths(settings: Mapping[str, Any]) -> list[str]:
    """Return the files that a node names, at whatever depth."""
    nested = [path for value in settings.values() if isinstance(value, Mapping) for path in _paths(value)]
    return [*nested, *([str(settings["path"])] if settings.get("path") else [])]


def _names(settings: Mapping[str, Any], tokenizer: Any) -> list[str]:
    """Return what lines call the files and the model by."""
    return [*_paths(settings), str(tokenizer.name_or_path)]


def _nameless(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings without the names of files, whose bytes count."""
    return {key: _nameless(value) if isinstance(value, Mapping) else value
            for key, value in settings.items() if key != "path"}  # fmt: skip


def _make(settings: dict[str, Any], tokenizer: Any, opening: str) -> str:
    """Write the folder where it is not there; its name."""
    missing = [path for path in _paths(settings) if not Path(path).is_file()]
    if missing:
        build(settings).load(tokenizer)  # says what is wrong with it
    name = examples_key(settings, tokenizer)
    folder = cache_folder() / name
    if read_about(folder) is not None:
        return name
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with exclusive(folder, _WAIT_SECONDS):
            if read_about(folder) is None:
                _write(folder, settings, tokenizer, opening)
    except (PermissionError, NotADirectoryError) as error:
        raise BadInput(f"{error.filename}: the tokenised examples cannot be written there: set HF_DATASETS_CACHE to a "
                       "folder of yours") from None  # fmt: skip
    return name


def _write(folder: Path, settings: dict[str, Any], tokenizer: Any, opening: str) -> None:
    """Make the examples and store them, under another name until they are whole."""
    path = str(settings.get("path", "examples"))
    with _noted(opening) as said, count_left_out() as left_out:
        examples: list[Any] = without_unread(build(settings).load(tokenizer), path)
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)
    try:
        partial.mkdir()
        names = _names(settings, tokenizer)
        write_examples(partial, examples, paths=names, said=said, left_out=[asdict(row) for row in left_out])
        for made in [*partial.iterdir(), partial]:
            fsync(made)
        partial.replace(folder)
        log.info("%s: %d examples are kept for later starts in %s", path, len(examples), folder)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        error.filename = error.filename or str(partial)  # a full disk, said without its place
        raise


@contextmanager
def _noted(opening: str) -> Iterator[list[tuple[int, str]]]:
    """Give the (level, line) of all that `data` and the guards say while the block runs; it is shown, each line behind
    `opening`, only where the block fails."""
    said: list[tuple[int, str]] = []
    logger = logging.getLogger("espalier.data")
    handler = logging.Handler()
    handler.emit = lambda record: said.append((record.levelno, record.getMessage()))  # type: ignore[method-assign]
    propagates, level = logger.propagate, logger.level
    logger.addHandler(handler)
    logger.propagate = False
    logger.setLevel(logging.INFO)
    try:
        yield said
    except BaseException:
        for number, line in said:  # they may say why
            log.log(number, "%s%s", opening, line)
        raise
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagates
        logger.setLevel(level)


def _say_again(about: Mapping[str, Any], names: Mapping[str, str], opening: str) -> None:
    """Say and count what was said when the examples were made, each line behind `opening`, with the names that their
    files and the model have now (`names`: by those of then)."""
    longest_first = sorted((name for name in names if name), key=len, reverse=True)
    whole = re.compile(rf"(?<![\w./-])(?:{'|'.join(map(re.escape, longest_first))})(?![\w/-])")

    def now(text: str) -> str:
        return whole.sub(lambda found: names[found[0]], text) if longest_first else text

    for level, line in about["said"]:
        log.log(level, "%s%s", opening, now(line))
    count_again(LeftOut(**{**row, "path": now(row["path"])}) for row in about["left_out"])


def examples_key(settings: Mapping[str, Any], tokenizer: Any) -> str:
    """Return a hash of all that the examples depend on."""
    parts = {
        "files": [file_sha256(path) for path in _paths(settings)],
        "settings": _nameless(settings),
        "tokenizer": _tokenizer_parts(tokenizer),
        "code": _code_digest(),
        "versions": {name: version for name, version in versions().items() if name in ("transformers", "tokenizers")},
    }
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _tokenizer_parts(tokenizer: Any) -> list[Any]:
    """Return what a tokenizer makes tokens by: its own description, or vocabulary and settings where it has none."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        own = json.loads(backend.to_str())
        own.pop("padding", None)  # of the last call, not of the tokenizer
        own.pop("truncation", None)
    else:
        own = sorted(tokenizer.get_vocab().items())
    own_file, folder = str(getattr(tokenizer, "vocab_file", None) or ""), str(tokenizer.name_or_path)
    files = [Path(own_file)] if own_file else []
    if backend is None:  # merges are in no vocabulary
        files += [Path(folder, name) for name in tokenizer.vocab_files_names.values()]
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    settings = {key: value for key, value in tokenizer.init_kwargs.items()
                if isinstance(value, bool) and "local" not in key}  # fmt: skip
    pieces = [file_sha256(file) for file in files if file.is_file()]
    return [type(tokenizer).__name__, own, pieces, special, settings, str(tokenizer.chat_template)]


def _code_digest() -> str:
    """Return a hash of the sources of `data`, which make the examples."""
    digest = hashlib.sha256()
    for folder in map(Path, espalier.data.__path__):
        for path in sorted(folder.rglob("*.py")):
            digest.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return digest.hexdigest()
