"""The report's example trajectories: every step in its row, with its Monte-Carlo value and its PRM score."""

from collections.abc import Sequence

from espalier.analysis.charts import bar
from espalier.analysis.example_trajectories import ExampleProblem, ScoredTrajectory
from espalier.analysis.markup import Markup, tag
from espalier.analysis.sections import note, section

_LONGEST_STEP = 600
_SHOWN_DROP = 0.25


def _value_cell(value: float, title: str) -> Markup:
    kind = f"v{min(4, max(0, int(value * 5)))}"
    return tag("td", bar(value, kind, title), tag("span", f"{value:.2f}", class_="num"), class_="score")


def _step_text(text: str) -> Markup:
    if not text.strip():
        return tag("i", "(blank)", class_="muted")
    if len(text) > _LONGEST_STEP:
        text = f"{text[:_LONGEST_STEP]} … ({len(text) - _LONGEST_STEP:,} more characters)"
    return tag("span", text.rstrip("\n"), class_="step")


def _step_row(trajectory: ScoredTrajectory, index: int, is_shared: bool) -> Markup:
    row = trajectory.row
    value, score = trajectory.values[index], trajectory.scores[index]
    parts = [_step_text(row.steps[index])]
    drop = trajectory.values[index - 1] - value if index else 0.0
    if drop >= _SHOWN_DROP:
        text = f"\N{BLACK DOWN-POINTING TRIANGLE} \N{MINUS SIGN}{drop:.2f}"
        parts.append(tag("span", text, class_="drop", title=f"the value falls by {drop:.2f} in this step"))
    source = f"{row.num_correct[index]} of {row.num_completions[index]} completions are right"
    if index == len(row.steps) - 1:
        source = f"the outcome: {'right' if row.is_correct else 'wrong'}"
    cells = [_value_cell(value, f"value {value:.2f}: {source}"), _value_cell(score, f"PRM score {score:.3f}")]
    return tag("tr", tag("td", *parts), *cells, class_="shared" if is_shared else None)


def _trajectory(trajectory: ScoredTrajectory, num_shared: int) -> Markup:
    row = trajectory.row
    rows = [_step_row(trajectory, index, index < num_shared) for index in range(len(row.steps))]
    badge = tag("span", "\N{CHECK MARK} right", class_="badge good")
    if not row.is_correct:
        badge = tag("span", "\N{MULTIPLICATION X} wrong", class_="badge bad")
    head = tag("tr", *(tag("th", name, scope="col") for name in ("step", "value", "PRM")))
    table = tag("table", tag("thead", head), tag("tbody", *rows), class_="steps")
    return tag("div", tag("p", badge, tag("code", row.id)), table)


def _problem(example: ExampleProblem) -> Markup:
    gold = tag("p", "gold answer ", tag("code", example.gold), class_="muted") if example.gold else ""
    prompt = tag("p", example.trajectories[0].row.prompt.strip(), class_="prompt")
    columns = [_trajectory(trajectory, example.num_shared) for trajectory in example.trajectories]
    title = tag("h3", example.title)
    return tag("article", title, prompt, gold, tag("div", *columns, class_="two"), class_="card")


def examples_section(examples: Sequence[ExampleProblem]) -> Markup:
    """Return problems with one or two trajectories each; one sentence where there is none."""
    name, title = "examples", "Example trajectories"
    if not examples:
        return section(name, title, note("None: no step values or scores, or no problem is held out."))
    explained = tag(
        "p",
        "Held-out problems. ",
        tag("b", "value"),
        " is the share of completions after the step that end right (after the last step, the outcome); ",
        tag("b", "PRM"),
        " is the reward model's score of the step.",
    )
    chosen = note(
        "Chosen, not random: problems where a value falls most in one step, and the trajectory that the PRM"
        " misjudges most. Faded steps are the same in both columns."
    )
    return section(name, title, explained, *map(_problem, examples), chosen)
