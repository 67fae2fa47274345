"""The page of step credit: what it reads, where estimators disagree, what it packs, and the page in a real browser."""

import html
import json
import random
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from espalier.analysis.credit import InspectCredit
from espalier.analysis.credit_run import (
    OWN,
    Disagreement,
    PairCount,
    count_opposite_signs,
    find_disagreements,
    read_credit_run,
    scale_of,
)
from espalier.data.jsonl import write_records
from espalier.data.records import BadInput, SampledRollout
from espalier.pipeline.stage import StageContext
from tests.analysis.test_inspect_steps import HOSTILE, Elements, blocks_of
from tests.support.browser import browse


def rollout(
    name: str, iteration: int, own: Sequence[float], *, is_correct: bool = True, **changes: Any
) -> SampledRollout:
    """`name` is `{problem}/{k}`; a step has a letter."""
    steps = [chr(ord("a") + number) + "\n" for number in range(len(own))]
    row = SampledRollout(
        f"rl-{iteration - 1}/{name}", name.split("/")[0], iteration, iteration - 1, "How many?\n", steps, [], list(own),
        [], float(is_correct), {"outcome": float(is_correct)}, 5, "stop", "47", "47" if is_correct else "8", is_correct,
    )  # fmt: skip
    return replace(row, **changes)


def write(folder: Path, rows: Sequence[SampledRollout]) -> Path:
    """A run directory with the samples of these rollouts."""
    for iteration in sorted({row.iteration for row in rows}):
        path = folder / "run" / "samples" / f"iteration-{iteration:06d}.jsonl"
        write_records(path, [row for row in rows if row.iteration == iteration])
    return folder / "run"


def page_of(run_dir: Path, **options: Any) -> tuple[str, dict[str, Any]]:
    """The page, written to credit.html, and its counts."""
    stage = InspectCredit(str(run_dir), **options)
    context = StageContext(None, run_dir / "credit.html", 10.0)
    stage.inputs()
    page = stage.run("", context)
    context.output.write_text(page, encoding="utf-8")
    return page, context.counts


# GRPO gives a step what it gives all; VinePPO disagrees over steps 2 (0.25) and, of p/1, over 1 (0.5).
ROWS = [
    rollout("p/0", 1, [0.5, 0.5, 0.5], estimator_advantages={"vineppo": [0.25, -0.25, 0.5]},
            estimator_values={"vineppo": [0.5, 0.75, 0.5]}),
    rollout("p/1", 1, [-0.75, -0.75], is_correct=False, estimator_advantages={"vineppo": [0.5, -1.0]},
            estimator_values={"vineppo": [0.5, 1.0]}),
    rollout("q/0", 2, [1.0, 1.0], estimator_advantages={"vineppo": [-0.05, 0.0]}, estimator_values={"vineppo": [1, 1]}),
]  # fmt: skip


def test_disagreements_are_opposite_signs_that_are_both_sure_the_largest_first(tmp_path: Path) -> None:
    run = read_credit_run(write(tmp_path, ROWS))
    assert find_disagreements(run, 0.1) == [
        Disagreement(1, 1, (OWN, "vineppo"), (-0.75, 0.5)),
        Disagreement(0, 2, (OWN, "vineppo"), (0.5, -0.25)),
    ]
    assert [one.size for one in find_disagreements(run, 0.05)] == [0.5, 0.25, 0.05]
    assert find_disagreements(run, 0.6) == []
    # seven steps; all but the two of q/0 are sure, two of these opposite
    assert count_opposite_signs(run, 0.1) == [PairCount((OWN, "vineppo"), 7, 5, 2)]


def test_every_pair_of_estimators_is_compared(tmp_path: Path) -> None:
    row = rollout("p/0", 1, [1.0], estimator_advantages={"rloo": [0.5], "exact": [-0.5], "none": []})
    run = read_credit_run(write(tmp_path, [row]))
    found = {one.estimators: one.size for one in find_disagreements(run, 0.1)}
    assert found == {(OWN, "exact"): 0.5, ("rloo", "exact"): 0.5}
    assert [(one.estimators, one.num_steps) for one in count_opposite_signs(run, 0.1)][2] == ((OWN, "none"), 0)


def test_a_colour_is_full_where_95_in_100_advantages_are_no_larger() -> None:
    assert scale_of([float(number) for number in range(101)]) == 95.0
    assert scale_of([-2.0, 1.0, 0.0]) == 1.0
    assert scale_of([0.0] * 20 + [-3.0]) == 3.0, "else nothing had a colour"
    assert scale_of([0.0]) == scale_of([]) == 1.0


def test_the_run_says_what_it_trains_with_and_what_the_others_cost(tmp_path: Path) -> None:
    folder = write(tmp_path, ROWS)
    assert read_credit_run(folder).estimators == {OWN: "trained with", "vineppo": "vineppo"}
    (folder / "config.yaml").write_text("advantage:\n  _target_: espalier.rl.advantages.grpo.GRPO\n")
    cost = {"samples/completions": 40.0, "samples/completion_tokens": 500.0, "seconds/samples": 2.0}
    write_records(folder / "metrics.jsonl", [{"step": 1, **cost}, {"step": 2, **cost}, {"step": 2, "eval/accuracy": 1}])
    run = read_credit_run(folder)
    assert run.estimators[OWN] == "grpo (trained with)"
    assert run.costs == {"samples/completions": 80.0, "samples/completion_tokens": 1000.0, "seconds/samples": 4.0}
    page, _ = page_of(folder)
    assert "had 80 completions of 1,000 tokens sampled, in 4.0 s; nothing was trained with them" in page


def test_the_page_packs_every_step_with_what_every_estimator_says(tmp_path: Path) -> None:
    page, counts = page_of(write(tmp_path, ROWS))
    blocks = blocks_of(page)
    first, second = blocks["block-0"]
    assert (first["prompt"], first["gold"]) == ("How many?\n", "47")
    one = first["rollouts"][0]
    assert one["steps"] == ["a\n", "b\n", "c\n"]
    assert one["advantages"] == [[0.5, 0.5, 0.5], [0.25, -0.25, 0.5]]
    assert one["values"] == [[], [0.5, 0.75, 0.5]]
    assert one["marks"] == [[2, 0.25]]
    assert second["rollouts"][0]["marks"] == []
    assert second["rollouts"][0]["believed"] == []
    index = blocks["index"]
    assert index["estimators"] == [["", "trained with", 1.0, 0], ["vineppo", "vineppo", 0.5, 1]]
    assert index["groups"]["iteration"] == [1, 2]
    assert index["groups"]["ids"] == [["rl-0/p/0", "rl-0/p/1"], ["rl-1/q/0"]]
    assert (index["groups"]["right"], index["groups"]["worst"]) == ([1, 1], [0.5, 0.0])
    assert index["disagreements"] == [[0, 1, 1, 0, 1, -0.75, 0.5], [0, 0, 2, 0, 1, 0.5, -0.25]]
    assert counts == {"rollouts": 3, "estimators": 2, "disagreements": 2}


def test_the_smallest_disagreements_are_left_out_and_the_page_says_so(tmp_path: Path) -> None:
    page, counts = page_of(write(tmp_path, ROWS), max_disagreements=1)
    assert [row[2] for row in blocks_of(page)["index"]["disagreements"]] == [1]
    assert "The 1 smallest are not listed (stage.max_disagreements)." in page
    assert counts["disagreements"] == 2


def test_samples_without_further_estimators_make_a_page_too(tmp_path: Path) -> None:
    rows = [replace(row, estimator_advantages={}, estimator_values={}) for row in ROWS]
    folder = write(tmp_path, rows)
    for path in (folder / "samples").iterdir():  # as they were written before there were any
        old = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text(
            "".join(json.dumps({k: v for k, v in row.items() if "estimator" not in k}) + "\n" for row in old)
        )
    page, counts = page_of(folder)
    assert counts == {"rollouts": 3, "estimators": 1, "disagreements": 0}
    assert "Nothing to compare: the run&#x27;s own estimator alone" in page


def test_groups_stay_whole_when_their_blocks_are_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("espalier.analysis.credit_page.BLOCK_CHARACTERS", 1)
    blocks = blocks_of(page_of(write(tmp_path, ROWS))[0])
    assert [len(blocks[f"block-{number}"]) for number in (0, 1)] == [1, 1]
    assert blocks["index"]["groups"]["block"] == [0, 1]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"estimator_advantages": {"rloo": [0.1]}},
            r"has 2 steps, and its estimator_advantages of rloo are not 2 numbers",
        ),
        ({"step_values": [0.1]}, "has 2 steps, and its step_values are not 2 numbers"),
        ({"estimator_values": {"rloo": "high"}}, "estimator_values of rloo are not"),
    ],
)
def test_numbers_of_other_steps_are_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    folder = write(tmp_path, [rollout("p/0", 1, [0.5, 0.5], **changes)])
    with pytest.raises(BadInput, match=rf"iteration-000001\.jsonl: 'rl-0/p/0' {words}|{words}"):
        read_credit_run(folder)


def test_a_folder_without_samples_and_settings_out_of_range_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"has no samples/iteration-\*\.jsonl: set stage\.run_dir"):
        InspectCredit(str(tmp_path)).inputs()
    with pytest.raises(BadInput, match=r"stage\.min_advantage must be above 0, got 0"):
        InspectCredit("run", min_advantage=0.0)
    with pytest.raises(BadInput, match=r"stage\.max_disagreements must be 0 or more, got -1"):
        InspectCredit("run", max_disagreements=-1)


# --- the page -----------------------------------------------------------------------------------------------


def hostile_row() -> SampledRollout:
    """Hostile text wherever text can stand."""
    name = f"e{HOSTILE}"
    return rollout(
        f"p{HOSTILE}/0", 1, [0.5, -0.5], prompt=HOSTILE, gold=HOSTILE, answer=HOSTILE, finish_reason=HOSTILE,
        steps=[HOSTILE, HOSTILE], estimator_advantages={name: [-0.5, 0.5]}, estimator_values={name: [0.5, 0.5]},
        reward_answers={HOSTILE: 0.25, "rice": 0.5},
    )  # fmt: skip


def test_hostile_text_is_neither_markup_nor_a_reference(tmp_path: Path) -> None:
    page, _ = page_of(write(tmp_path, [hostile_row()]))
    parser = Elements()
    parser.feed(page)
    assert parser.open == []
    assert parser.opened.count("script") == 3, "the index, one block, the page's own"
    assert "pwned = 1</script>" not in page
    assert "<img" not in page
    assert all(name == "href" and value.startswith(("#", "data:,")) for name, value in parser.attributes)
    assert not re.search(r"https?://|@import|url\(", page)
    page.encode("utf-8")


def dom_of(run_dir: Path, choice: str = "") -> str:
    """What the browser has made of the page, at an address with a choice in it."""
    address = f"{(run_dir / 'credit.html').as_uri()}#{choice}"
    done = browse(run_dir, address, "--dump-dom", "--virtual-time-budget=5000")
    assert "CONSOLE" not in done.stderr, done.stderr
    assert 'data-ready="true"' in done.stdout
    return done.stdout


def groups_in(dom: str) -> list[str]:
    """The problems of the listed groups."""
    pattern = r'class="card group".*?<code>(.*?)</code>'
    return [html.unescape(name) for name in re.findall(pattern, dom, re.DOTALL)]


def test_the_browser_opens_what_an_address_names(tmp_path: Path) -> None:
    folder = write(tmp_path, ROWS)
    page_of(folder)
    last = dom_of(folder)
    assert groups_in(last) == ["q"], "the last iteration, if none is named"
    found = dom_of(folder, "it=1&p=p&r=rl-0/p/0&e=vineppo&step=2")
    assert groups_in(found) == ["p"]
    assert found.count('class="detail"') == 1
    assert re.search(r'<tr class="here"><th class="">2</th>|<tr class="here"><th>2</th>', found)
    assert "−0.25" in found
    assert "value 0.75" in found
    (strip,) = re.findall(r'class="strip">(.*?)</span>', found.split("rl-0")[-1], re.DOTALL)[:1] or [""]
    # scale 0.5: +0.25 is half of it, -0.25 half and marked, +0.5 all
    assert re.findall(r'<i class="([^"]+)"', strip)[:3] == ["p2", "n2 marked", "p3"]


def test_the_browser_shows_the_probabilities_that_a_rollout_was_rewarded_by(tmp_path: Path) -> None:
    believed = rollout("p/0", 1, [0.5], reward_answers={"fish": 0.6, "rice": 0.3})
    folder = write(tmp_path, [believed, rollout("q/0", 1, [0.5])])
    page, _ = page_of(folder)
    assert blocks_of(page)["block-0"][0]["rollouts"][0]["believed"] == [["fish", 0.6], ["rice", 0.3]]
    shown = "rewarded by the probabilities <code>fish</code> 0.60, <code>rice</code> 0.30</p>"
    for name, number in (("p", 1), ("q", 0)):
        found = dom_of(folder, f"it=1&p={name}&r=rl-0/{name}/0")
        assert found.count('class="detail"') == 1
        assert found.count(shown) == number


def test_the_browser_lists_disagreements_and_searches(tmp_path: Path) -> None:
    folder = write(tmp_path, [*ROWS, rollout("r/0", 3, [0.1, 0.2], steps=["needle", "x"])])
    page_of(folder)
    dom = dom_of(folder, "it=all&q=NEEDLE&in=text")
    assert groups_in(dom) == ["r"]
    listed = re.search(r'id="disagreement-list".*?</table>', dom, re.DOTALL)
    assert listed is not None
    assert re.findall(r"<code>(rl-[^<]*)</code>", listed[0]) == ["rl-0/p/1", "rl-0/p/0"]
    assert groups_in(dom_of(folder, "it=all&only=marked")) == ["p"]
    assert groups_in(dom_of(folder, "it=all")) == ["p", "q", "r"]


def test_the_browser_opens_hostile_text_as_text(tmp_path: Path) -> None:
    folder = write(tmp_path, [hostile_row()])
    page_of(folder)
    dom = dom_of(folder, "it=1&e=*")
    assert dom.count("&lt;img src=x onerror=") >= 3
    assert "<img" not in dom
    assert dom.count("<script") == 3


@pytest.mark.slow
def test_24_iterations_of_64_rollouts_open_in_seconds(tmp_path: Path) -> None:
    """8 problems of 8 rollouts an iteration, 20 steps of random words each, three estimators."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnop", k=rng.randint(2, 9))) for _ in range(4000)]
    rows = []
    for iteration in range(1, 25):
        for number in range(64):
            numbers = [[rng.gauss(0, 1) for _ in range(20)] for _ in range(3)]
            steps = [" ".join(rng.choices(words, k=12)) + "\n" for _ in range(20)]
            further = {"rloo": numbers[1], "vineppo": numbers[2]}
            rows.append(rollout(f"p{number // 8}/{number % 8}", iteration, numbers[0], is_correct=rng.random() < 0.5,
                                steps=steps, estimator_advantages=further, estimator_values=further))  # fmt: skip
    folder = write(tmp_path, rows)
    page, counts = page_of(folder)
    assert counts["rollouts"] == 1536
    assert len(page) < 5e6
    started = time.monotonic()
    dom = dom_of(folder, "it=24&p=p7&r=rl-23/p7/7&e=*")
    assert time.monotonic() - started < 60, "the browser's own start included"
    assert len(groups_in(dom)) == 8
    assert dom.count('class="detail"') == 1
