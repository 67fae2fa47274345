"""Scores kept as they come: a run that was stopped asks for what is missing, on as many ranks as it likes.

Until the output is complete its scores stand in `<output>.parts/`: a file for every start, model and rank, each in the
order of its rows' numbers, and `origin.json`, which says what is scored by what. A row is what is scored whole: a
solution, or a batch of responses. Nothing but a row of each file is in memory.
"""

import dataclasses
import heapq
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from espalier.data.jsonl import cut_torn_tail, iter_rows, to_line, write_json
from espalier.data.records import BadInput, parse_record
from espalier.pipeline.stage import StageContext
from espalier.runtime.distributed import from_main_rank, rank, world_size
from espalier.runtime.fingerprints import same_fingerprint

log = logging.getLogger("stage")
T = TypeVar("T")


class Kept(Protocol):
    """What is kept of a row: a frozen dataclass."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    @property
    def row(self) -> int:
        """Its number, from 0."""

    @property
    def num_scored(self) -> int:
        """How many solutions or responses it is."""


K = TypeVar("K", bound=Kept)


def scored_by(engines: Any) -> dict[str, str]:
    """Return what computes scores, and in what precision all ranks, or the engines, do: one file has scores of one.
    Raises BadInput where ranks would differ, and where several of them would ask engines."""
    if engines is not None:
        if world_size() > 1:
            raise BadInput("engines are asked by one process: leave the launcher of ranks out, or client")
        return {"by": "engines", "precision": str(getattr(engines, "dtype", ""))}
    from espalier.models.precision import AUTO, is_bf16
    from espalier.runtime.distributed import device, gather_over_ranks

    found = ["bf16" if half else "fp32" for half in gather_over_ranks(is_bf16(AUTO, device().type))]
    if len(set(found)) > 1:
        raise BadInput("some ranks would score in bf16 and others in fp32, as their machines do fast: start them "
                       "on machines of one kind")  # fmt: skip
    log.info("scores are computed in %s", found[0])
    return {"by": "transformers", "precision": found[0]}


class ScoreParts(Generic[K]):
    """The rows of an output that are there already, each a `kind`. `origin` says what they are made of. Raises BadInput
    where the folder holds rows of another one, with the first thing that differs. Every rank makes one."""

    def __init__(self, kind: type[K], output: Path, origin: Mapping[str, Any]):
        self._kind = kind
        self.folder = output.with_name(output.name + ".parts")
        self.start: int = from_main_rank(lambda: self._begin(dict(origin)))

    def _begin(self, origin: dict[str, Any]) -> int:
        """Compare what is there, cut torn lines; the number of this start."""
        stored = self.folder / "origin.json"
        if self._files() and stored.is_file():
            _check_same(self.folder, json.loads(stored.read_text()), origin)
        else:
            for path in self._files():  # of nobody knows what
                path.unlink()
            write_json(stored, origin)
        for path in self._files():
            cut_torn_tail(path)
        return 1 + max(map(_start_of, self._files()), default=-1)

    def _files(self) -> list[Path]:
        return sorted(self.folder.glob("scores-*.jsonl"))

    def rows(self, of_starts_before: bool = False) -> Iterator[K]:
        """Return all rows, or those of the starts before this one, in the order of their numbers. Raises BadInput on
        one that stands twice."""
        last = -1
        files = [path for path in self._files() if not of_starts_before or _start_of(path) < self.start]
        for kept in heapq.merge(*map(self._read, files), key=lambda kept: kept.row):
            if kept.row == last:
                raise BadInput(f"{self.folder} holds the scores of row {kept.row} twice: remove it")
            last = kept.row
            yield kept

    def add(self, model: int, rows: Sequence[K]) -> None:
        """Append rows that follow those added before, by the model of that number. Raises OSError where the disk does
        not take them."""
        path = self.folder / f"scores-{self.start}-{model}-{rank()}.jsonl"
        with path.open("a") as file:
            file.write("".join(to_line(dataclasses.asdict(row)) for row in rows))

    def _read(self, path: Path) -> Iterator[K]:
        return (parse_record(self._kind, row, place) for place, row in iter_rows(path, leaves_torn=True))

    def missing(self, rows: Iterable[tuple[int, T]]) -> Iterator[tuple[int, T]]:
        """Yield those of the numbered rows, which come in order, that no start before this one has scored."""
        done = (kept.row for kept in self.rows(of_starts_before=True))
        next_done = next(done, None)
        for number, row in rows:
            if number == next_done:
                next_done = next(done, None)
            else:
                yield number, row

    def num_scored(self) -> int:
        """Return how many solutions or responses are kept."""
        return sum(kept.num_scored for kept in self.rows())

    @contextmanager
    def progress(self, context: StageContext, total: int, unit: str) -> Iterator[Callable[[int], None]]:
        """Show how many of `total` are scored; the callable is to be given how many more this rank has scored. A run
        that ends early says what is kept."""
        num_done = self.num_scored()
        if num_done:
            log.info("%s: going on after %d of %d %ss", context.output, num_done, total, unit)

        def advance(number: int) -> None:
            nonlocal num_done
            num_done += number * world_size()
            progress.update(min(num_done, total))

        try:
            with context.progress("score", total, unit, num_done) as progress:
                yield advance
        except BaseException:
            if kept := self.num_scored():
                log.warning("%d of %d %ss are scored and kept in %s: run the same command to go on", kept, total, unit,
                            self.folder)  # fmt: skip
            raise


def _start_of(path: Path) -> int:
    return int(path.stem.split("-")[1])


def _check_same(folder: Path, stored: dict[str, Any], origin: dict[str, Any]) -> None:
    for name in dict.fromkeys([*stored, *origin]):
        before, now = stored.get(name), origin.get(name)
        if before == now or (name == "models" and _same_models(before, now)):
            continue
        if name == "commits" and any(before or ()) and any(now or ()):
            raise BadInput(f"{folder} holds scores by commit {before} of the model, which is at {now} now: set "
                           "stage.revision to the first to go on, or remove the folder")  # fmt: skip
        if name == "precision":
            raise BadInput(f"{folder} holds scores in {before or 'a precision nobody wrote down'}, and this machine "
                           f"scores in {now}: go on where it began, or remove the folder")  # fmt: skip
        raise BadInput(f"{folder} holds scores of another input or of other models ({name} differs): remove it")


def _same_models(before: Sequence[str] | None, now: Sequence[str] | None) -> bool:
    if not before or not now:
        return False
    return len(before) == len(now) and all(map(same_fingerprint, before, now))


def model_on_ranks(path: str, revision: str = "") -> str:
    """Return `local_model` on every rank: of a hub name all of them have the commit that the first one found."""
    from espalier.models.hub_snapshot import commit_of, local_model

    folder = from_main_rank(partial(local_model, path, revision))
    commit = commit_of(folder)
    return local_model(path, commit) if commit and folder != path else folder
