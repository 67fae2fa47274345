"""The quick start's report: its numbers, its escaping, its gaps, and its looks in a real browser."""

import html
import json
import re
import shutil
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from espalier.analysis.charts import calibration_chart
from espalier.analysis.example_trajectories import ScoredTrajectory, choose_examples, largest_drop, read_scored
from espalier.analysis.markup import tag
from espalier.analysis.report import Report
from espalier.analysis.run_files import Bin, RunFiles
from espalier.analysis.sections import duration
from espalier.data.examples.token_examples import is_held_out
from espalier.data.jsonl import read_records, write_json, write_records
from espalier.data.records import BadInput, StepScores, StepValues, Trajectory
from espalier.pipeline.evaluation.evaluate import bootstrap_interval, interval
from espalier.pipeline.stage import StageContext, run_stage
from espalier.runtime.schemas import StageConfig
from tests.support.browser import browse

SHARE = 0.5
HELD_OUT = [name for name in (f"wa-train-{number}" for number in range(40)) if is_held_out(name, SHARE)]
TESTED = ["wa-test-0", "wa-test-1", "wa-test-2", "wa-test-3"]
HOSTILE = "</td></table><script>window.pwned = 1</script><img src=x onerror='window.pwned = 1'>\ud800\x00"


def values_of(problem: str, sample: int, steps: list[str], values: list[float]) -> StepValues:
    """One token a step; four completions of every state but the last."""
    counts = [4] * (len(steps) - 1) + [1]
    return StepValues(
        id=f"{problem}/{sample}",
        problem_id=problem,
        prompt=f"Question of {problem}?\n",
        steps=steps,
        prompt_ids=[1, 2],
        response_ids=list(range(len(steps))),
        step_ends=list(range(1, len(steps) + 1)),
        values=values,
        num_correct=[round(v * n) for v, n in zip(values, counts, strict=True)],
        num_completions=counts,
        is_correct=values[-1] == 1.0,
    )


def trajectory_of(row: StepValues, gold: str) -> Trajectory:
    """The trajectory behind step values."""
    return Trajectory(
        id=row.id,
        problem_id=row.problem_id,
        prompt=row.prompt,
        response="".join(row.steps),
        steps=row.steps,
        prompt_ids=row.prompt_ids,
        response_ids=row.response_ids,
        step_ends=row.step_ends,
        finish_reason="stop",
        gold=gold,
        answer=gold if row.is_correct else "0",
        is_correct=row.is_correct,
    )


def write_evaluation(run: Path, policy: str, problems: list[str], greedy: list[float]) -> None:
    """An evaluation.json as pipeline.evaluation.evaluate writes it, with two metrics."""
    table = {"greedy": greedy, "best_of_8_product": [1.0] * len(greedy)}
    result = {
        "accuracy": {name: interval(row) for name, row in table.items()},
        "unparseable": 0.0,
        "problems": problems,
        "per_problem": table,
    }
    write_json(run / "evaluation" / policy / "evaluation.json", result)


def write_rewards(run: Path, rows: list[StepValues]) -> None:
    """The files of the process-reward pipeline."""
    folder = run / "process_rewards"
    write_records(folder / "step_values.jsonl", rows)
    write_records(folder / "trajectories.jsonl", [trajectory_of(row, "12") for row in rows])
    scores = [StepScores(row.id, row.problem_id, [0.5 * (value or 0.0) for value in row.values]) for row in rows]
    write_records(folder / "step_scores.jsonl", scores)
    bins = [{"score": 0.1, "value": 0.05, "count": 30}, {"score": 0.9, "value": 0.8, "count": 10}]
    spans = {name: {"mean": mean, "low": mean / 2, "high": 0.95, "n": 5}
             for name, mean in (("auc", 0.9), ("ece", 0.0625), ("value_mae", 0.2))}  # fmt: skip
    inner = {**spans, "num_steps": 40, "num_problems": 5}
    terminal = {**spans, "auc": None, "num_steps": 9, "num_problems": 5}
    quality = {"inner": inner, "terminal": terminal, "num_problems": 5, "bins": bins, "terminal_bins": []}
    write_json(folder / "prm.json", quality)
    meta = {"commit": "abc123", "versions": {"torch": "2.0"}, "seconds": 1.0}
    for name, counts in (
        ("trajectories", {"rows": 8000}),
        ("states", {"states": 29098, "distinct_states": 11347}),
        ("completions", {"rows": 45388}),
    ):
        write_json(folder / f"{name}.meta.json", {**meta, "counts": counts})
    write_json(run / "pairs" / "process.meta.json", {**meta, "counts": {"rows": 1234}})


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run directory of four test problems and two held-out training problems."""
    folder = tmp_path / "quickstart"
    write_evaluation(folder, "sft", TESTED, [0.0, 1.0, 0.0, 1.0])
    write_evaluation(folder, "dpo", TESTED[::-1], [1.0, 0.0, 1.0, 0.0])  # the same, in another order
    write_evaluation(folder, "process_dpo", TESTED, [1.0, 1.0, 0.0, 1.0])
    rows = []
    for problem in HELD_OUT[:2]:
        rows.append(values_of(problem, 0, ["buys: 8 + 5 = 13\n", "gives: 13 - 1 = 12\n", "#### 12"], [1.0] * 3))
        rows.append(values_of(problem, 1, ["buys: 8 + 5 = 13\n", "gives: 3 - 1 = 2\n", "#### 2"], [0.75, 0.0, 0.0]))
    write_rewards(folder, rows)
    for name in ("sft", "prm", "dpo", "process_dpo"):
        losses: list[dict[str, Any]] = [{"step": 1, "train/loss": 2.0}, {"step": 20, "train/loss": 0.5}]
        write_records(folder / name / "metrics.jsonl", [*losses, {"step": 20, "eval/loss": 0.625}])
    seconds = [("sft", 10.0), ("sample", 61.5), ("sft", 2.25)]
    write_records(
        folder / "seconds.jsonl",
        [{"stage": stage, "seconds": s, "exit_code": 0} for stage, s in seconds],
    )
    return folder


def stage_of(run: Path) -> Report:
    """The stage as conf/stage/pages/report.yaml builds it, with more problems held out."""
    return Report(run_dir=str(run), held_out_share=SHARE, num_example_problems=1)


def page_of(run: Path) -> str:
    """The page of a run directory."""
    return stage_of(run).run("", StageContext(None, run / "report.html", 10.0))


def summary_of(run: Path) -> dict[str, Any]:
    """summary.json after the stage has run."""
    page_of(run)
    found: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return found


def test_summary_holds_accuracies_seconds_and_the_reward_model(run: Path) -> None:
    summary = summary_of(run)
    assert list(summary) == ["seconds", "accuracy", "label_signal", "prm", "differences"]
    assert summary["seconds"] == {"sft": 12.25, "sample": 61.5}
    assert list(summary["seconds"]) == ["sft", "sample"]
    assert list(summary["accuracy"]) == ["sft", "dpo", "process_dpo"]
    assert summary["accuracy"]["process_dpo"]["greedy"]["mean"] == 0.75
    assert summary["accuracy"]["sft"]["best_of_8_product"] == {"mean": 1.0, "low": 1.0, "high": 1.0, "n": 4}
    prm = summary["prm"]
    figures = [f"{kind}_{name}" for kind in ("inner", "terminal") for name in ("auc", "ece", "value_mae")]
    assert list(prm) == ["target", *figures]
    assert prm["inner_auc"] == {"mean": 0.9, "low": 0.45, "high": 0.95, "n": 5}
    assert prm["terminal_auc"] is None
    assert "0.900 [0.450, 0.950]" in page_of(run)


def test_difference_is_paired_by_problem_and_not_by_position(run: Path) -> None:
    differences = summary_of(run)["differences"]
    assert list(differences) == ["process_dpo_minus_sft", "process_dpo_minus_dpo", "dpo_minus_sft"]
    assert differences["dpo_minus_sft"]["greedy"] == {"mean": 0.0, "low": 0.0, "high": 0.0, "n": 4}
    _, low, high = bootstrap_interval([1.0, 0.0, 0.0, 0.0])
    assert differences["process_dpo_minus_sft"]["greedy"] == {"mean": 0.25, "low": low, "high": high, "n": 4}


def test_another_policy_is_compared_with_sft(run: Path) -> None:
    write_evaluation(run, "step_dpo", TESTED, [1.0, 1.0, 1.0, 1.0])
    summary = summary_of(run)
    assert summary["accuracy"]["step_dpo"]["greedy"]["mean"] == 1.0
    assert summary["differences"]["step_dpo_minus_sft"]["greedy"]["mean"] == 0.5


def test_policies_of_different_problems_are_refused(run: Path) -> None:
    write_evaluation(run, "process_dpo", [*TESTED[:3], "wa-test-9"], [1.0] * 4)
    with pytest.raises(BadInput, match="do not hold the same problems: evaluate both on the same split"):
        page_of(run)


def test_headline_gives_both_accuracies_and_the_paired_difference(run: Path) -> None:
    text = re.sub(r"<[^>]*>", "", page_of(run))
    assert "process_dpo greedy 50.0\N{NO-BREAK SPACE}% → 75.0\N{NO-BREAK SPACE}%" in text
    assert "paired difference +25.0 points [+0.0, +75.0] (not distinguishable from 0)" in text


def test_page_shows_steps_with_values_scores_and_the_fall(run: Path) -> None:
    page = page_of(run)
    assert "gives: 3 - 1 = 2</span>" in page
    assert "\N{MINUS SIGN}0.75</span>" in page
    assert "value 0.75: 3 of 4 completions are right" in page
    assert "PRM score 0.375" in page
    for count in ("8,000", "29,098", "11,347", "45,388", "1,234"):
        assert f"<b>{count}</b>" in page
    assert "abc123" in page


def test_hostile_text_is_escaped_wherever_it_stands(run: Path) -> None:
    rows = [values_of(HELD_OUT[0], 0, [HOSTILE, HOSTILE], [1.0, 1.0])]
    rows += [values_of(HELD_OUT[0], 1, [HOSTILE, "#### 1"], [1.0, 0.0])]
    rows = [replace(row, prompt=HOSTILE, id=row.id + HOSTILE) for row in rows]
    write_rewards(run, rows)
    write_records(run / "process_rewards" / "trajectories.jsonl", [trajectory_of(row, HOSTILE) for row in rows])
    write_records(run / "seconds.jsonl", [{"stage": HOSTILE, "seconds": 1.0, "exit_code": 0}])
    write_json(run / "pairs" / "step.meta.json", {"commit": HOSTILE, "counts": {HOSTILE: HOSTILE}})
    page = page_of(run)
    assert "&lt;script&gt;window.pwned" in page
    assert "<script" not in page
    assert "<img" not in page
    assert "onerror='" not in page
    page.encode("utf-8")  # a lone surrogate must not stop the page from being written


def test_tag_escapes_children_and_attributes_but_not_markup() -> None:
    assert tag("b", "1 < 2 & 3", title='"x"') == '<b title="&quot;x&quot;">1 &lt; 2 &amp; 3</b>'
    assert tag("i", tag("b", "<"), class_="a") == '<i class="a"><b>&lt;</b></i>'


def test_page_refers_to_nothing_outside_itself(run: Path) -> None:
    page = page_of(run)
    assert not re.search(r"https?://|@import|url\(|<script|\bsrc=", page)
    assert set(re.findall(r'href="([^"]*)"', page)) == {"data:,"} | {
        f"#{name}" for name in re.findall(r'<section id="([a-z]+)"', page)
    }


def test_the_pages_of_step_credit_and_of_the_timeline_are_linked_to_where_a_run_has_them(run: Path) -> None:
    assert 'id="credit"' not in page_of(run)
    for name in ("grpo & co", "vineppo"):
        write_records(run / name / "samples" / "iteration-000001.jsonl", [])
        write_records(run / name / "metrics.jsonl", [{"step": 1, "rollout/reward": 0.5}])
    (run / "grpo & co" / "credit.html").write_text("")
    (run / "vineppo" / "timeline.html").write_text("")
    page = page_of(run)
    assert '<a href="grpo%20%26%20co/credit.html">The step credit of grpo &amp; co</a>' in page
    assert "vineppo has samples and no page of them" in page
    assert '<a href="vineppo/timeline.html">The timeline of vineppo</a>' in page
    assert "grpo &amp; co has no page of its timeline: run_stage.py -cn pages/inspect_timeline" in page
    assert "No losses to show" not in page


def test_what_a_run_lacks_is_said_in_a_sentence(run: Path) -> None:
    shutil.rmtree(run / "pairs")
    shutil.rmtree(run / "dpo")
    (run / "process_rewards" / "step_scores.jsonl").unlink()
    quality = json.loads((run / "process_rewards" / "prm.json").read_text())
    quality["inner"]["auc"] = None
    write_json(run / "process_rewards" / "prm.json", {**quality, "bins": []})
    page = page_of(run)
    assert "No losses to show for dpo:" in page
    assert "every step is on one side of value 1/2" in page
    assert "No bins to draw." in page
    assert "None: no step values or scores" in page
    assert "No pairs to count" in page
    assert json.loads((run / "summary.json").read_text())["prm"]["inner_auc"] is None


def test_labels_by_contrast_are_not_called_monte_carlo_values(run: Path) -> None:
    assert "Monte-Carlo value" in page_of(run)
    assert json.loads((run / "summary.json").read_text())["prm"]["target"] == "values"
    path = run / "process_rewards" / "prm.json"
    write_json(path, {**json.loads(path.read_text()), "target": "labels"})
    page = page_of(run)
    assert page.count("Monte-Carlo value") == page.count("it is no Monte-Carlo value") == 1
    assert "AUC of the PRM on held-out inner steps, against their labels" in page
    assert "tells steps labelled right from steps labelled wrong" in page
    assert json.loads((run / "summary.json").read_text())["prm"]["target"] == "labels"
    write_json(path, {**json.loads(path.read_text()), "target": "guesses"})
    with pytest.raises(BadInput, match="'target' must be values or labels"):
        page_of(run)


@pytest.mark.parametrize(
    ("missing", "remedy"),
    [
        ("evaluation/dpo/evaluation.json", "evaluate dpo"),
        ("process_rewards/prm.json", "evaluate the process reward model"),
        ("seconds.jsonl", "let the shell write"),
    ],
)
def test_missing_file_is_named_with_its_remedy(run: Path, missing: str, remedy: str) -> None:
    (run / missing).unlink()
    with pytest.raises(BadInput, match=f"{re.escape(str(run / missing))}: no such file: {remedy}"):
        stage_of(run).inputs()


def test_bad_seconds_are_named_by_file_and_line(run: Path) -> None:
    write_records(run / "seconds.jsonl", [{"stage": "sft", "seconds": 1.0}, {"stage": "sft", "seconds": "long"}])
    with pytest.raises(BadInput, match=r"seconds.jsonl:2: must hold a stage \(str\) and its seconds"):
        page_of(run)


def test_report_is_still_complete_after_the_shell_has_appended_seconds(run: Path) -> None:
    config = StageConfig(output=str(run / "report.html"), stage={"run_dir": str(run)})
    assert run_stage(stage_of(run), None, config) == 0
    before = (run / "report.html").read_bytes()
    with (run / "seconds.jsonl").open("a") as file:
        file.write('{"stage": "report", "seconds": 1, "exit_code": 0}\n')
    assert run_stage(stage_of(run), None, config) == 0
    assert (run / "report.html").read_bytes() == before


def test_report_is_made_anew_where_a_run_has_been_trained_since(run: Path) -> None:
    config = StageConfig(output=str(run / "report.html"), stage={"run_dir": str(run)})
    assert run_stage(stage_of(run), None, config) == 0
    (run / "late").mkdir()
    (run / "late" / "metrics.jsonl").write_text((run / "sft" / "metrics.jsonl").read_text())
    assert run_stage(stage_of(run), None, config) == 0
    assert ">late<" in (run / "report.html").read_text()


def test_example_is_the_fork_with_the_sharpest_fall() -> None:
    def scored(problem: str, sample: int, steps: list[str], values: list[float]) -> ScoredTrajectory:
        return ScoredTrajectory(values_of(problem, sample, steps, values), values, [0.5] * len(values))

    mild = [scored("p", 0, ["a", "b"], [1.0, 1.0]), scored("p", 1, ["a", "c"], [0.5, 0.0])]
    sharp = [
        scored("q", 0, ["x", "y", "z"], [1.0, 1.0, 1.0]),
        scored("q", 1, ["a", "b", "z"], [1.0, 1.0, 1.0]),
        scored("q", 2, ["a", "b", "w"], [1.0, 1.0, 0.0]),
    ]
    fork, miss = choose_examples({"p": mild, "q": sharp}, {"q": "7"}, 1)
    assert [t.row.id for t in fork.trajectories] == [
        "q/1",
        "q/2",
    ]  # q/1 shares two steps with q/2, q/0 none
    assert (fork.num_shared, fork.gold) == (2, "7")
    assert [t.row.id for t in miss.trajectories] == ["p/0"]


def test_a_trajectory_with_an_unknown_value_is_no_example(run: Path) -> None:
    rows = read_records(StepValues, run / "process_rewards" / "step_values.jsonl")
    before = read_scored(RunFiles(run), SHARE)
    first = next(row for row in rows if row.problem_id in before)
    path = run / "process_rewards" / "step_values.jsonl"
    write_records(path, [replace(row, values=[None, *row.values[1:]]) if row is first else row for row in rows])
    after = read_scored(RunFiles(run), SHARE)
    shown = {one.row.id for group in after.values() for one in group}
    assert {one.row.id for group in before.values() for one in group} - shown == {first.id}


def test_largest_drop_and_duration() -> None:
    assert largest_drop([0.5, 1.0, 0.25, 0.0]) == 0.75
    assert largest_drop([0.0, 1.0]) == 0.0
    assert [duration(s) for s in (4.2, 59.97, 185.0, 3725.0)] == [
        "4.2 s",
        "1 min 00 s",
        "3 min 05 s",
        "1 h 02 min",
    ]


# Shows the page unchanged in frames of several widths and tells what each frame made of it.
WRAPPER = """<!doctype html><body>{frames}<pre id="found"></pre><script>
addEventListener("load", () => {{
  const told = [...document.querySelectorAll("iframe")].map(frame => {{
    const page = frame.contentDocument, root = page.documentElement;
    return {{
      client: root.clientWidth, scroll: root.scrollWidth, scripts: page.scripts.length,
      pwned: "pwned" in frame.contentWindow, charts: page.querySelectorAll("svg[role=img]").length,
      sections: [...page.querySelectorAll("section")].map(section => section.id),
      flat: [...page.querySelectorAll("section")].filter(s => s.getBoundingClientRect().height < 60).length,
    }};
  }});
  document.getElementById("found").textContent = JSON.stringify(told);
}});
</script>"""


def test_browser_shows_every_section_without_overflow_at_any_width(run: Path, tmp_path: Path) -> None:
    step = "x" * 300 + HOSTILE  # a word with nowhere to break
    rows = [values_of(HELD_OUT[0], 0, [step, "#### 12"], [1.0, 1.0])]
    rows += [values_of(HELD_OUT[0], 1, [step, "#### 1"], [1.0, 0.0])]
    write_rewards(run, [replace(row, prompt="y" * 300) for row in rows])
    write_evaluation(run, "step_dpo", TESTED, [1.0] * 4)
    source = html.escape(page_of(run), quote=True)
    frames = "".join(
        f'<iframe style="border:0;width:{w}px;height:900px" srcdoc="{source}"></iframe>' for w in (320, 400, 1200)
    )
    wrapper = tmp_path / "wrapper.html"
    wrapper.write_text(WRAPPER.format(frames=frames), encoding="utf-8")
    done = browse(tmp_path, wrapper, "--dump-dom")
    assert "CONSOLE" not in done.stderr  # neither a script error nor anything the page's policy refused
    match = re.search(r'<pre id="found">(.*?)</pre>', done.stdout)
    assert match is not None
    told = json.loads(html.unescape(match.group(1)))
    assert [frame["client"] for frame in told] == pytest.approx([320, 400, 1200], abs=20)  # less a scroll bar
    for frame in told:
        assert frame["scroll"] <= frame["client"]
        assert frame["sections"] == ["accuracy", "losses", "calibration", "examples", "seconds", "counts"]
        assert (frame["scripts"], frame["pwned"], frame["flat"]) == (0, False, 0)
        assert frame["charts"] >= 7  # accuracy, four losses, calibration, bars


def corner_colour(png: bytes) -> tuple[int, ...]:
    """Red, green and blue of the first pixel: there every PNG filter leaves the bytes as they are."""
    assert png.startswith(b"\x89PNG")
    data, at = b"", 8
    while at < len(png):
        length = int.from_bytes(png[at : at + 4], "big")
        if png[at + 4 : at + 8] == b"IDAT":
            data += png[at + 8 : at + 8 + length]
        at += 12 + length
    return tuple(zlib.decompress(data)[1:4])


def test_browser_paints_the_page_in_light_and_in_dark(run: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text(page_of(run), encoding="utf-8")
    shots = []
    for scheme in (0, 1):  # Blink's numbers of dark and light
        shot = tmp_path / f"{scheme}.png"
        browse(
            tmp_path,
            page,
            f"--screenshot={shot}",
            "--window-size=900,1400",
            f"--blink-settings=preferredColorScheme={scheme}",
        )
        shots.append(shot.read_bytes())
    assert all(len(shot) > 20_000 for shot in shots)  # not an empty page
    assert [corner_colour(shot) for shot in shots] == [(17, 21, 19), (250, 249, 245)]  # --paper of page.css


def test_the_count_of_a_bin_stands_in_its_own_column_where_its_mean_is_on_a_border() -> None:
    """Scores of 0.5 alone are of the bin that ends there; those of the next bin stand beside it."""
    bins = [Bin(0.0, 0.1, 3), Bin(0.5, 0.4, 3), Bin(0.55, 0.5, 3), Bin(1.0, 0.9, 3)]
    chart = str(calibration_chart(bins, "value", "x"))
    columns = [float(place) for place in re.findall(r'<rect x="([0-9.]+)" width="30"', chart)]
    step = (410 - 46) / 10
    assert columns == pytest.approx([46 + step * (number + 0.5) - 15 for number in (0, 4, 5, 9)], abs=0.1)
