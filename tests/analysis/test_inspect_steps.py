"""The inspector: what it joins, what it finds suspicious, what it packs, and the page in a real browser."""

import base64
import gzip
import html
import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from espalier.analysis.embedded import Cap
from espalier.analysis.flags import KINDS, SuspicionRule, flags, holds_word, largest_gap, largest_jump, widest
from espalier.analysis.inspected import InspectedFiles, read_inspection
from espalier.analysis.inspector import InspectSteps
from espalier.data.answers.grade import Grade
from espalier.data.jsonl import write_records
from espalier.data.records import AnnotatedSolution, BadInput, Completion, State, StepScores, StepValues, Trajectory
from espalier.pipeline.stage import StageContext
from espalier.values.labels import wilson_interval
from espalier.values.monte_carlo import states_of
from tests.support.browser import browse

HOSTILE = "</script><script>window.pwned = 1</script><img src=x onerror='window.pwned = 1'><!--<script>\ud800\x00\u2028"


def trajectory(name: str, steps: Sequence[str], *, is_correct: bool = True, **changes: Any) -> Trajectory:
    """A step two tokens long."""
    ids = [10 * len(step) + number for step in steps for number in range(2)]
    row = Trajectory(
        name, name.partition("/")[0], "How many pens?\n", "".join(steps), list(steps), [1, 2], ids,
        [2 * number for number in range(1, len(steps) + 1)], "stop", "47", "47" if is_correct else "8", is_correct,
    )  # fmt: skip
    return replace(row, **changes)


GOOD = trajectory("p/0", ["a\n", "bb\n", "#### 47"])
BAD = trajectory("p/1", ["a\n", "ccc\n", "#### 8"], is_correct=False)


def completions_of(states: Sequence[State], rights: dict[str, Sequence[bool]]) -> list[Completion]:
    """Completions of the states that are named."""
    return [
        Completion(f"{state.id}/{k}", state.id, state.problem_id, f"more of {state.id}, {k}", [5], "stop",
                   "47" if is_right else None, is_right)
        for state in states for k, is_right in enumerate(rights.get(state.id, ()))
    ]  # fmt: skip


Write = Callable[..., InspectSteps]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """`write(trajectories, rights, scores=…, verdicts=…)` makes the files and the stage that reads them."""

    def make(
        rows: Sequence[Trajectory],
        rights: dict[str, Sequence[bool]] | None = None,
        *,
        scores: dict[str, list[float]] | None = None,
        verdicts: dict[str, list[float | None]] | None = None,
        **options: Any,
    ) -> InspectSteps:
        problems = {row.id: row.problem_id for row in rows}
        write_records(tmp_path / "trajectories.jsonl", rows)
        if rights is not None:
            states = [state for row in rows for state in states_of(row, first_step=0)]
            write_records(tmp_path / "states.jsonl", states)
            write_records(tmp_path / "completions.jsonl", completions_of(states, rights))
            options |= {name: str(tmp_path / f"{name}.jsonl") for name in ("states", "completions")}
        if scores is not None:
            write_records(tmp_path / "scores.jsonl", [StepScores(k, problems[k], v) for k, v in scores.items()])
            options["scores"] = str(tmp_path / "scores.jsonl")
        if verdicts is not None:
            judged = [AnnotatedSolution(k, problems[k], "", ["?"] * len(v), v, None, None) for k, v in verdicts.items()]
            write_records(tmp_path / "verdicts.jsonl", judged)
            options["verdicts"] = str(tmp_path / "verdicts.jsonl")
        return InspectSteps(**options)

    return make


def page_of(stage: InspectSteps, folder: Path, task: Any = None) -> tuple[str, dict[str, Any]]:
    """The page, written to inspect.html, and its counts."""
    context = StageContext(task, folder / "inspect.html", 10.0)
    stage.inputs()
    page = stage.run(str(folder / "trajectories.jsonl"), context)
    context.output.write_text(page, encoding="utf-8")
    return page, context.counts


def blocks_of(page: str) -> dict[str, Any]:
    """Every packed block by its name."""
    found = re.findall(r'<script type="application/gzip" id="([^"]+)">([A-Za-z0-9+/=]+)</script>', page)
    return {name: json.loads(gzip.decompress(base64.b64decode(text))) for name, text in found}


def found_of(stage: InspectSteps, folder: Path, task: Any = None) -> dict[str, list[tuple[str, int]]]:
    """Trajectory id → (kind, step) of its flags."""
    inspection = read_inspection(str(folder / "trajectories.jsonl"), stage.files)
    rule = SuspicionRule(stage.min_jump, stage.max_width, stage.min_gap, stage.length_share)
    limits = rule.length_limits(inspection.rows)
    return {
        row.trajectory.id: [(one.kind, one.step) for one in flags(row, rule, limits, inspection.completions, task)]
        for row in inspection.rows
    }


# --- what is joined -----------------------------------------------------------------------------------------


def test_values_come_from_the_completions_of_a_state_by_its_tokens(write: Write, tmp_path: Path) -> None:
    """Both trajectories begin with the same tokens: the completions of the one's state are the other's too."""
    stage = write([GOOD, BAD], {"p/0#1": [True, True, False, False], "p/1#2": [False, False]})
    inspection = read_inspection(str(tmp_path / "trajectories.jsonl"), stage.files)
    good, bad = inspection.rows
    assert good.steps.values == [0.5, None, 1.0]
    assert bad.steps.values == [0.5, 0.0, 0.0]
    assert (bad.steps.num_correct, bad.steps.num_completions) == ([2, 0, 0], [4, 2, 1])
    assert (bad.steps.low[0], bad.steps.high[0]) == wilson_interval(2, 4)
    assert (bad.steps.low[2], bad.steps.high[2]) == (0.0, 0.0), "the outcome is known"
    assert good.steps.prompt_value == 0.5
    assert len(inspection.completions[good.states[1]]) == 4


def test_step_values_take_the_place_of_completions(write: Write, tmp_path: Path) -> None:
    stage = write([GOOD])
    row = StepValues("p/0", "p", "", GOOD.steps, [1], [1], [2, 4, 6], [0.25, 0.5, 1.0], [1, 2, 1], [4, 4, 1], True)
    write_records(tmp_path / "values.jsonl", [row])
    stage = replace(stage, values=str(tmp_path / "values.jsonl"))
    (one,) = read_inspection(str(tmp_path / "trajectories.jsonl"), stage.files).rows
    assert (one.steps.values, one.steps.labels) == ([0.25, 0.5, 1.0], [0.25, 0.5, 1.0])


def test_labels_are_shown_as_their_file_says(write: Write, tmp_path: Path) -> None:
    row = StepValues("p/0", "p", "", GOOD.steps, [1], [1], [2, 4, 6], [0.5, 1.0, 1.0], [1, 2, 1], [2, 2, 1], True,
                     [None, 1.0, 1.0], [0.0, 0.6, 1.0], [0.1, 0.3, 1.0], [0.9, 1.0, 1.0], 0.5)  # fmt: skip
    stage = write([GOOD, BAD], values=str(tmp_path / "values.jsonl"))
    write_records(tmp_path / "values.jsonl", [row])
    page, _ = page_of(stage, tmp_path)
    first, second = blocks_of(page)["block-0"]["rows"]
    assert first["steps"][0] == ["a\n", 0.5, 0.1, 0.9, 1, 2, None, 0.0, None, None, None]
    assert first["steps"][1] == ["bb\n", 1.0, 0.3, 1.0, 2, 2, 1.0, 0.6, None, None, None]
    assert second["steps"][0][1] is None, "the file says nothing of this one"


def test_the_votes_of_a_judge_are_averaged(write: Write, tmp_path: Path) -> None:
    stage = write([GOOD], verdicts={"p/0": [1.0, 0.0, None]})
    (one,) = read_inspection(str(tmp_path / "trajectories.jsonl"), stage.files).rows
    assert one.verdicts == [1.0, 0.0, None]
    votes = [[1, 1, None], [1, 0, None], []]
    rows = [{"id": f"p/0/{k}", "trajectory_id": "p/0", "labels": labels} for k, labels in enumerate(votes)]
    write_records(tmp_path / "verdicts.jsonl", rows)
    (one,) = read_inspection(str(tmp_path / "trajectories.jsonl"), stage.files).rows
    assert one.verdicts == [1.0, 0.5, None]
    for bad, said in (
        ([1], r"verdicts.jsonl:1: 1 labels of 'p/0', which has 3 steps"),
        ("good", "labels must be a list"),
    ):
        write_records(tmp_path / "verdicts.jsonl", [{"id": "p/0", "labels": bad}])
        with pytest.raises(BadInput, match=said):
            read_inspection(str(tmp_path / "trajectories.jsonl"), stage.files)


def test_trajectories_alone_can_be_read(write: Write, tmp_path: Path) -> None:
    chat = trajectory("p/2", ["x\n", "y"], prompt_ids=[], response_ids=[], step_ends=[])
    page, counts = page_of(write([GOOD, chat]), tmp_path)
    rows = blocks_of(page)["block-0"]["rows"]
    assert [line[1] for line in rows[0]["steps"]] == [None, None, 1.0]
    assert counts["shown"] == 2


def test_states_without_completions_are_refused() -> None:
    with pytest.raises(BadInput, match=r"stage\.states and stage\.completions belong together"):
        InspectSteps(states="a").inputs()


def test_files_of_other_trajectories_are_refused(write: Write, tmp_path: Path) -> None:
    stage = write([GOOD], scores={"p/0": [0.5, 0.5]})
    with pytest.raises(BadInput, match="'p/0' has 2 scores, its trajectory 3 steps: make this file from these"):
        page_of(stage, tmp_path)
    write_records(tmp_path / "scores.jsonl", [StepScores("q/0", "q", [0.5])])
    with pytest.raises(BadInput, match="holds none of these trajectories"):
        page_of(stage, tmp_path)
    write_records(tmp_path / "empty.jsonl", [])
    with pytest.raises(BadInput, match=r"empty.jsonl: no trajectory to inspect"):
        read_inspection(str(tmp_path / "empty.jsonl"), InspectedFiles())


# --- what is suspicious -------------------------------------------------------------------------------------


def test_right_after_certain_wrong_and_wrong_after_certain_right(write: Write, tmp_path: Path) -> None:
    stage = write([GOOD, BAD], {"p/0#1": [True, True], "p/0#2": [False] * 4, "p/1#2": [True]}, min_jump=1.0)
    found = found_of(stage, tmp_path)
    assert found["p/0"][:2] == [("right_after_wrong", 2), ("wrong_after_right", 1)]
    assert found["p/1"][0] == ("wrong_after_right", 1), "one completion of step 2 is not enough; step 1 has two"


@pytest.mark.parametrize(
    ("text", "word", "holds"),
    [("so 47.", "47", True), ("$47", "47", True), ("147", "47", False), ("47.5", "47", False), ("-47", "47", False),
     ("Paris!", "paris", True), ("a+b", "a+b", True), ("47th", "47", False)],
)  # fmt: skip
def test_a_word_stands_by_itself(text: str, word: str, holds: bool) -> None:
    assert holds_word(text, word) == holds


class Marked:
    """An answer stands after ####."""

    def grade(self, gold: str, text: str, num_options: int) -> Grade:
        return Grade(text.partition("####")[2].strip() or None, False)


def test_answers_given_away_and_answers_read_early(write: Write, tmp_path: Path) -> None:
    in_prompt = trajectory("q/0", ["a\n", "b\n", "c"], prompt="There are 47 pens?\n")
    in_first = trajectory("q/1", ["it is 47\n", "b\n", "c"], prompt_ids=[3])
    in_two = trajectory("q/2", ["it is 47\n", "b"])
    letter = trajectory("q/3", ["A\n", "b\n", "c"], gold="A", num_options=4, prompt="A. one")
    early = trajectory("q/4", ["a\n", "#### 5\n", "c"])
    found = found_of(write([in_prompt, in_first, in_two, letter, early]), tmp_path, Marked())
    assert [found[f"q/{k}"] for k in range(5)] == [[("leak", 0)], [("leak", 1)], [], [], [("early", 2)]]


def test_jumps_widths_and_disagreement(write: Write, tmp_path: Path) -> None:
    stage = write([GOOD, BAD], {"p/0#1": [True, False, False], "p/0#2": [True, True, True, True]},
                  scores={"p/0": [0.3, 0.45, 1.0]}, verdicts={"p/0": [1.0, 1.0, None]}, max_width=0.7)  # fmt: skip
    found = found_of(stage, tmp_path)["p/0"]
    assert found == [("jump", 2), ("wide", 1), ("prm", 2), ("judge", 1), ("unparseable", 1)]
    assert largest_jump([0.5, None, 0.0, 0.75]) == (4, 0.75)
    assert largest_jump([None]) == (0, 0.0)
    assert largest_gap([0.9, None], [0.4, 0.0]) == (1, -0.5)
    inspection = read_inspection(str(tmp_path / "trajectories.jsonl"), stage.files)
    low, high = wilson_interval(1, 3)
    assert widest(inspection.rows[0]) == (1, high - low)


def test_extreme_lengths_are_those_beyond_the_usual_ones(write: Write, tmp_path: Path) -> None:
    rows = [trajectory(f"p/{k}", ["x"] * (1 if k == 0 else 30 if k == 99 else 5)) for k in range(100)]
    found = found_of(write(rows), tmp_path)
    assert [name for name, kinds in found.items() if kinds] == ["p/0", "p/99"]
    assert SuspicionRule(length_share=0.5).length_limits(
        read_inspection(str(tmp_path / "trajectories.jsonl"), InspectedFiles()).rows
    ) == (10, 10)


def test_responses_without_answer_or_end_are_named(write: Write, tmp_path: Path) -> None:
    row = trajectory("p/0", ["a", "b"], is_correct=False, answer=None, finish_reason="length")
    assert found_of(write([row]), tmp_path)["p/0"] == [("unparseable", 2), ("cut", 2)]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"min_jump": 1.5}, "stage.min_jump must be from 0 to 1, got 1.5"),
        ({"max_trajectories": -1}, "stage.max_trajectories must be 0"),
    ],
)
def test_settings_out_of_range_are_refused(options: dict[str, Any], said: str, write: Write, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=said):
        page_of(write([GOOD], **options), tmp_path)


# --- what is packed -----------------------------------------------------------------------------------------


def test_a_block_holds_a_trajectory_with_everything_known(write: Write, tmp_path: Path) -> None:
    stage = write([GOOD], {"p/0#0": [True], "p/0#1": [True, False]}, scores={"p/0": [0.1, 0.2, 0.3]},
                  verdicts={"p/0": [1.0, None, 0.0]})  # fmt: skip
    page, _ = page_of(stage, tmp_path)
    blocks = blocks_of(page)
    (row,) = blocks["block-0"]["rows"]
    low, high = wilson_interval(1, 2)
    assert row["steps"][0] == ["a\n", 0.5, round(low, 3), round(high, 3), 1, 2, 0.5, 1.0, 0.1, 1.0, 1]
    assert row["steps"][1] == ["bb\n", None, 0.0, 1.0, 0, 0, None, 0.0, 0.2, None, None]
    assert blocks["block-0"]["states"][1] == [
        [1, "more of p/0#1, 0", "47", "stop"],
        [0, "more of p/0#1, 1", None, "stop"],
    ]
    assert (row["promptState"], row["gold"], row["answer"]) == (0, "47", "47")
    assert blocks["index"]["index"]["values"] == [[0.5, None, 1.0]]
    assert [kind[0] for kind in blocks["index"]["kinds"]] == list(KINDS)


def test_caps_leave_the_least_suspicious_out_and_say_so(write: Write, tmp_path: Path) -> None:
    rows = [
        trajectory(f"p/{k}", ["a\n", f"{'x' * k}"], is_correct=k != 2, answer=None if k == 2 else "47")
        for k in range(4)
    ]
    page, counts = page_of(
        write(rows, {"p/0#1": [True] * 5}, max_trajectories=1, max_completions=2, max_characters=3), tmp_path
    )
    blocks = blocks_of(page)
    assert blocks["index"]["index"]["id"] == ["p/2"]
    assert len(blocks["block-0"]["states"][0]) == 2
    assert blocks["block-0"]["states"][0][0][1] == "mor … (13 more characters)"
    assert "3 trajectories are left out (stage.max_trajectories), the least suspicious first" in page
    assert "3 completions are left out" in page
    assert (counts["trajectories"], counts["shown"]) == (4, 1)


def test_a_full_page_leaves_completions_out_but_no_trajectory(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("espalier.analysis.embedded.BLOCK_CHARACTERS", 1)
    rows = [trajectory(f"p{k}/0", ["a\n", "b"]) for k in range(3)]
    page, counts = page_of(write(rows, {f"p{k}/0#1": [True] for k in range(3)}, max_megabytes=0.0001), tmp_path)
    blocks = blocks_of(page)
    assert [len(blocks[f"block-{k}"]["states"][0]) for k in range(3)] == [1, 0, 0]
    assert counts["shown"] == 3
    assert "2 completions are left out (stage.max_completions, stage.max_megabytes)" in page


def test_a_text_is_cut_after_so_many_characters() -> None:
    assert Cap(0, 0, 4, 0).cut("abcd") == "abcd"
    assert Cap(0, 0, 0, 0).cut("x" * 9000) == "x" * 9000


# --- the page -----------------------------------------------------------------------------------------------


class Elements(HTMLParser):
    """The elements of a page, and whether each was closed."""

    def __init__(self) -> None:
        super().__init__()
        self.opened: list[str] = []
        self.open: list[str] = []
        self.attributes: set[tuple[str, str]] = set()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.opened.append(tag)
        self.attributes |= {(name, value) for name, value in attrs if name in ("src", "href") or name[:2] == "on"}
        if tag not in ("meta", "link", "input", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def hostile_rows() -> list[Trajectory]:
    """Hostile text wherever text can stand."""
    row = trajectory(f"p{HOSTILE}/0", [HOSTILE, HOSTILE, "#### 47"])
    return [replace(row, prompt=HOSTILE, gold=HOSTILE, answer=HOSTILE, finish_reason=HOSTILE), GOOD]


def test_hostile_text_is_neither_markup_nor_a_reference(write: Write, tmp_path: Path) -> None:
    rows = hostile_rows()
    page, _ = page_of(write(rows, {f"{rows[0].id}#1": [False] * 4}), tmp_path)
    parser = Elements()
    parser.feed(page)
    assert parser.open == []
    assert parser.opened.count("script") == 3, "the index, one block, the page's own"
    assert "pwned = 1</script>" not in page
    assert "<img" not in page
    assert all(name == "href" and value.startswith(("#", "data:,")) for name, value in parser.attributes)
    assert not re.search(r"https?://|@import|url\(", page)
    assert "default-src &#x27;none&#x27;" in page
    page.encode("utf-8")


def dom_of(folder: Path, choice: str) -> str:
    """What the browser has made of the page, at an address with a choice in it."""
    address = f"{(folder / 'inspect.html').as_uri()}#{choice}"
    done = browse(folder, address, "--dump-dom", "--virtual-time-budget=5000")
    assert "CONSOLE" not in done.stderr, done.stderr
    assert 'data-ready="true"' in done.stdout
    return done.stdout


def shown_in(dom: str) -> list[str]:
    """The ids of the listed trajectories."""
    return [html.unescape(name) for name in re.findall(r'class="card trajectory".*?<code>(.*?)</code>', dom, re.DOTALL)]


def test_the_browser_filters_sorts_searches_and_opens(write: Write, tmp_path: Path) -> None:
    rows = hostile_rows()
    long = trajectory("q/0", ["needle\n", *["x\n"] * 8, "#### 47"])
    stage = write([*rows, BAD, long], {f"{rows[0].id}#1": [False] * 4, "p/0#1": [True, True]},
                  scores={"q/0": [0.9] * 10})  # fmt: skip
    page_of(stage, tmp_path)
    opened = dom_of(tmp_path, "t=p/0")
    assert [name.strip() for name in shown_in(opened)][1:] == ["p/0", "p/1", "q/0"]
    assert "2 completions shown, 2 right" in opened
    assert "[0.34, 1.00] 2/2" in opened
    wrong = dom_of(tmp_path, "kinds=wrong_after_right")
    assert shown_in(wrong) == ["p/1"]
    assert "1 of 4 trajectories" in wrong
    found = dom_of(tmp_path, "q=NEEDLE&in=text&sort=longest&right=1")
    assert shown_in(found) == ["q/0"]


def test_the_browser_opens_hostile_text_as_text(write: Write, tmp_path: Path) -> None:
    row = trajectory("p/0", [HOSTILE, HOSTILE, "#### 47"], prompt=HOSTILE, gold=HOSTILE, answer=HOSTILE)
    page_of(write([row], {"p/0#1": [False] * 4}), tmp_path)
    dom = dom_of(tmp_path, "t=p/0")
    assert dom.count("&lt;img src=x onerror=") >= 4
    assert "<img" not in dom
    assert dom.count("<script") == 3


def test_the_page_fits_a_narrow_screen(write: Write, tmp_path: Path) -> None:
    row = trajectory("p/0", ["x" * 400, "y" * 400, "#### 47"], prompt="z" * 400)
    page_of(write([row], {"p/0#1": [False] * 4}, scores={"p/0": [0.1, 0.2, 0.3]}), tmp_path)
    source = html.escape((tmp_path / "inspect.html").read_text(encoding="utf-8"), quote=True)
    probe = tmp_path / "probe.html"
    probe.write_text(
        f'<!doctype html><iframe style="border:0;width:340px;height:900px" srcdoc="{source}"></iframe><pre id="found">'
        "</pre><script>let clicked = false; const asking = setInterval(() => {"
        "const page = document.querySelector('iframe').contentDocument, root = page.documentElement;"
        "if (!page.body || !page.body.dataset.ready) return; if (!clicked) page.querySelector('.head').click();"
        "clicked = true; if (!page.querySelector('.detail')) return; clearInterval(asking);"
        "found.textContent = JSON.stringify([root.scrollWidth, root.clientWidth]); }, 20);</script>",
        encoding="utf-8",
    )
    done = browse(tmp_path, probe, "--dump-dom", "--virtual-time-budget=8000")
    match = re.search(r'<pre id="found">\[(\d+),(\d+)\]', done.stdout)
    assert match is not None, done.stdout[-500:]
    assert int(match[1]) <= int(match[2])


@pytest.mark.slow
def test_two_thousand_trajectories_with_all_their_completions_open_at_once(write: Write, tmp_path: Path) -> None:
    """10 steps each and 8 completions of each of 9 states: 144,000 completions, none left out."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnop", k=rng.randint(2, 9))) for _ in range(4000)]

    def text(number: int) -> str:
        return " ".join(rng.choices(words, k=number)) + "\n"

    rows = []
    for number in range(2000):
        steps = [text(12) for _ in range(10)]
        one = trajectory(f"p{number // 8}/{number % 8}", steps, is_correct=rng.random() < 0.5)
        ids = [rng.randrange(30_000) for _ in one.response_ids]
        rows.append(replace(one, response_ids=ids))
    rights = {f"{row.id}#{step}": [rng.random() < 0.5 for _ in range(8)] for row in rows for step in range(1, 10)}
    page, counts = page_of(write(rows, rights), tmp_path)
    assert (counts["shown"], counts["completions"]) == (2000, 144_000)
    assert "144,000 completions in" in page
    assert len(page) < 30e6
    dom = dom_of(tmp_path, "t=p249/7&sort=longest")
    assert "8 completions shown" in dom
    assert len(shown_in(dom)) <= 51, "no more of the list than is looked at"
