"""Bounded requests in flight, results appended as they come, resume by id: never a lost or a doubled row.

The rows of one request are written together; where the disk takes a part of them only, that part is cut off. On
opening a file that exists, a torn last line is cut, and so is a last request whose rows are not all there; what
remains is finished and not asked again.
"""

import asyncio
import contextlib
import os
import signal
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from espalier.data.jsonl import cut_torn_tail, iter_rows, to_line
from espalier.data.records import BadInput
from espalier.sampling.client import (
    BudgetSpent,
    Client,
    NotAnswered,
    Refused,
    Sample,
    SampleRequest,
    SamplingParams,
    ServerGone,
)
from espalier.sampling.stall_watch import StallWatch

MakeRecords = Callable[[SampleRequest, list[Sample]], Sequence[Any]]
OnProgress = Callable[[int, dict[str, float]], None]


class SamplingStopped(RuntimeError):
    """A signal asked the run to stop; it drained and can be resumed."""

    def __init__(self, number: int):
        super().__init__(f"stopped by {signal.Signals(number).name}: run the same command to go on")
        self.exit_code = 128 + number


@dataclass
class Tally:
    """What a run did: requests finished before and now, failed ones (of which `unanswered` were not refused, but used
    up their attempts), generated tokens, seconds of asking."""

    before: int = 0
    done: int = 0
    tokens: int = 0
    failed: list[tuple[str, str]] = field(default_factory=list)
    unanswered: int = 0
    seconds: float = 0.0

    def add(self, part: "Tally") -> None:
        """Add what another run did; `before` stays."""
        self.done += part.done
        self.tokens += part.tokens
        self.failed += part.failed
        self.unanswered += part.unanswered
        self.seconds += part.seconds


def finished_requests(path: Path, requests: Iterable[SampleRequest], num_samples: int) -> set[str]:
    """Return ids of the requests whose rows are all in the file; the file is cut to hold nothing else.

    Raises BadInput on a line that is not ours, an id that stands twice, or a gap in the middle.
    """
    if not path.is_file():
        return set()
    cut_torn_tail(path)
    known = {request.id for request in requests}
    counts: dict[str, int] = {}
    start_of_last = 0
    last = ""
    for (place, row), start in zip(iter_rows(path), _starts_of_rows(path), strict=True):
        request_id, _, index = str(row.get("id", "")).rpartition("/")
        if request_id not in known:
            raise BadInput(f"{place}: id '{row.get('id')}' is not of this run: choose another output")
        is_apart = request_id != last and request_id in counts
        if request_id != last:
            last, start_of_last = request_id, start
        if is_apart or index != str(counts.get(request_id, 0)):
            raise BadInput(f"{place}: id '{row.get('id')}' is out of order or stands twice: correct or remove the file")
        counts[request_id] = counts.get(request_id, 0) + 1
    partial = [request_id for request_id, count in counts.items() if count != num_samples]
    if partial and partial != [last]:
        raise BadInput(
            f"{path}: request '{partial[0]}' has {counts[partial[0]]} of {num_samples} rows: remove the file"
        )
    if partial:
        os.truncate(path, start_of_last)
        del counts[last]
    return set(counts)


def _starts_of_rows(path: Path) -> list[int]:
    """Return the byte every line that is not blank begins at."""
    starts: list[int] = []
    offset = 0
    with path.open("rb") as file:
        for line in file:
            if line.strip():
                starts.append(offset)
            offset += len(line)
    return starts


def count_rows(path: Path) -> int:
    """Return the whole lines of a file, 0 where there is none."""
    if not path.is_file():
        return 0
    with path.open("rb") as file:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))


class _Grading:
    """Makes records beside the event loop, since grading can take a second where an answer needs symbolic work.

    In one thread: more would not grade faster, and would keep the loop waiting for the interpreter's lock. Answers that
    come while it works are handed over together, as the answers to one HTTP request come: a hand-over costs as much as
    grading a plain answer.
    """

    def __init__(self, make_records: MakeRecords):
        self._make_records = make_records
        self._thread = ThreadPoolExecutor(1, "grading")
        self._waiting: list[tuple[SampleRequest, list[Sample], asyncio.Future[Sequence[Any]]]] = []
        self._task: asyncio.Task[None] | None = None

    async def records(self, request: SampleRequest, samples: list[Sample]) -> Sequence[Any]:
        """Return the records of an answer. Raises what making them raises."""
        made: asyncio.Future[Sequence[Any]] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, samples, made))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._work())
        return await made

    async def _work(self) -> None:
        await asyncio.sleep(0)  # what came with the same answer of the server is handed over with it
        while self._waiting:
            batch, self._waiting = self._waiting, []
            answers = [(request, samples) for request, samples, _ in batch]
            outcomes = await asyncio.get_running_loop().run_in_executor(self._thread, self._make, answers)
            for (_, _, made), outcome in zip(batch, outcomes, strict=True):
                if made.done():
                    continue
                if isinstance(outcome, Exception):
                    made.set_exception(outcome)
                else:
                    made.set_result(outcome)

    def _make(self, answers: Sequence[tuple[SampleRequest, list[Sample]]]) -> list[Sequence[Any] | Exception]:
        outcomes: list[Sequence[Any] | Exception] = []
        for request, samples in answers:
            try:
                outcomes.append(self._make_records(request, samples))
            except Exception as error:  # of any kind: whoever waits for these records gets it
                outcomes.append(error)
        return outcomes

    def close(self) -> None:
        """Let go of the thread; what it works on ends."""
        if self._task is not None:
            self._task.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)


class Runner:
    """One sampling run: asks `client` for every request that the file does not hold yet.

    `lane_of` splits the requests into lanes (servers), each with `concurrency` of its own. Where no result comes
    for `stall_seconds`, `is_working` is asked whether the sampler is slow or gone. After a first signal what is in
    flight has `drain_seconds` to end; a second one ends it at once.
    """

    def __init__(
        self,
        client: Client,
        params: SamplingParams,
        make_records: MakeRecords,
        path: Path,
        *,
        concurrency: int,
        stall_seconds: float,
        on_progress: OnProgress,
        check_server: Callable[[], None] = lambda: None,
        lane_of: Callable[[SampleRequest], int] = lambda request: 0,
        is_working: Callable[[], Awaitable[bool]] | None = None,
        drain_seconds: float = 20.0,
    ):
        if concurrency < 1:
            raise BadInput(f"concurrency must be at least 1, got {concurrency}")
        self.client = client
        self.params = params
        self.make_records = make_records
        self.path = path
        self.concurrency = concurrency
        self.stall_seconds = stall_seconds
        self.on_progress = on_progress
        self.check_server = check_server
        self.lane_of = lane_of
        self.is_working = is_working
        self.drain_seconds = drain_seconds
        self.tally = Tally()
        self._stop_signal = 0
        self._opening: asyncio.Future[None] | None = None
        self._stop_at = 0.0
        self._write_error: OSError | None = None
        self._last_sync = 0.0
        self._spent: BudgetSpent | None = None
        self._grading: _Grading | None = None

    async def run(self, requests: Sequence[SampleRequest], finished: set[str]) -> Tally:
        """Ask, write, and return what was done. Raises ServerGone, Stopped, BudgetSpent, OSError (a full
        disk)."""
        waiting = deque(request for request in requests if request.id not in finished)
        self.tally = Tally(before=len(finished))
        loop = asyncio.get_running_loop()
        self._grading = _Grading(self.make_records)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            await self._open()
            began = time.monotonic()
            with self.path.open("ab", buffering=0) as file:  # no buffer that a close could write once more
                try:
                    await self._work(waiting, file)
                finally:
                    self.tally.seconds = time.monotonic() - began
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)
            await self.client.close()
            self._grading.close()
        if self._stop_signal:
            raise SamplingStopped(self._stop_signal)
        if self._spent is not None:
            raise self._spent
        return self.tally

    async def _open(self) -> None:
        """Open the client; a signal ends it. Raises Stopped."""
        self._opening = asyncio.ensure_future(self.client.open())
        try:
            await self._opening
        except asyncio.CancelledError:
            if not self._stop_signal:
                raise
            raise SamplingStopped(self._stop_signal) from None

    def _on_signal(self, number: int) -> None:
        if self._opening is not None:
            self._opening.cancel()
        is_second = bool(self._stop_signal)
        self._stop_signal = self._stop_signal or number
        self._stop_at = time.monotonic() + (0.0 if is_second else self.drain_seconds)

    async def _work(self, waiting: deque[SampleRequest], file: Any) -> None:
        self._last_sync = time.monotonic()
        kept = f"what was written is kept in {self.path}; run the same command to go on"
        watch = StallWatch(self.stall_seconds, self._check, self.is_working, kept)
        lanes: dict[int, deque[SampleRequest]] = {}
        for request in waiting:
            lanes.setdefault(self.lane_of(request), deque()).append(request)
        workers = [
            asyncio.create_task(self._worker(lane, file, watch))
            for lane in lanes.values()
            for _ in range(min(self.concurrency, len(lane)))
        ]
        try:
            await watch.wait_for(workers)
        finally:
            self._sync(file)

    async def _worker(self, waiting: deque[SampleRequest], file: Any, watch: StallWatch) -> None:
        while waiting and not self._stop_signal and self._spent is None:
            request = waiting.popleft()
            try:
                samples = await self.client.sample(request, self.params)
            except BudgetSpent as error:
                self._spent = error  # nothing new leaves; what was paid for is still written
                return
            except Refused as error:
                self.tally.failed.append((request.id, str(error)))
                self.tally.unanswered += isinstance(error, NotAnswered)
            else:
                if len(samples) != self.params.n:
                    raise ServerGone(f"request '{request.id}': {len(samples)} samples came back of {self.params.n}")
                self.tally.tokens += sum(len(sample.token_ids) for sample in samples)
                assert self._grading is not None
                self._write(file, await self._grading.records(request, samples))
                self.tally.done += 1
            watch.saw_result()
            done = self.tally.before + self.tally.done + len(self.tally.failed)
            self.on_progress(done, {"tokens": float(self.tally.tokens)})

    def _write(self, file: Any, records: Sequence[Any]) -> None:
        """Append all rows or none. Raises OSError (with path and size) where the disk does not take them."""
        if self._write_error is not None:
            raise self._write_error  # what that write left may not be continued
        rows = "".join(to_line(record) for record in records).encode("ascii")
        start = file.seek(0, os.SEEK_END)
        written = 0
        try:
            while written < len(rows):
                written += file.write(rows[written:])
        except OSError as error:
            with contextlib.suppress(OSError):  # a tail that stays is cut by the next run
                file.truncate(start)
            self._write_error = OSError(error.errno, f"{error.strerror} ({len(rows)} bytes to write)", str(self.path))
            raise self._write_error from None
        if time.monotonic() - self._last_sync > 1.0:
            self._sync(file)

    def _sync(self, file: Any) -> None:
        try:
            os.fsync(file.fileno())
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from None
        self._last_sync = time.monotonic()

    def _check(self) -> None:
        """Raises where our own server has died, and where draining takes too long."""
        self.check_server()
        if self._stop_signal and time.monotonic() > self._stop_at:
            raise SamplingStopped(self._stop_signal)
