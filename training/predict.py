"""Score a data set with one or many checkpoints: one row an example, resumable by id, on any number of ranks.

    python trainer_base_ds_mul.py -cn exp/dpo/word_arithmetic mode=predict model.path=POLICY examples.path=PAIRS \\
        'predict.checkpoints=[experiments/dpo/model]' output_dir=experiments/scores

`<output_dir>/<name>.jsonl` holds the rows of a checkpoint in the order of the examples (kinds in `data.predictions`),
`<name>.meta.json` their provenance. Until a file is complete its rows stand in `<name>.parts/`, one file a rank: a run
that is stopped goes on from there, with as many ranks as it likes. Every example is scored once by one rank; none is
repeated to fill a batch. Where the objective has a reference, `reference.jsonl` is made first, once for all.

A checkpoint is a model folder, an adapter folder, a run's directory (its model/), or a checkpoint of a run (of this
experiment's model) as the trainer wrote it.
"""

import glob
import json
import logging
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from espalier.data.examples.example_facts import token_rows
from espalier.data.examples.stored_examples import StoredExamples
from espalier.data.jsonl import cut_torn_tail, file_sha256, iter_rows, read_records, to_line, write_json, write_records
from espalier.data.records import BadInput, parse_record
from espalier.models.load import BadModel
from espalier.models.lora import merge_adapter
from espalier.runtime.base_model import base_of_adapter_folder, base_of_run, check_base
from espalier.runtime.distributed import barrier, device, from_main_rank, rank, world_size
from espalier.runtime.entrypoint import BadConfig, build
from espalier.runtime.fingerprints import model_fingerprint
from espalier.runtime.manifest import find_damage
from espalier.runtime.run_dir import changed_keys, name_of, provenance, same_origin, stored_config
from espalier.runtime.schemas import TrainConfig
from espalier.runtime.tracking import Progress
from espalier.training.engine import load_weights
from espalier.training.loop_from_config import load_examples, make_model
from espalier.training.pieces import stored_weights
from espalier.training.scoring import Prediction, Scorer, is_scalar, prediction_kind

log = logging.getLogger("train")

REFERENCE = "reference"
# What of a config the rows depend on, beside weights and examples; the rest may differ between two starts.
_MATTERS = ("precision", "objective", "examples")
# What of `model` and `lora` may differ from a run whose checkpoint is read: no weight and no output depends on it.
_MAY_DIFFER = ("path", "attention", "gradient_checkpointing", "dropout")


@dataclass(frozen=True)
class Checkpoint:
    """A model to score with, and where its rows go."""

    name: str
    path: str
    folder: Path

    @property
    def file(self) -> Path:
        """Its rows."""
        return self.folder / f"{self.name}.jsonl"

    @property
    def meta(self) -> Path:
        """Their provenance."""
        return self.folder / f"{self.name}.meta.json"

    @property
    def parts(self) -> Path:
        """Rows of a run that is not complete."""
        return self.folder / f"{self.name}.parts"

    def fingerprint(self) -> str:
        """Return a hash of its weights."""
        manifest = Path(self.path) / "manifest.json"
        return file_sha256(manifest) if manifest.is_file() else model_fingerprint(self.path)

    def inputs(self, base: str) -> dict[str, str]:
        """Return hashes of what it is made of: itself, and, where it is an adapter or a checkpoint of a run, the model
        at `base`."""
        found = {self.path: self.fingerprint()}
        if is_checkpoint(self.path) or is_adapter(self.path):
            found["base"] = model_fingerprint(base) or base
        return found


def find_checkpoints(wanted: Any, folder: Path, model_path: str) -> list[Checkpoint]:
    """Return the checkpoints in their order. Raises BadInput where a pattern finds none or two have one name."""
    if isinstance(wanted, Mapping):
        named = [(str(name), str(path)) for name, path in wanted.items()]
    else:
        items = [wanted] if isinstance(wanted, str) else wanted or [model_path]
        named = [(name_of(path), path) for item in items for path in _matching(str(item))]
    paths: dict[str, str] = {}
    for name, path in named:
        if not re.fullmatch(r"[A-Za-z0-9_][\w.-]*", name, re.ASCII) or name == REFERENCE:
            raise BadInput(f"predict.checkpoints: '{name}' is no name for a file of rows: choose another")
        if name in paths:
            raise BadInput(f"predict.checkpoints: {paths[name]} and {path} would both be '{name}': give names, "
                           "predict.checkpoints={one: FOLDER, other: FOLDER}")  # fmt: skip
        is_run = (Path(path) / "model" / "config.json").is_file()
        paths[name] = f"{path.rstrip('/')}/model" if is_run else path
    return [Checkpoint(name, path, folder) for name, path in paths.items()]


def _matching(item: str) -> list[str]:
    if not glob.has_magic(item) or Path(item).exists():
        return [item]
    folders = sorted(path for path in glob.glob(item, recursive=True) if Path(path).is_dir())
    if not folders:
        raise BadInput(f"predict.checkpoints: no folder matches {item}: check the pattern, or train first")
    return folders


def is_checkpoint(path: str) -> bool:
    """Say whether a folder is a checkpoint of a run, as the trainer wrote it."""
    return (Path(path) / "state.json").is_file()


def is_adapter(path: str) -> bool:
    """Say whether a folder is an adapter."""
    return (Path(path) / "adapter_config.json").is_file()


def check_as_run(config: TrainConfig, folder: Path) -> Path | None:
    """Return the run that a checkpoint lies in; None where it lies in none. Raises BadConfig where that run built its
    model, or its adapters, otherwise than this config does."""
    run = next((parent.parent for parent in folder.absolute().parents if parent.name == "checkpoints"), None)
    if run is None or not (stored := stored_config(run)):
        return None
    for node in ("model", "lora"):
        one, other = (
            {name: value for name, value in (found or {}).items() if name not in _MAY_DIFFER}
            for found in (stored.get(node), getattr(config, node))
        )
        if different := changed_keys(one, other, knows_defaults=True):
            key, old, new = different[0]
            raise BadConfig(f"{folder}: its run has {node}.{key}={old}, not {new}: give that run's settings of model "
                            "and lora")  # fmt: skip
    return run


def load_checkpoint(config: TrainConfig, path: str) -> Any:
    """Return the model of a checkpoint, in evaluation mode on this rank's device. Raises BadModel, and BadConfig where
    the config builds another model than the checkpoint's run did, or has another base."""
    folder, base = Path(path), str(config.model["path"])
    if is_checkpoint(path):
        if damage := find_damage(folder):
            raise BadModel(f"{folder} is damaged: {damage}: choose another checkpoint")
        run = check_as_run(config, folder)
        model = make_model(config)
        if run is not None and not all(parameter.requires_grad for parameter in model.parameters()):
            check_base(base_of_run(run), base, folder)  # weights that the checkpoint does not hold
        shapes = {name: value.shape for name, value in model.state_dict().items()}
        load_weights(model, stored_weights(folder, shapes), path)
    elif is_adapter(path):
        check_base(base_of_adapter_folder(folder), base, folder)
        model = merge_adapter(folder, lambda: build(config.model))
    else:
        node = {**config.model, "path": path}
        if "num_labels" in node:
            node["num_labels"] = None  # a head that was trained, whatever its size
        model = build(node)
    return model.to(device()).requires_grad_(False).eval()


def batches_by_length(lengths: Mapping[int, int], num_rows: int, batch_tokens: int) -> list[list[int]]:
    """Return places of examples of similar length together, at most `batch_tokens` padded tokens a batch (or one
    example). `lengths`: tokens of the example at each place; `num_rows`: rows of an example."""
    batches: list[list[int]] = []
    for place in sorted(lengths, key=lengths.__getitem__):
        size = lengths[place] * num_rows
        if batches and size * (len(batches[-1]) + 1) <= batch_tokens:
            batches[-1].append(place)
        else:
            batches.append([place])
    return batches


def predict(config: TrainConfig, tokenizer: Any) -> None:
    """Write all files of a run, each once; those that are complete are passed over.

    Raises BadConfig where DeepSpeed is asked for, and where the folder holds a training run.
    """
    if config.deepspeed:
        raise BadConfig("prediction keeps a whole model on every rank: set deepspeed=none")
    folder = Path(config.output_dir)
    if (folder / "config.yaml").is_file():
        raise BadConfig(f"{folder} holds a training run: choose another output_dir for predictions")
    checkpoints = find_checkpoints(config.predict.checkpoints, folder, config.model["path"])
    examples = load_examples(config, config.examples, tokenizer)
    settings: dict[str, Any] = {"pad_id": int(tokenizer.pad_token_id), "precision": config.precision}
    objective = dict(config.objective)
    settings |= {name: objective[name] for name in ("temperature", "beta", "is_length_normalised") if name in objective}
    references: dict[str, Prediction] = {}
    node = objective.get("reference")
    if node:
        first = Checkpoint(REFERENCE, str(node["path"]), folder)
        kind = _write(config, first, examples, lambda: Scorer(build(node).to(device()), **settings))
        references = {row.id: row for row in read_records(kind, first.file)}
    for checkpoint in checkpoints:

        def load(path: str = checkpoint.path) -> Scorer:
            return Scorer(load_checkpoint(config, path), **settings, references=references)

        _write(config, checkpoint, examples, load)


def _write(
    config: TrainConfig, checkpoint: Checkpoint, examples: StoredExamples, load: Callable[[], Scorer]
) -> type[Prediction]:
    """Return the rows of one checkpoint; their kind."""
    inputs = checkpoint.inputs(str(config.model["path"])) | {"examples": examples.fingerprint}
    done = from_main_rank(lambda: _begin(config, checkpoint, examples, inputs))
    if done is None:
        log.info("%s is complete", checkpoint.file)
        return from_main_rank(lambda: _kind_of(checkpoint))
    started = time.monotonic()
    scorer = load()
    kind = prediction_kind(examples[0], is_scalar(scorer.model))
    lengths = examples.facts["length"].tolist()
    left = {place: lengths[place] for place, name in enumerate(examples.column("id")) if name not in done}
    batches = batches_by_length(left, len(token_rows(examples[0])), config.predict.batch_tokens)
    _score(config, checkpoint, scorer, examples, batches[rank() :: world_size()])
    barrier()

    def finish() -> None:
        seconds = time.monotonic() - started
        rows = _collect(checkpoint, kind, examples)
        counts = {"rows": len(rows), "kind": kind.__name__, "resumed": len(done), "ranks": world_size()}
        write_json(checkpoint.meta, provenance(config, inputs, counts, seconds))
        write_records(checkpoint.file, rows)
        shutil.rmtree(checkpoint.parts)
        log.info("%s: %d rows (%.1f s)", checkpoint.file, len(rows), seconds)

    from_main_rank(finish)
    return kind


def _begin(
    config: TrainConfig, checkpoint: Checkpoint, examples: StoredExamples, inputs: dict[str, str]
) -> set[str] | None:
    """Return ids that are scored already; None where the file is complete. Raises BadInput on rows of something
    else."""
    origin = checkpoint.parts / "meta.json"
    stored = checkpoint.meta if checkpoint.file.exists() else origin
    if stored.is_file():
        matters = {*_MATTERS, *(("lora",) if is_checkpoint(checkpoint.path) else ())}
        others = [one.name for one in fields(config) if one.name not in matters]
        difference = same_origin(json.loads(stored.read_text()), config, inputs, ignore=others)
        if difference:
            raise BadInput(f"{checkpoint.file} was made otherwise ({difference}): choose another output_dir, or remove "
                           f"{stored.parent if stored == origin else checkpoint.file}")  # fmt: skip
    if checkpoint.file.exists():
        return None
    if not origin.is_file():
        write_json(origin, provenance(config, inputs, {}, 0.0))
    known = set(examples.column("id"))
    done: set[str] = set()
    for path in sorted(checkpoint.parts.glob("rank-*.jsonl")):
        cut_torn_tail(path)
        for place, row in iter_rows(path):
            if row.get("id") not in known or row["id"] in done:
                raise BadInput(f"{place}: id '{row.get('id')}' is not of these examples, or stands twice: remove "
                               f"{checkpoint.parts}")  # fmt: skip
            done.add(row["id"])
    if done:
        log.info("%s: going on after %d of %d rows", checkpoint.file, len(done), len(known))
    return done


def _score(
    config: TrainConfig,
    checkpoint: Checkpoint,
    scorer: Scorer,
    examples: StoredExamples,
    batches: Sequence[Sequence[int]],
) -> None:
    """Append this rank's rows to its own file, batch by batch."""
    path = checkpoint.parts / f"rank-{rank()}.jsonl"
    total, done, tokens = sum(map(len, batches)), 0, 0
    started = time.monotonic()
    progress = Progress(checkpoint.name, total, "row", 0, config.tracking.line_every_seconds)
    with progress, path.open("a") as file:
        for places in batches:
            batch = examples.take(places)
            for row in scorer.score(batch):
                file.write(to_line(row))
            file.flush()
            done += len(batch)
            tokens += sum(len(row) for example in batch for row in token_rows(example))
            progress.update(done, tokens_per_second=tokens / (time.monotonic() - started))


def _collect(checkpoint: Checkpoint, kind: type[Prediction], examples: StoredExamples) -> list[Prediction]:
    """Return the rows of all parts in the order of the examples, each there once."""
    rows = dict(_rows_of_parts(checkpoint, kind))
    names = list(examples.column("id"))
    missing = [name for name in names if name not in rows]
    if missing or len(rows) != len(examples):
        raise BadInput(f"{checkpoint.parts}: {len(missing)} of {len(examples)} rows are missing: run the command again")
    return [rows[name] for name in names]


def _rows_of_parts(checkpoint: Checkpoint, kind: type[Prediction]) -> Iterator[tuple[str, Prediction]]:
    seen: set[str] = set()
    for path in sorted(checkpoint.parts.glob("rank-*.jsonl")):
        for place, row in iter_rows(path):
            record = parse_record(kind, row, place)
            if record.id in seen:
                raise BadInput(f"{place}: id '{record.id}' was scored twice: remove {checkpoint.parts}")
            seen.add(record.id)
            yield record.id, record


def _kind_of(checkpoint: Checkpoint) -> type[Prediction]:
    """Return the kind of a complete file's rows, by its provenance."""
    name = json.loads(checkpoint.meta.read_text()).get("counts", {}).get("kind")
    for kind in Prediction.__args__:  # type: ignore[attr-defined]
        if kind.__name__ == name:
            return kind  # type: ignore[no-any-return]
    raise BadModel(f"{checkpoint.meta}: says no kind of rows: remove {checkpoint.file}")
