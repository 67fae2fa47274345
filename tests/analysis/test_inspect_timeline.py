"""The page of a run's timeline: what it reads, the numbers on it, runs without a part of them, and a real browser."""

import html
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from espalier.analysis.timeline import InspectTimeline
from espalier.analysis.timeline_charts import columns_of, means
from espalier.analysis.timeline_run import engine_sums, fates_of, picture_of, read_timeline_run, without_breaks
from espalier.data.jsonl import write_records
from espalier.data.records import BadInput
from espalier.data.timeline import TimelineEvent, event_line
from espalier.pipeline.stage import StageContext
from tests.analysis.test_inspect_steps import Elements, blocks_of
from tests.support.browser import browse

BEGAN = 1_790_000_000.0


def line(step: int, **more: float) -> dict[str, float]:
    """An iteration of a run one version ahead: of 100 tokens that came 60 are trained on at age 1, 20 at age 0."""
    numbers = {
        "seconds/iteration": 10.0, "seconds/rollout": 1.5, "seconds/update": 6.0, "queue/engines_idle_seconds": 4.0,
        "queue/ready_batches": 1.0, "engine/token_age": 0.75, "sampling/tokens": 110.0, "rollout/tokens": 80.0,
        "rollout/drawn_tokens": 95.0, "rollout/lost_samples": 0.0, "rollout/lost_tokens": 0.0,
        "ledger/generated": 100.0,
        "ledger/trained_age_0": 20.0, "ledger/trained_age_1": 60.0, "ledger/agreeing": 10.0, "ledger/filtered": 5.0,
        "ledger/waiting": 5.0 * step,
    }  # fmt: skip
    return {"step": step, **numbers, **more}


def event(iteration: int, lane: str, name: str, start: float, end: float, **more: Any) -> TimelineEvent:
    return TimelineEvent(iteration, lane, name, BEGAN + start, BEGAN + end, **more)


def iteration_events(k: int, at: float) -> list[TimelineEvent]:
    """Of iteration `k` that begins at `at`: the batch of the next one is drawn while this one is trained on."""
    both = {"requests": 2, "samples": 8}
    return [
        event(k, "learner", "rollout", at, at + 1.5),
        event(k, "learner", "update", at + 1.5, at + 7.5),
        event(k + 1, "drawing", f"batch {k + 1}", at + 1.5, at + 7.5, tokens=100, requests=4, samples=16),
        event(k, "delivery", f"version {k}", at + 8, at + 9, engines=2),
        event(k, "iteration", f"iteration {k}", at, at + 10),
        event(k, "engine 0 of 2", "asked", at + 1.5, at + 7.5, node="10.0.0.1", tokens=60, busy_seconds=6.0, **both),
        event(k, "engine 1 of 2", "asked", at + 1.5, at + 5.5, node="10.0.0.2", tokens=40, busy_seconds=3.0, **both),
    ]


def write(folder: Path, rows: Sequence[dict[str, Any]], events: Sequence[TimelineEvent]) -> Path:
    run = folder / "run"
    run.mkdir(exist_ok=True)
    write_records(run / "metrics.jsonl", rows)
    if events:
        (run / "timeline.jsonl").write_text("".join(map(event_line, events)))
    return run


def small_run(folder: Path) -> Path:
    """Three iterations; the program is stopped after the second and started again an hour later; engine 1 is lost in
    the third and comes back on another node."""
    rows: list[dict[str, Any]] = [line(1), line(2), {"step": 2, "eval/accuracy": 0.5, "seconds/evaluate": 3.0}]
    rows.append(
        line(3, **{"rollout/lost_samples": 6.0, "rollout/lost_tokens": 18.0, "ledger/completions_valued": 31.0})
    )
    events = [event(0, "run", "start", 0, 0), *iteration_events(1, 1), *iteration_events(2, 11)]
    events += [event(3, "learner", "rollout", 21, 22), event(3, "engine 0 of 2", "asked", 21, 22, tokens=7)]  # cut
    events += [event(2, "run", "start", 3622, 3622), *iteration_events(3, 3623)]
    events.append(event(3, "engine 1 of 2", "lost", 3626, 3626, node="10.0.0.2", requests=3, samples=6, tokens=18))
    events.append(event(3, "engine 1 of 2", "back", 3628, 3628, node="10.0.0.3"))
    return write(folder, rows, events)


def page_of(run_dir: Path, **options: Any) -> tuple[str, dict[str, Any]]:
    """The page, written to timeline.html, and its counts."""
    stage = InspectTimeline(str(run_dir), **options)
    context = StageContext(None, run_dir / "timeline.html", 10.0)
    assert all(Path(path).is_file() for path in stage.inputs())
    page = stage.run("", context)
    context.output.write_text(page, encoding="utf-8")
    return page, context.counts


def tables_in(page: str) -> dict[str, list[str]]:
    """The cells of every row of a table, by the row's heading."""
    rows = re.findall(r'<tr><th scope="row">(.*?)</th>(.*?)</tr>', page, re.DOTALL)
    return {html.unescape(name): re.findall(r"<td>(.*?)</td>", cells) for name, cells in rows}


def test_every_token_of_the_ledger_is_on_the_page_and_they_add_up(tmp_path: Path) -> None:
    run = small_run(tmp_path)
    fates = fates_of(read_timeline_run(run, 1000))
    assert fates == {
        "trained, age 0": [20, 20, 20], "trained, age 1": [60, 60, 60], "agreeing": [10, 10, 10],
        "filtered": [5, 5, 5], "waiting": [5, 10, 15], "lost, at least": [0, 0, 18],
    }  # fmt: skip
    page, _ = page_of(run)
    rows = tables_in(page)
    assert rows["trained, age 1"] == ["180", "60.0"]
    assert rows["waiting, at the end"] == ["15", "5.0"]
    assert rows["generated, as counted when they came"][0] == "300", "180 + 60 + 30 + 15 + 15"
    assert rows["lost, at least"] == ["18", "–"]
    assert "Engines that were gone owed 6 samples" in page
    assert "Beside them 31 tokens were sampled for the estimator" in page
    assert page.count("<polygon") == 6
    numbers = ["trained, age 0 20", "trained, age 1 60", "agreeing 10", "filtered 5", "waiting 15", "lost, at least 18"]
    assert "\n".join(["iteration 3", *numbers]) in page


def test_who_waited_for_whom_and_the_seconds_of_phases_are_on_the_page(tmp_path: Path) -> None:
    rows = tables_in(page_of(small_run(tmp_path))[0])
    assert rows["the learner, for rollouts"] == ["4.5 s", "1.5"]
    assert rows["the engines, for the learner"] == ["12.0 s", "4"]
    assert rows["update"] == ["18.0 s", "6", "60.0"]
    assert rows["evaluate"][0] == "3.0 s"


def test_what_each_engine_did_on_which_node_is_on_the_page(tmp_path: Path) -> None:
    run = small_run(tmp_path)
    rows = tables_in(page_of(run)[0])
    assert rows["engine 0 of 2"] == ["10.0.0.1", "6", "24", "180", "18.0 s", "10", "–"]
    assert rows["engine 1 of 2"] == ["10.0.0.2, 10.0.0.3", "6", "24", "120", "9.0 s", "13", "1 times, 6 samples"]
    names = list(engine_sums([event(1, f"engine {k} of 12", "asked", 0, 1) for k in (10, 9, 1)]))
    assert names == ["engine 1 of 12", "engine 9 of 12", "engine 10 of 12"]


def test_the_picture_has_every_event_once_in_its_lane_without_the_hour_between_two_programs(tmp_path: Path) -> None:
    run = small_run(tmp_path)
    page, counts = page_of(run)
    index = blocks_of(page)["index"]
    lanes = ["iteration", "learner", "drawing", "delivery", "engine 0 of 2", "engine 1 of 2"]
    assert (index["lanes"], index["fixed"]) == (lanes, 4)
    events = index["events"]
    of = [[at for at, lane in enumerate(events["lane"]) if lanes[lane] == name] for name in lanes]
    assert [len(found) for found in of] == [3, 6, 2, 3, 3, 5]
    assert [events["start"][at] for at in of[0]] == [1000, 11000, 23000], "a second in place of an hour"
    assert index["breaks"] == [[22000, 2, 3601.0]]
    assert [(index["names"][events["name"][at]], events["length"][at]) for at in of[1]][:2] == [
        ("rollout", 1500), ("update", 6000),
    ]  # fmt: skip
    assert sum(events["tokens"][at] for at in of[4] + of[5]) == 318
    assert [events["iteration"][at] for at in of[2]] == [2, 4], "batch 3 was thrown away with the first program"
    assert counts == {"iterations": 3, "events": 24, "left_out": 0}


def test_events_that_overlap_in_a_lane_stand_one_below_the_other(tmp_path: Path) -> None:
    events = [event(k, "drawing", f"batch {k}", k, k + 2.5) for k in range(4)]
    run = write(tmp_path, [line(1)], events)
    assert picture_of(read_timeline_run(run, 1000))["events"]["row"] == [0, 1, 2, 0]


def test_times_of_programs_whose_clocks_disagree_do_not_run_backwards() -> None:
    first = [event(0, "run", "start", 100, 100), event(1, "learner", "update", 100, 110)]
    second = [event(1, "run", "start", 50, 50), event(2, "learner", "update", 50, 60)]
    shown, breaks = without_breaks([*first, *second])
    assert [(one.start, one.end) for one in shown if one.name == "update"] == [(0, 10), (10, 20)]
    assert breaks == [(10, 1, 0.0)]


def test_a_run_without_a_timeline_or_a_ledger_says_what_cannot_be_drawn_and_why(tmp_path: Path) -> None:
    row = {name: value for name, value in line(1).items() if not name.startswith(("ledger/", "queue/", "engine/"))}
    page, counts = page_of(write(tmp_path, [row, {**row, "step": 2}], []))
    assert counts == {"iterations": 2, "events": 0, "left_out": 0}
    assert page.count("This run has no timeline.jsonl: it was made before runs wrote one") == 2
    assert "Nothing was drawn ahead (rollout.max_staleness=0)" in page
    assert "This run has no ledger/… in metrics.jsonl" in page
    mixed, _ = page_of(write(tmp_path, [row, {**line(2)}], []))
    assert "1 iterations were made before runs kept a ledger, and are not counted" in mixed
    rows = tables_in(page)
    assert "trained, age 0" not in rows
    assert rows["the learner, for rollouts"] == ["3.0 s", "1.5"]
    assert 'id="picture"' not in page


def test_a_run_that_is_being_written_is_read_up_to_its_last_whole_line(tmp_path: Path) -> None:
    run = small_run(tmp_path)
    for name in ("metrics.jsonl", "timeline.jsonl"):
        with (run / name).open("a") as file:
            file.write('{"step": 4, "sec')
    assert page_of(run)[1]["iterations"] == 3


def test_folders_of_other_programs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"has no metrics\.jsonl: set stage\.run_dir to a run of main\.py"):
        read_timeline_run(tmp_path, 10)
    write_records(tmp_path / "metrics.jsonl", [{"step": 1, "train/loss": 1.0}])
    with pytest.raises(BadInput, match=r"has no line of an iteration \(seconds/iteration\)"):
        read_timeline_run(tmp_path, 10)
    with pytest.raises(BadInput, match=r"stage\.max_events must be at least 1, got 0"):
        InspectTimeline("run", 0)


def test_columns_of_many_iterations_are_means(tmp_path: Path) -> None:
    assert columns_of(range(5)) == [(0, 0), (1, 1), (2, 2), (3, 3), (4, 4)]
    assert columns_of(range(401))[:2] == [(0, 2), (3, 5)]
    assert columns_of(range(401))[-1] == (399, 400)
    assert means([1.0, None, 3.0, None, None], [(0, 2), (3, 4)]) == [2.0, None]


def large_run(folder: Path, num: int = 1000) -> Path:
    rows = [line(k) for k in range(1, num + 1)]
    events = [one for k in range(1, num + 1) for one in iteration_events(k, 10.0 * k)]
    events += [event(k, "learner", f"phase {j}", 10 * k + 8 + j / 10, 10 * k + 8.1 + j / 10) for k in range(1, num + 1)
               for j in range(18)]  # fmt: skip
    return write(folder, rows, events)


def test_a_page_of_a_thousand_iterations_is_made_in_seconds_and_small(tmp_path: Path) -> None:
    run = large_run(tmp_path)
    started = time.process_time()
    page, counts = page_of(run)
    assert counts["events"] == 25_000
    assert time.process_time() - started < 20
    assert len(page) < 1_500_000
    assert "Each column of a chart is the mean of 5 iterations." in page


def test_the_earliest_iterations_are_left_out_of_a_picture_of_too_many_events_and_the_page_says_so(
    tmp_path: Path,
) -> None:
    page, counts = page_of(large_run(tmp_path, 40), max_events=260)
    assert counts == {"iterations": 40, "events": 251, "left_out": 749}
    index = blocks_of(page)["index"]
    assert set(index["events"]["iteration"]) == set(range(31, 42))
    assert "The 749 events of iterations before 31 are left out (stage.max_events)." in page


def test_names_of_engines_are_neither_markup_nor_a_reference(tmp_path: Path) -> None:
    name = "http://x/<script>pwned</script>"
    page, _ = page_of(write(tmp_path, [line(1)], [event(1, name, "asked", 0, 1, node="<b>", tokens=3)]))
    parser = Elements()
    parser.feed(page)
    assert parser.open == []
    assert parser.opened.count("script") == 2, "the index and the page's own"
    assert "<script>pwned" not in page
    assert blocks_of(page)["index"]["lanes"] == [name]


def run_of_ranks(folder: Path, num: int) -> Path:
    """One iteration on `num` ranks, four to a machine: all draw nothing and wait for rank 0, which waits for none; in
    the update rank 41 % num comes last, a second behind all others, and each rank waits for the next one 0.01 s."""
    events = [event(1, "run", "start", 0, 0), event(1, "iteration", "iteration 1", 0, 10)]
    events += [event(1, "learner", "rollout", 0, 4), event(1, "learner", "update", 4, 8)]
    events.append(event(1, "learner", f"waiting for rank {41 % num}", 8, 9))
    for rank in range(1, num):
        own: dict[str, Any] = {"lane": f"learner {rank}", "node": f"node-{rank // 4}"}
        events.append(event(1, name="waiting for rank 0", start=0, end=4, **own))
        events.append(event(1, name="update", start=4, end=9 if rank == 41 % num else 8, **own))
        if rank != 41 % num:
            events.append(event(1, name=f"waiting for rank {41 % num}", start=8, end=9, **own))
        events.append(event(1, name=f"waiting for rank {(rank + 1) % num}", start=9, end=9.01, **own))
    return write(folder, [line(1)], events)


def test_the_page_says_which_rank_others_waited_for_and_where_it_is(tmp_path: Path) -> None:
    page, _ = page_of(run_of_ranks(tmp_path, 8))
    rows = tables_in(page)
    assert rows["learner"] == ["–", "28.0 s", "4"], "7 ranks waited 4 s, and rank 7 once 0.01 s"
    assert rows["learner 1"] == ["node-0", "7.0 s", "1"], "rank 0 and 6 others waited a second"
    assert "Of the 8 ranks of the learner others waited" in page
    index = blocks_of(page)["index"]
    assert index["lanes"] == ["iteration", "learner", *(f"learner {rank}" for rank in range(1, 8))]
    assert (index["fixed"], index["ranks"], index["folded"]) == (9, list(range(2, 9)), [])
    assert 'id="ranks"' not in page
    assert "Nothing is known of this run" in page, "a rank is no engine"


def test_of_many_ranks_those_that_others_waited_for_longest_are_drawn_and_the_page_says_so(tmp_path: Path) -> None:
    run = run_of_ranks(tmp_path, 64)
    page, _ = page_of(run)
    index = blocks_of(page)["index"]
    names = [index["lanes"][lane] for lane in index["ranks"]]
    assert names == [f"learner {rank}" for rank in range(1, 64)]
    drawn = [index["lanes"][lane] for lane in index["ranks"] if lane not in index["folded"]]
    assert len(drawn) == 15
    assert "learner 41" in drawn
    assert "Of the 63 other ranks the 15 that others waited for longest are drawn; the rest by" in page
    assert len([name for name in tables_in(page) if name.startswith("learner")]) == 8


def dom_of(run_dir: Path, choice: str = "") -> str:
    address = f"{(run_dir / 'timeline.html').as_uri()}#{choice}"
    done = browse(run_dir, address, "--dump-dom", "--virtual-time-budget=5000")
    assert "CONSOLE" not in done.stderr, done.stderr
    assert 'data-ready="true"' in done.stdout
    return done.stdout


def test_the_browser_draws_the_lanes_and_sums_up_what_is_shown(tmp_path: Path) -> None:
    run = small_run(tmp_path)
    page_of(run)
    dom = dom_of(run)
    assert "iterations 1 to 3" in dom
    assert dom.count('class="lost"') == dom.count('class="back"') == dom.count('class="break"') == 1
    assert "at 10.0.0.3" in dom
    closer = dom_of(run, "t=1000,11000")
    assert "iterations 1 to 1" in closer
    assert 'class="lost"' not in closer


def test_the_browser_draws_some_of_many_ranks(tmp_path: Path) -> None:
    run = run_of_ranks(tmp_path, 64)
    page_of(run)
    dom = dom_of(run)
    assert dom.count('class="lane"') == 2 + 15
    assert "at node-10" in dom, "of rank 41"
    assert ">learner 41</text>" in dom


def test_the_browser_draws_a_thousand_iterations_in_seconds(tmp_path: Path) -> None:
    run = large_run(tmp_path)
    page_of(run)
    started = time.monotonic()
    assert "iterations 981 to 1000" in dom_of(run)
    whole = dom_of(run, "t=0,10000000")
    assert time.monotonic() - started < 60
    assert "are too short to be drawn" in whole
