"""One sampling job from a config, the same for every caller: requests, server, runner, provenance.

`X.meta.json` is written when the job starts (`is_complete` false) and again when it ends, so that a resume
with other parameters is refused and a finished file costs nothing, not even a server. Finished is also a file of which
at most `max_failed_share` of the requests failed: those are listed beside it (`data.failed_rows`) and not asked again,
so that what later stages made of it stays true. A run with a smaller share asks them again.

What that file holds, and what it counts over the parts of a job that was cut, is `sampling.job_record`'s.
"""

import asyncio
import dataclasses
import logging
import math
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from espalier.data.failed_rows import failed_path, write_failed
from espalier.data.jsonl import write_json
from espalier.data.records import BadInput
from espalier.data.token_text import PROBE_TEXT
from espalier.runtime.entrypoint import build
from espalier.runtime.fingerprints import model_fingerprint
from espalier.runtime.process_lifetime import exclusive
from espalier.runtime.run_dir import provenance
from espalier.runtime.schemas import SampleConfig
from espalier.runtime.tracking import Progress
from espalier.sampling.child_process import CannotStart
from espalier.sampling.client import Client, SampleRequest, SamplingParams, ServerGone, ShowsLife
from espalier.sampling.engine_arguments import settled_dtype
from espalier.sampling.engine_pool import EnginePool
from espalier.sampling.first_answers import PROBLEMS, FirstAnswers, pilot_of
from espalier.sampling.input_checks import check_origin, check_served, check_started, check_unique
from espalier.sampling.job_record import (
    MEASURED,
    asked_inputs,
    count_output,
    is_job_finished,
    read_stored,
    stored_record,
    tokens_before_this_part,
    with_part,
    within_limit,
)
from espalier.sampling.offline_client import OfflineClient
from espalier.sampling.requests import CompletionRequests, TrajectoryRequests
from espalier.sampling.rounds import Rounds, RoundSource, run_rounds
from espalier.sampling.runner import Runner, Tally, count_rows, finished_requests
from espalier.sampling.searches import Searches
from espalier.sampling.stop_tokens import with_stop_tokens
from espalier.sampling.vllm_client import VLLMClient

log = logging.getLogger("sample")

# Set by `python -m espalier.sampling.server`: a server that runs already.
SERVER_VARIABLE = "ESPALIER_SERVER"
SERVED_VARIABLE = "ESPALIER_SERVER_MODEL"  # what a script's server was started for


def run_job(config: SampleConfig, load_tokenizer: Callable[[str], Any], check_model: Callable[[str], None]) -> int:
    """Sample what `config.output` does not hold yet; the exit code: 1 if more than `max_failed_share` of the requests
    failed, which the next run asks again.

    Raises BadInput, CannotStart and ServerGone (with the command to go on), Stopped, OSError (a full disk).
    """
    if not 0 <= config.max_failed_share < 1:
        raise BadInput(f"max_failed_share must be in [0, 1), got {config.max_failed_share:g}")
    if config.pilot < 0:
        raise BadInput(f"pilot must be at least 0 problems, got {config.pilot}")
    with exclusive(Path(config.output)):
        try:
            return _run_job(config, load_tokenizer, check_model)
        except (CannotStart, ServerGone) as error:
            rows = count_rows(Path(config.output))
            raise type(error)(f"{error}\n{config.output} holds {rows} rows; to go on:\n  {shlex.join(sys.orig_argv)}"
                              ) from None  # fmt: skip


def _run_job(config: SampleConfig, load_tokenizer: Callable[[str], Any], check_model: Callable[[str], None]) -> int:
    started = time.monotonic()
    output = Path(config.output)
    meta_path = output.with_suffix(".meta.json")
    task, source = build(config.task), build(config.requests)
    params: SamplingParams = build(config.params)
    is_finished = is_job_finished(read_stored(meta_path), config.max_failed_share)
    inputs = asked_inputs(config, source, task, is_finished) | {config.policy: model_fingerprint(config.policy)}
    stored = stored_record(output, meta_path, config, inputs)
    if is_job_finished(stored, config.max_failed_share):
        failed = stored["counts"].get("failed", 0)
        listed = f", {failed} requests failed: see {failed_path(output)}" if failed else ""
        log.info("%s is complete: %s rows%s", output, stored["counts"]["rows"], listed)
        return 0
    server = config.server if SERVER_VARIABLE in os.environ else settled_dtype(config.server)
    config = dataclasses.replace(config, server=server, client=settled_dtype(config.client))
    tokenizer = load_tokenizer(config.policy)
    params = with_stop_tokens(params, tokenizer)
    requests = _requests(config, source, task, tokenizer, inputs[config.policy])
    rounds = Rounds(source, output, params.n) if isinstance(source, RoundSource) else None
    if rounds is not None:
        requests = rounds.begin(requests)
    finished = finished_requests(output, requests, params.n)
    searches = _searches(config, source, task, tokenizer, params, finished)
    if rounds is not None:
        requests = rounds.go_on(requests, finished)
    asked = pilot_of(requests, config.pilot, source) if config.pilot else requests
    done = finished & {request.id for request in asked}
    first = _first_answers(config, source, task, asked, len(requests), done, searches)
    output.parent.mkdir(parents=True, exist_ok=True)
    meta = provenance(config, inputs, {}, 0.0) | {name: stored.get(name, 0) for name in MEASURED}
    write_json(meta_path, {**meta, "is_complete": False})
    tokens_before = max(tokens_before_this_part(output, meta), searches.tokens_before if searches else 0)
    tally = Tally(before=len(done))
    if len(done) < len(asked):
        if finished:
            log.info("%s: going on after %d of %d requests", output, len(finished), len(requests))

        def make_records(request: SampleRequest, samples: Any) -> Any:
            records = source.records(task, tokenizer, request, samples)
            if first is not None:
                first.see(records)
            return records

        def on_cut(part: Tally) -> None:
            with suppress(OSError):  # a full disk has been seen already
                spent = with_part(meta, part, time.monotonic() - started)
                write_json(meta_path, {**spent, "is_complete": False})

        tally, engine = _sample(
            config, params, make_records, asked, done, tokenizer, check_model, rounds, searches, on_cut
        )
        meta |= {"engine": engine} if engine else {}
    if first is not None:
        first.report()
    meta = with_part(meta, tally, time.monotonic() - started)
    tally.before += len(finished) - len(done)
    left = len(requests) - len(asked) - (len(finished) - len(done))
    return _finish(config, output, tally, tokens_before, meta, time.monotonic() - started, left)


def _requests(config: SampleConfig, source: Any, task: Any, tokenizer: Any, fingerprint: str) -> list[SampleRequest]:
    """Return all requests. Raises BadInput where states are of another policy or tokenizer, or ids stand twice."""
    if isinstance(source, CompletionRequests):
        check_origin(source.states, config.policy, fingerprint, source.is_of_any_policy)
    requests: list[SampleRequest] = source.load(task, tokenizer)
    if isinstance(source, CompletionRequests):
        source.check_tokens(tokenizer)
    check_unique(requests)
    return requests


def _first_answers(
    config: SampleConfig,
    source: Any,
    task: Any,
    asked: list[SampleRequest],
    num_problems: int,
    done: set[str],
    searches: Searches | None,
) -> FirstAnswers | None:
    """Return what looks at a pilot's problems, or at the first ones of a run that has few; None for other requests."""
    if not isinstance(source, TrajectoryRequests) or not (config.pilot or len(done) < PROBLEMS):
        return None
    first = FirstAnswers(task, asked if config.pilot else asked[:PROBLEMS], num_problems, searches)
    first.see_file(Path(config.output), done)  # of a pilot that was cut, or of a run before it
    return first


def _searches(
    config: SampleConfig, source: Any, task: Any, tokenizer: Any, params: SamplingParams, finished: set[str]
) -> Searches | None:
    """Return what searches for solutions instead of sampling them, None where nothing does; trees of problems that are
    not finished are taken off. Raises BadInput where other things than one solution per problem are asked for."""
    if "_target_" not in (config.search or {}):
        return None
    if not isinstance(source, TrajectoryRequests):
        raise BadInput("a search finds solutions of problems: set requests=trajectories, or search=none")
    searches: Searches = build(config.search)
    searches.prepare(task, tokenizer, source.problems, params, Path(config.output), finished)
    return searches


@contextmanager
def open_client(
    config: SampleConfig, tokenizer: Any, check_model: Callable[[str], None]
) -> Iterator[tuple[Client, Callable[[], None]]]:
    """Give (who is asked, what raises ServerGone where its server has died); a server of the config's own runs
    meanwhile. Raises BadInput, CannotStart."""
    with ExitStack() as stack:
        client_arguments: dict[str, Any] = {}
        check_server: Callable[[], None] = lambda: None  # noqa: E731
        if SERVER_VARIABLE in os.environ and config.client.get("base_url", "") is None:
            check_served(os.environ.get(SERVED_VARIABLE, ""), config.policy)
            client_arguments["base_url"] = os.environ[SERVER_VARIABLE]
        elif "_target_" in (config.server or {}):  # `server=none` composes to a node without a component
            if "base_url" not in config.client:
                raise BadInput("this client asks no server: set server=none")
            check_model(config.server["model"])
            check_started(config.server["model"], config.policy, "server.model")
            log.info("starting a vLLM server for %s", config.server["model"])
            server = stack.enter_context(build(config.server, seed=config.seed))
            log.info("the server answers at %s", server.base_url)
            client_arguments["base_url"] = server.base_url
            check_server = server.check
        client: Client = build(config.client, seed=config.seed, **client_arguments)
        if isinstance(client, EnginePool | OfflineClient):
            check_started(client.model, config.policy, "client.model")
        if isinstance(client, EnginePool):
            check_model(client.model)
            client.log = client.log or f"{config.output}.engine.log"
        if isinstance(client, VLLMClient):
            client.expect_policy(config.policy)
            client.expect_tokens(PROBE_TEXT, list(tokenizer(PROBE_TEXT, add_special_tokens=False).input_ids))
        yield client, check_server


def _sample(
    config: SampleConfig,
    params: SamplingParams,
    make_records: Callable[[SampleRequest, Any], Any],
    requests: list[SampleRequest],
    finished: set[str],
    tokenizer: Any,
    check_model: Callable[[str], None],
    rounds: Rounds | None,
    searches: Searches | None,
    on_cut: Callable[[Tally], None],
) -> tuple[Tally, dict[str, int]]:
    """Start the server if there is one to start, then run, in rounds where the source has several; what was done, and
    what the engines counted while it was. `on_cut` gets what was done before anything is raised."""
    with ExitStack() as stack:
        client, check_server = stack.enter_context(open_client(config, tokenizer, check_model))
        progress = stack.enter_context(Progress("sample", len(requests) * params.n, "row", len(finished) * params.n,
                                                config.tracking.line_every_seconds))  # fmt: skip
        sampler = client if searches is None else searches.by(client)
        runner = Runner(
            sampler,
            params,
            make_records,
            Path(config.output),
            concurrency=config.engine.concurrency,
            stall_seconds=config.engine.stall_seconds,
            on_progress=_live_line(progress, params.n, client),
            check_server=check_server,
        )
        if isinstance(sampler, ShowsLife):
            runner.is_working = sampler.is_working
        if isinstance(client, VLLMClient | EnginePool):
            runner.lane_of = client.lane_of
        try:
            if rounds is None:
                tally = asyncio.run(runner.run(requests, finished))
            else:
                on_round = lambda total: progress.extend(total * params.n)  # noqa: E731
                tally = asyncio.run(run_rounds(runner, rounds, requests, finished, on_round))
        except BaseException:
            on_cut(_spent(runner.tally, searches))
            raise
        finally:
            if runner.tally.failed:
                write_failed(Path(config.output), runner.tally.failed)
        return _spent(tally, searches), _engine_counts(client) | (searches.counted() if searches else {})


def _spent(tally: Tally, searches: Searches | None) -> Tally:
    """Return what was done, with all tokens that were generated for it."""
    return dataclasses.replace(tally, tokens=searches.num_tokens) if searches else tally


def _live_line(progress: Progress, num_samples: int, client: Client) -> Callable[[int, dict[str, float]], None]:
    """Return rows done, generated tokens per second and the prefix cache's hit rate; the line adds rate and time
    left."""
    began = time.monotonic()

    def on_progress(done: int, fields: dict[str, float]) -> None:
        shown = {"tokens_per_second": fields["tokens"] / max(time.monotonic() - began, 1e-9)}
        hit_rate = getattr(client, "cache_hit_rate", None)
        if hit_rate is not None:
            shown["cache_hits"] = round(hit_rate, 3)
        progress.update(done * num_samples, **shown)

    return on_progress


def _engine_counts(client: Client) -> dict[str, int]:
    """Return what the engines counted during the run, {} where they do not say; requests with less room than asked."""
    num_shortened = getattr(client, "num_shortened", 0)
    if num_shortened:
        log.warning("%d requests had less room in the model's window than params.max_tokens", num_shortened)
    counted = getattr(client, "counted", None)
    return dataclasses.asdict(counted) if counted is not None else {}


def _finish(
    config: SampleConfig,
    output: Path,
    tally: Tally,
    tokens_before: int,
    meta: dict[str, Any],
    seconds: float,
    left: int,
) -> int:
    """Write what the whole output holds and the exit code; `left` requests are none of the pilot's."""
    counts = count_output(output) | {
        "requests": tally.before + tally.done,
        "failed": len(tally.failed),
        "unanswered": tally.unanswered,
        "generated_tokens": tokens_before + tally.tokens,
    }
    failed = write_failed(output, tally.failed)
    total = tally.before + tally.done + len(tally.failed)
    is_done = within_limit(len(tally.failed), total, config.max_failed_share)
    write_json(output.with_suffix(".meta.json"), {**meta, "counts": counts, "is_complete": is_done and not left})
    right, unread = 100 * counts["correct"] / max(counts["rows"], 1), 100 * counts["unparseable"]
    log.info("%s: %d rows, %.1f %% right, %.1f %% without an answer that can be read, %d tokens, %.1f s",
             output, counts["rows"], right, unread, tally.tokens, seconds)  # fmt: skip
    if left:
        log.info("the pilot is over: the same command without pilot asks the %d other problems", left)
    if not tally.failed:
        return 0
    message = f"{len(tally.failed)} of {total} requests were refused: see {failed}"
    if tally.unanswered:
        message += f" ({tally.unanswered} of them used up their attempts without an answer: what is left favours " \
                   "what is answered soon)"  # fmt: skip
    if is_done and left:
        log.warning("%s; the run without pilot asks them again", message)
        return 0
    if is_done:
        log.warning("%s; the run is finished without them (max_failed_share is %g)", message, config.max_failed_share)
        return 0
    share = math.ceil(100 * len(tally.failed) / total) / 100
    without = f", max_failed_share={share:g} finishes without them" if share < 1 else ""
    log.error("%s; the next run asks them again%s", message, without)
    return 1
