"""The card of a model, and what reaches a hub: a server of the hub's documented calls on loopback."""

import base64
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from espalier.data.records import BadInput
from espalier.models.load import load_tokenizer
from espalier.models.scalar_head import load_process_reward
from espalier.pipeline.stage import StageContext
from espalier.pipeline.training.model_card import Figure, figures_of, read_facts, without_folders
from espalier.pipeline.training.publish_model import PublishModel
from espalier.runtime.entrypoint import compose_config
from espalier.runtime.fingerprints import input_fingerprints
from espalier.runtime.manifest import write_manifest
from espalier.runtime.schemas import StageConfig

ROOT = Path(__file__).resolve().parent.parent.parent
CONFIG = {
    "model": {"_target_": "espalier.models.scalar_head.load_process_reward", "path": "/home/ada/policy/model"},
    "objective": {"_target_": "espalier.training.objectives.process_reward.ProcessRewardObjective"},
    "examples": {"path": "/home/ada/run/step_values.jsonl"},
    "update": {"learning_rate": 1e-5}, "seed": 3,
}  # fmt: skip
VALUES = hashlib.sha256(b'{"id": "a"}\n').hexdigest()[:16]
FIGURES = {"inner": {"auc": {"mean": 0.9164, "low": 0.8979, "high": 0.9354, "n": 265}, "num_steps": 6532}, "bins": []}


@pytest.fixture
def run(tmp_path: Path, tiny_policy: Path) -> Path:
    """A finished run of a process reward model, and a file of its figures."""
    model = tmp_path / "prm" / "model"
    load_process_reward(str(tiny_policy), num_labels=1).save_pretrained(model)
    load_tokenizer(str(tiny_policy)).save_pretrained(model)
    write_manifest(model)
    values = tmp_path / "step_values.jsonl"
    values.write_text('{"id": "a"}\n')
    values.with_suffix(".meta.json").write_text(json.dumps({"counts": {"rows": 1200, "mean": 0.5}}))
    (model.parent / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    (model.parent / "provenance.yaml").write_text(yaml.safe_dump({
        "commit": "0123abcd", "versions": {"torch": "2.13"},
        "inputs": {**input_fingerprints({"path": str(values)}), str(tiny_policy): "e" * 64},
    }))  # fmt: skip
    (tmp_path / "prm.json").write_text(json.dumps(FIGURES))
    return model


def card_of(run: Path, **settings: Any) -> str:
    stage = PublishModel(str(run), figures=[str(run.parent.parent / "prm.json")], **settings)
    return stage.run("", StageContext(None, run.parent / "card.md", 0.0))


def test_a_card_says_kind_base_data_settings_figures_and_names_no_folder_of_this_machine(run: Path) -> None:
    card = card_of(run, name="ada/prm", license="apache-2.0")
    head = yaml.safe_load(card.split("---")[1])
    assert head["tags"] == ["espalier", "reasoning", "process-reward-model"]
    assert head["license"] == "apache-2.0"
    assert "base_model" not in head, "model would be somebody else's on the hub"
    assert "trained from `model`" in card
    assert "A process reward model: its score of a step" in card
    assert "| inner auc | 0.916 | [0.898, 0.935] | 265 |" in card
    assert f"| `step_values.jsonl` | rows 1,200, mean 0.5 | `{VALUES}` |" in card
    assert "learning_rate: 1.0e-05" in card
    assert "Espalier 0123abcd; torch 2.13." in card
    for folder in ("/home/ada", str(run.parent.parent)):
        assert folder not in card


def test_a_card_names_the_tracked_run(run: Path) -> None:
    assert "W&B" not in card_of(run)
    (run.parent / "wandb_id").write_text("00ff\n")
    (run.parent / "config.yaml").write_text(yaml.safe_dump({**CONFIG, "tracking": {"project": "prms"}}))
    assert "Its curves: W&B run `prms/00ff`." in card_of(run)


def test_the_code_on_a_card_runs(run: Path) -> None:
    """With the folder in place of the repository's name."""
    card = card_of(run, repository="").replace('load_prm("prm")', f'load_prm("{run}")')
    found: dict[str, Any] = {}
    exec(card.split("```python\n")[1].split("```")[0], found)
    assert [len(row) for row in found["scores"]] == [2]


def test_kinds_of_models_are_told_apart(run: Path, tiny_policy: Path, tmp_path: Path) -> None:
    assert read_facts(run).kind == "process reward model"
    assert read_facts(tiny_policy).kind == "policy"
    (run / "log_ratio_reward.json").write_text("{}")
    assert read_facts(run).kind == "two policies"
    (run / "log_ratio_reward.json").unlink()
    verifying = {**CONFIG, "examples": {"_target_": "espalier.data.examples.verifier_examples.VerifierExamples"}}
    facts = read_facts(tiny_policy)
    (run.parent / "config.yaml").write_text(yaml.safe_dump(verifying))
    network = (run / "config.json").read_text()
    (run / "config.json").write_text((tiny_policy / "config.json").read_text())
    assert (facts.kind, read_facts(run).kind) == ("policy", "generative verifier")
    (command,) = [line for line in card_of(run).splitlines() if "run_stage.py" in line]
    words = command.split()
    compose_config(StageConfig, "stage/prm/score_by_verifier", words[words.index("-cn") + 2 :])
    (run / "config.json").write_text(network)
    judged = {**CONFIG, "objective": {"_target_": "espalier.training.objectives.bradley_terry.BradleyTerryObjective"}}
    (run.parent / "config.yaml").write_text(yaml.safe_dump(judged))
    assert read_facts(run).kind == "reward model"
    (command,) = [line for line in card_of(run).splitlines() if "run_stage.py" in line]
    words = command.split()
    compose_config(StageConfig, "stage/evaluation/score_responses", words[words.index("-cn") + 2 :])
    with pytest.raises(BadInput, match=r"has no config\.json: name a model folder"):
        read_facts(tmp_path)


def test_a_card_says_where_scores_were_not_read_as_published(run: Path, tmp_path: Path) -> None:
    scores = {"config": {"stage": {"scores": str(tmp_path / "step_scores.jsonl")}}}
    (tmp_path / "prm.meta.json").write_text(json.dumps(scores))
    assert "not as published" not in card_of(run)
    (tmp_path / "step_scores.meta.json").write_text(json.dumps({"counts": {"deviations": "system='Be brief.'"}}))
    assert "`prm.json (scores not as published: system='Be brief.')`" in card_of(run)


def test_figures_are_the_rows_of_a_table_or_else_whatever_has_an_interval() -> None:
    row = {"metric": "greedy", "mean": 0.5, "low": 0.4, "high": 0.6, "n": 10, "unit": "share"}
    tokens = {"metric": "length", "mean": 31.0, "low": 30.0, "high": 32.0, "n": 10, "unit": "tokens"}
    assert list(figures_of({"accuracy": {"greedy": row}, "table": {"rows": [row, tokens]}})) == [
        Figure("greedy", 0.5, 0.4, 0.6, 10), Figure("length", 31.0, 30.0, 32.0, 10, "tokens")]  # fmt: skip
    assert [figure.name for figure in figures_of(FIGURES)] == ["inner auc"]
    assert list(figures_of({"auc": {"mean": None, "low": None, "high": None, "n": 0}})) == []


def test_absolute_paths_of_a_config_become_their_last_names() -> None:
    assert without_folders({"a": ["/x/y/z.jsonl", "own/z"], "b": 1}) == {"a": ["z.jsonl", "own/z"], "b": 1}


def test_absolute_paths_inside_of_values_become_their_last_names_and_tags_and_addresses_stay() -> None:
    shown = {
        "task.path=/home/ada/own/train.jsonl": "task.path=train.jsonl",
        "--lora-modules mine=/home/ada/adapter,other=~ada/x/y": "--lora-modules mine=adapter,other=y",
        "file:///home/ada/log.txt": "file://log.txt",
        "['/home/ada/a.jsonl', '/home/ada/b.jsonl']": "['a.jsonl', 'b.jsonl']",
    }
    assert without_folders({"all": list(shown)}) == {"all": list(shown.values())}
    assert without_folders({"all": tuple(shown)}) == {"all": list(shown.values())}
    kept = ["http://127.0.0.1:8000/v1/models", "[INST] a [/INST]", "<think>a</think>", "1/2 and/or 3 / 4", "own/z",
            "/no_think\nHow much is 6 / 2?", "Qwen/Qwen3-4B"]  # fmt: skip
    assert without_folders(kept) == kept


def test_files_of_one_name_keep_their_figures_apart_and_data_of_one_name_are_refused(run: Path, tmp_path: Path) -> None:
    """Every evaluation is called evaluation.json; two data files of a name would be one file of a repository."""
    files = []
    for name, mean in (("before", 0.25), ("after", 0.75)):
        files.append(tmp_path / name / "evaluation.json")
        files[-1].parent.mkdir()
        files[-1].write_text(json.dumps({"greedy": {"mean": mean, "low": 0.1, "high": 0.9, "n": 4}}))
    stage = PublishModel(str(run), figures=[str(path) for path in files])
    card = stage.run("", StageContext(None, tmp_path / "card.md", 0.0))
    assert card.index("`before/evaluation.json`") < card.index("0.250") < card.index("`after/evaluation.json`")
    with pytest.raises(BadInput, match=r"all be 'train\.jsonl' in the repository"):
        PublishModel(str(run), data=["a/train.jsonl", "b/train.jsonl"], repository="ada/prm", data_repository="ada/x")


def test_counts_and_hash_of_data_that_changed_since_the_training_are_not_given(run: Path, tmp_path: Path) -> None:
    (tmp_path / "step_values.jsonl").write_text('{"id": "b"}\n')
    assert "| `step_values.jsonl` | not known | changed since, or not there |" in card_of(run)


@pytest.mark.slow
def test_a_config_beside_a_model_that_is_no_run_of_ours_is_neither_read_nor_published(run: Path, hub: Any) -> None:
    (run.parent / "provenance.yaml").unlink()
    (run.parent / "config.yaml").write_text("model: ours\nwandb_key: secret_of_ada\n")
    assert read_facts(run).config == {}
    done = publish(run, hub)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not any(b"secret_of_ada" in content for content in hub.repositories["models/ada/prm"].values())


def test_a_policy_whose_architecture_is_named_as_gpt_2_is_one(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}')
    assert read_facts(tmp_path).kind == "policy"


def test_a_file_without_figures_data_without_a_repository_and_a_bad_name_are_refused(run: Path, tmp_path: Path) -> None:
    (tmp_path / "none.json").write_text('{"num_rows": 3}')
    with pytest.raises(BadInput, match=r"none\.json has no figure with an interval"):
        PublishModel(str(run), figures=[str(tmp_path / "none.json")]).run("", StageContext(None, tmp_path / "x", 0.0))
    with pytest.raises(BadInput, match="go together"):
        PublishModel(str(run), data=["a.jsonl"])
    with pytest.raises(BadInput, match="is no repository: write OWNER/NAME"):
        PublishModel(str(run), repository="prm")


class Hub(BaseHTTPRequestHandler):
    """The calls of the hub that a commit takes; what came is kept in `server.repositories`."""

    server: Any

    def log_message(self, *arguments: Any) -> None:
        """Nothing is printed."""

    def do_POST(self) -> None:
        """Make a repository, say how files are sent, take a commit."""
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.tokens.add(self.headers.get("Authorization", ""))
        if self.server.refuses:
            return self._answer(403, {"error": "You have no right to write here"})
        if self.path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization')}/{asked['name']}"
            self.server.private[name] = asked.get("private") or asked.get("visibility") == "private"
            place = f"datasets/{name}" if asked.get("type") == "dataset" else name
            return self._answer(200, {"url": f"{self._root}/{place}", "id": name})
        if "/preupload/" in self.path:
            files = [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False, "oid": None}
                     for file in json.loads(body)["files"]]  # fmt: skip
            return self._answer(200, {"files": files})
        if self.path == "/api/validate-yaml":  # a card's front matter
            return self._answer(200, {"errors": [], "warnings": []})
        assert "/commit/" in self.path, self.path
        _, _, kind, owner, name, *_ = self.path.split("/")
        kept = self.server.repositories.setdefault(f"{kind}/{owner}/{name}", {})
        for line in body.splitlines():
            row = json.loads(line)
            if row["key"] == "file":
                kept[row["value"]["path"]] = base64.b64decode(row["value"]["content"])
        return self._answer(200, {"commitUrl": f"{self._root}/{owner}/{name}/commit/abc", "commitOid": "abc"})

    @property
    def _root(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def _answer(self, code: int, row: dict[str, Any]) -> None:
        text = json.dumps(row).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


@pytest.fixture
def hub() -> Iterator[Any]:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.repositories, server.private, server.tokens, server.refuses = {}, {}, set(), False
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()


def publish(run: Path, hub: Any, *settings: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_TOKEN": "hf_secret_of_ada",
                   "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}  # fmt: skip
    command = [sys.executable, "run_stage.py", "-cn", "training/publish_model", f"stage.model={run}",
               "stage.repository=ada/prm", f"output={run.parent}/card.md", *settings]  # fmt: skip
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_model_card_run_and_data_reach_the_hub_and_name_one_another_and_the_token_reaches_no_file(
    run: Path, hub: Any
) -> None:
    work = run.parent.parent
    done = publish(run, hub, f"stage.figures=[{work}/prm.json]", f"stage.data=[{work}/step_values.jsonl]",
                   "stage.data_repository=ada/values")  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    model, data = hub.repositories["models/ada/prm"], hub.repositories["datasets/ada/values"]
    assert hub.private == {"ada/values": True, "ada/prm": True}
    assert model["model.safetensors"] == (run / "model.safetensors").read_bytes()
    assert data["step_values.jsonl"] == (work / "step_values.jsonl").read_bytes()
    assert "manifest.json" not in model, "of a folder without this card"
    assert "[ada/values](https://huggingface.co/datasets/ada/values)" in model["README.md"].decode()
    assert "[ada/prm](https://huggingface.co/ada/prm)" in data["README.md"].decode()
    assert model["README.md"].decode() == (run.parent / "card.md").read_text()
    assert yaml.safe_load(model["run/config.yaml"])["examples"]["path"] == "step_values.jsonl"
    assert json.loads((run.parent / "published.jsonl").read_text()) == {
        "repository": "ada/prm", "commit": "abc", "data_repository": "ada/values"}  # fmt: skip
    assert hub.tokens == {"Bearer hf_secret_of_ada"}
    written = [path.read_bytes() for path in work.rglob("*") if path.is_file()]
    assert not any(b"hf_secret_of_ada" in text for text in [*written, *model.values(), *data.values()])
    assert "hf_secret_of_ada" not in done.stdout + done.stderr


@pytest.mark.slow
def test_hidden_files_checkpoints_and_the_folder_of_an_adapters_base_stay_here(run: Path, hub: Any) -> None:
    (run / ".git").mkdir()
    (run / ".git" / "config").write_text("url = https://ada:hf_secret_of_ada@huggingface.co/ada/prm")
    (run / ".env").write_text("HF_TOKEN=hf_secret_of_ada")
    (run / "checkpoint-500").mkdir()
    (run / "checkpoint-500" / "optimizer.pt").write_bytes(b"as large as the model, twice")
    (run / "adapter").mkdir()
    base = {"peft_type": "LORA", "base_model_name_or_path": "/home/ada/policy/model"}
    (run / "adapter" / "adapter_config.json").write_text(json.dumps(base))
    done = publish(run, hub)
    assert done.returncode == 0, done.stdout + done.stderr
    model = hub.repositories["models/ada/prm"]
    assert not any(name.startswith((".", "checkpoint-")) for name in model)
    assert json.loads(model["adapter/adapter_config.json"]) == {**base, "base_model_name_or_path": "model"}
    assert not any(b"/home/ada" in content for content in model.values())


def test_a_model_that_is_not_as_its_run_wrote_it_is_not_published(run: Path) -> None:
    weights = run / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    with pytest.raises(BadInput, match=r"not as its run wrote it \(model\.safetensors has other bytes than were"):
        card_of(run, repository="ada/prm")
    assert card_of(run), "a card alone leaves the machine with no weights"
    (run / "README.md").write_text("mine")
    (run / "manifest.json").unlink()  # the change is meant, or the model is of another toolkit
    assert card_of(run)


def test_weights_that_a_loader_would_prefer_to_the_runs_own_are_not_published(run: Path) -> None:
    (run / "adapter_config.json").write_text("{}")
    with pytest.raises(BadInput, match=r"not as its run wrote it \(adapter_config\.json does not belong to it\)"):
        card_of(run, repository="ada/prm")


@pytest.mark.slow
def test_data_that_the_model_was_not_trained_on_are_warned_of(run: Path, hub: Any) -> None:
    other = run.parent.parent / "other.jsonl"
    other.write_text('{"id": "c"}\n')
    done = publish(run, hub, f"stage.data=[{other}]", "stage.data_repository=ada/values")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "other.jsonl is not what the model's run was trained on, as far as its provenance.yaml says" in done.stderr


@pytest.mark.slow
def test_a_hub_that_refuses_ends_with_one_line_and_no_card_so_that_the_command_can_be_run_again(
    run: Path, hub: Any
) -> None:
    hub.refuses = True
    refused = publish(run, hub)
    hub.shutdown()
    hub.server_close()
    for done in (refused, publish(run, hub)):
        assert done.returncode == 2, done.stderr
        assert done.stderr.strip().count("\n") == 0
        assert "ada/prm: the hub does not take it" in done.stderr
        assert not (run.parent / "card.md").exists()
