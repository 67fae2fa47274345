"""Running an offline stage: skipped when it is done, refused when it is another, nothing half made."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from espalier.data.jsonl import file_sha256, read_records, write_records
from espalier.data.records import BadInput, Demonstration, Problem, State, Trajectory
from espalier.pipeline.stage import StageContext, run_stage
from espalier.runtime.entrypoint import build
from espalier.runtime.process_lifetime import Busy, exclusive
from espalier.runtime.schemas import StageConfig, TrackingConfig

ROOT = Path(__file__).resolve().parent.parent.parent
ROWS = [Demonstration("a", "1 + 1?", "#### 2"), Demonstration("b", "2 + 2?", "#### 4")]


@dataclass
class Copy:
    """A stage that copies its input; it counts its runs and can fail on the way."""

    extra: str = ""
    fails_after: int = 99
    kind: str = "records"
    num_runs: int = 0

    def inputs(self) -> list[str]:
        """One more file, if there is one."""
        return [self.extra] if self.extra else []

    def run(self, input_path: str, context: StageContext) -> Any:
        """The input again, in the asked kind of output."""
        self.num_runs += 1
        rows = read_records(Demonstration, input_path)
        context.counts["read"] = len(rows)
        return {"records": self._rows(rows), "document": {"rows": len(rows)}, "page": "<p>naïve</p>"}[self.kind]

    def _rows(self, rows: list[Demonstration]) -> Iterator[Demonstration]:
        for number, row in enumerate(rows):
            if number == self.fails_after:
                raise RuntimeError("the stage failed")
            yield row


@pytest.fixture
def config(tmp_path: Path) -> StageConfig:
    write_records(tmp_path / "in.jsonl", ROWS)
    return StageConfig(output=str(tmp_path / "out.jsonl"), input=str(tmp_path / "in.jsonl"), stage={"_target_": "Copy"})


def names(tmp_path: Path) -> list[str]:
    """What stands there, but for locks."""
    return sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith("."))


def test_an_output_whose_provenance_would_take_the_place_of_its_inputs_is_refused(
    tmp_path: Path, config: StageConfig
) -> None:
    """in.json beside in.jsonl: both have in.meta.json, in which the input's sampling is resumed."""
    (tmp_path / "in.meta.json").write_text('{"is_complete": true}')
    stage = Copy(kind="document")
    with pytest.raises(BadInput, match=r"in\.json: its in\.meta\.json is that of .*in\.jsonl"):
        run_stage(stage, None, replace(config, output=str(tmp_path / "in.json")))
    assert stage.num_runs == 0
    assert (tmp_path / "in.meta.json").read_text() == '{"is_complete": true}'


def test_a_stage_writes_its_output_and_its_provenance(config: StageConfig, tmp_path: Path) -> None:
    assert run_stage(Copy(), None, config) == 0
    assert names(tmp_path) == ["in.jsonl", "out.jsonl", "out.meta.json"]
    assert read_records(Demonstration, config.output) == ROWS
    meta = json.loads((tmp_path / "out.meta.json").read_text())
    assert meta["config"]["input"] == config.input
    assert meta["inputs"] == {config.input: file_sha256(config.input)}
    assert meta["counts"] == {"read": 2, "rows": 2}
    assert meta["seconds"] >= 0
    assert "commit" in meta
    assert "torch" in meta["versions"]


@pytest.mark.parametrize(("kind", "name", "text"), [("document", "out.json", '{\n "rows": 2\n}\n'),
                                                    ("page", "out.html", "<p>naïve</p>")])  # fmt: skip
def test_a_stage_may_return_one_document_or_one_page(
    kind: str, name: str, text: str, config: StageConfig, tmp_path: Path
) -> None:
    assert run_stage(Copy(kind=kind), None, replace(config, output=str(tmp_path / name))) == 0
    assert (tmp_path / name).read_text(encoding="utf-8") == text
    assert names(tmp_path) == ["in.jsonl", name, "out.meta.json"]


def test_a_finished_output_is_not_made_again(config: StageConfig, tmp_path: Path) -> None:
    stage = Copy()
    run_stage(stage, None, config)
    before = (tmp_path / "out.jsonl").stat()
    assert run_stage(stage, None, config) == 0
    assert stage.num_runs == 1
    assert (tmp_path / "out.jsonl").stat() == before


@pytest.mark.parametrize(("rows", "code"), [(2, 0), (0, 1)])
def test_what_was_rejected_is_said_again_and_an_output_of_nothing_stays_an_error(
    rows: int, code: int, config: StageConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_stage(Copy(), None, config)
    meta = tmp_path / "out.meta.json"
    stored = json.loads(meta.read_text())
    meta.write_text(json.dumps({**stored, "counts": {"rows": rows, "rejected": 3}}))
    assert run_stage(Copy(), None, config) == code
    assert "is complete without 3 rows that were rejected" in caplog.text


def test_how_progress_is_shown_does_not_make_another_run(config: StageConfig) -> None:
    stage = Copy()
    run_stage(stage, None, config)
    assert run_stage(stage, None, replace(config, tracking=TrackingConfig(line_every_seconds=1.0))) == 0
    assert stage.num_runs == 1


def test_who_scores_does_not_make_another_output(config: StageConfig) -> None:
    stage = Copy()
    for window in (512, 2048):
        assert run_stage(stage, None, replace(config, client={"max_model_len": window})) == 0
    assert stage.num_runs == 1


def test_a_changed_config_is_refused_and_nothing_overwritten(config: StageConfig, tmp_path: Path) -> None:
    run_stage(Copy(), None, config)
    digest = file_sha256(config.output)
    with pytest.raises(BadInput, match=r"out.jsonl was made otherwise \(seed was 0, now 1\): choose another output"):
        run_stage(Copy(), None, replace(config, seed=1))
    with pytest.raises(BadInput, match=r"stage.margin was None, now 0.5"):
        run_stage(Copy(), None, replace(config, stage={"_target_": "Copy", "margin": 0.5}))
    assert file_sha256(config.output) == digest


def test_a_changed_input_is_refused(config: StageConfig) -> None:
    run_stage(Copy(), None, config)
    write_records(config.input, ROWS[:1])
    with pytest.raises(BadInput, match=f"its input {config.input} has changed"):
        run_stage(Copy(), None, config)
    assert read_records(Demonstration, config.output) == ROWS


def test_a_model_that_was_trained_again_is_refused(config: StageConfig, tmp_path: Path) -> None:
    weights = tmp_path / "prm" / "model.safetensors"
    weights.parent.mkdir()
    weights.write_bytes(b"old")
    made = replace(config, stage={"_target_": "Copy", "model": str(weights.parent)})
    run_stage(Copy(), None, made)
    assert run_stage(Copy(), None, made) == 0
    weights.write_bytes(b"new")
    with pytest.raises(BadInput, match=f"its input {weights.parent} has changed"):
        run_stage(Copy(), None, made)


@dataclass
class Ask:
    """A stage that asks its task for the problems of a split."""

    split: str = "test"

    def inputs(self) -> list[str]:
        """None."""
        return []

    def run(self, input_path: str, context: StageContext) -> list[Problem]:
        """The problems."""
        problems: list[Problem] = context.task.problems(self.split)
        return problems


def asking(tmp_path: Path, **task: Any) -> tuple[Any, StageConfig]:
    """A task of the file test.jsonl, and the config of a stage that asks for its problems."""
    node = {"_target_": "espalier.data.tasks.problem_file.ProblemFile", "kind": "marked_number", **task}
    output = str(tmp_path / "problems.jsonl")
    return build(node), StageConfig(output=output, input="", task=node, stage={"_target_": "Ask"})


@pytest.mark.parametrize("name", ["test.jsonl", ""])
def test_a_changed_file_of_the_tasks_problems_is_refused_and_one_of_another_split_is_not(
    name: str, tmp_path: Path
) -> None:
    asked = tmp_path / "data" / "test.jsonl"
    write_records(asked, [Problem("a", "1 + 1?", "2")])
    task, made = asking(tmp_path, path=str(asked.parent / name))
    assert run_stage(Ask(), task, made) == 0
    write_records(asked.with_name("train.jsonl"), [Problem("b", "2 + 2?", "4")])
    assert run_stage(Ask(), task, made) == 0
    write_records(asked, [Problem("a", "1 + 1?", "3")])
    with pytest.raises(BadInput, match=f"its input {asked} has changed"):
        run_stage(Ask(), task, made)
    meta = tmp_path / "problems.meta.json"
    stored = json.loads(meta.read_text())
    meta.write_text(json.dumps({**stored, "inputs": {}}))  # as an earlier version wrote it
    assert run_stage(Ask(), task, made) == 0


def test_a_changed_file_of_the_prompts_worked_examples_is_refused(tmp_path: Path) -> None:
    shots = tmp_path / "shots.jsonl"
    shots.write_text('{"question": "1 + 2?", "response": "#### 3"}\n')
    write_records(tmp_path / "test.jsonl", [Problem("a", "1 + 1?", "2")])
    template = {"_target_": "espalier.data.prompts.PromptTemplate", "shots_path": str(shots), "num_shots": 1}
    task, made = asking(tmp_path, path=str(tmp_path / "test.jsonl"), template=template)
    assert run_stage(Ask(), task, made) == 0
    shots.write_text('{"question": "1 + 2?", "response": "It is 3. #### 3"}\n')
    with pytest.raises(BadInput, match=f"its input {shots} has changed"):
        run_stage(Ask(), task, made)


def test_a_task_whose_files_are_not_there_does_not_end_a_stage_that_asks_for_no_problem(
    config: StageConfig, tmp_path: Path
) -> None:
    task, _ = asking(tmp_path, path=str(tmp_path / "gone"))
    stage = Copy()
    stage.split = "test"  # type: ignore[attr-defined]
    assert run_stage(stage, task, config) == 0


def test_a_changed_file_beside_the_input_is_refused(config: StageConfig, tmp_path: Path) -> None:
    extra = tmp_path / "extra.jsonl"
    extra.write_text("{}\n")
    run_stage(Copy(extra=str(extra)), None, config)
    extra.write_text("{} \n")
    with pytest.raises(BadInput, match=f"its input {extra} has changed"):
        run_stage(Copy(extra=str(extra)), None, config)


@dataclass
class ReadFolder:
    """A stage that reads the files that it finds in a folder."""

    folder: Path
    finds_inputs: bool = True

    def inputs(self) -> list[str]:
        """What is there."""
        return sorted(str(path) for path in self.folder.glob("*.txt"))

    def run(self, input_path: str, context: StageContext) -> dict[str, str]:
        """Their texts."""
        return {Path(path).name: Path(path).read_text() for path in self.inputs()}


def reading(tmp_path: Path) -> tuple[Path, StageConfig]:
    """A folder with a file, and the config of a stage that reads it."""
    (tmp_path / "found").mkdir()
    (tmp_path / "found" / "a.txt").write_text("a")
    stage = {"_target_": "ReadFolder"}
    return tmp_path / "found", StageConfig(output=str(tmp_path / "out.json"), input="", stage=stage)


def test_an_output_of_found_inputs_is_made_anew_where_another_one_is_there_and_nothing_else_has_changed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, made = reading(tmp_path)
    run_stage(ReadFolder(folder), None, made)
    (folder / "b.txt").write_text("b")
    with caplog.at_level("INFO"):
        assert run_stage(ReadFolder(folder), None, made) == 0
    assert f"{made.output} is made anew: {folder}/b.txt was not there before" in caplog.text
    assert json.loads(Path(made.output).read_text()) == {"a.txt": "a", "b.txt": "b"}
    before = Path(made.output).stat()
    assert run_stage(ReadFolder(folder), None, made) == 0
    assert Path(made.output).stat() == before, "is complete"
    (folder / "c.txt").write_text("c")
    (folder / "a.txt").write_text("other")
    with pytest.raises(BadInput, match=f"its input {folder}/a.txt has changed"):
        run_stage(ReadFolder(folder), None, made)
    (folder / "a.txt").unlink()
    (folder / "c.txt").unlink()
    assert run_stage(ReadFolder(folder), None, made) == 0
    assert Path(made.output).stat() == before, "what is gone cannot be read again"


def test_an_output_of_named_inputs_stays_where_an_earlier_version_did_not_list_one_of_them(tmp_path: Path) -> None:
    folder, made = reading(tmp_path)
    run_stage(ReadFolder(folder, finds_inputs=False), None, made)
    (folder / "b.txt").write_text("b")
    assert run_stage(ReadFolder(folder, finds_inputs=False), None, made) == 0
    assert json.loads(Path(made.output).read_text()) == {"a.txt": "a"}


def test_a_missing_input_is_refused_before_anything_runs(config: StageConfig, tmp_path: Path) -> None:
    stage = Copy(extra=str(tmp_path / "gone.jsonl"))
    with pytest.raises(BadInput, match=r"gone.jsonl: no such file") as caught:
        run_stage(stage, None, config)
    assert caught.value.exit_code == 2
    assert stage.num_runs == 0


@pytest.mark.parametrize(("is_complete", "warned"), [(False, True), (True, False)])
def test_an_input_whose_sampling_was_cut_is_warned_of(
    is_complete: bool, warned: bool, config: StageConfig, caplog: pytest.LogCaptureFixture
) -> None:
    meta = Path(config.input).with_suffix(".meta.json")
    meta.write_text(json.dumps({"is_complete": is_complete}))
    run_stage(Copy(), None, config)
    assert ("is not complete: the command that writes it goes on" in caplog.text) is warned


def test_an_empty_input_and_an_output_without_rows_are_warned_of(
    config: StageConfig, caplog: pytest.LogCaptureFixture
) -> None:
    Path(config.input).write_text("\n")
    assert run_stage(Copy(), None, config) == 0
    assert f"{config.input} is empty" in caplog.text
    assert f"{config.output} has no rows" in caplog.text
    assert run_stage(Copy(), None, config) == 0
    assert f"{config.output} is complete and has no rows" in caplog.text


@pytest.mark.parametrize("text", ["[1]", "no JSON"])
def test_somebody_elses_file_by_the_name_of_an_inputs_provenance_does_no_harm(text: str, config: StageConfig) -> None:
    Path(config.input).with_suffix(".meta.json").write_text(text)
    assert run_stage(Copy(), None, config) == 0


def test_a_stage_that_fails_leaves_nothing_and_can_be_run_again(config: StageConfig, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="the stage failed"):
        run_stage(Copy(fails_after=1), None, config)
    assert names(tmp_path) == ["in.jsonl"]
    assert run_stage(Copy(), None, config) == 0
    assert read_records(Demonstration, config.output) == ROWS


def test_an_output_that_is_being_written_is_not_written_twice(config: StageConfig) -> None:
    second = exclusive(Path(config.output), wait_seconds=0.0)
    with exclusive(Path(config.output)), pytest.raises(Busy, match=r"out.jsonl is being written by another"):
        second.__enter__()
    assert run_stage(Copy(), None, config) == 0


def test_an_output_whose_provenance_was_not_yet_written_is_complete(config: StageConfig, tmp_path: Path) -> None:
    stage = Copy()
    run_stage(stage, None, config)
    (tmp_path / "out.meta.json").unlink()
    assert run_stage(stage, None, config) == 0
    assert stage.num_runs == 1


def test_an_empty_folder_in_place_of_the_output_is_refused_and_not_taken_for_done(
    config: StageConfig, tmp_path: Path
) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(BadInput, match="folder: is an empty folder: name a file"):
        run_stage(Copy(), None, replace(config, output=str(tmp_path / "folder")))


def test_an_input_is_never_taken_for_the_output(config: StageConfig, tmp_path: Path) -> None:
    before = file_sha256(config.input)
    with pytest.raises(BadInput, match="is an input of this stage"):
        run_stage(Copy(), None, replace(config, output=str(tmp_path / "." / "in.jsonl")))
    assert file_sha256(config.input) == before


# --- the program --------------------------------------------------------------------------------------------


def run_program(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "run_stage.py"), *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60, check=False)


def test_the_program_runs_a_stage_and_ends_with_zero(tmp_path: Path) -> None:
    row = Trajectory("p/0", "p", "Q\n", "a\nb", ["a\n", "b"], [9], [1, 2], [1, 2], "stop", "7", "7", True)
    write_records(tmp_path / "t.jsonl", [row])
    done = run_program("-cn", "values/cut_states", "input=t.jsonl", "output=s.jsonl", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [state.id for state in read_records(State, tmp_path / "s.jsonl")] == ["p/0#1"]
    assert names(tmp_path) == ["s.jsonl", "s.meta.json", "t.jsonl"]


def test_the_program_ends_with_two_and_one_line_where_the_input_is_missing(tmp_path: Path) -> None:
    done = run_program("-cn", "values/cut_states", "input=gone.jsonl", "output=s.jsonl", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.strip() == ("error: gone.jsonl: no such file: check the path, or run the stage that writes it")
    assert names(tmp_path) == []
