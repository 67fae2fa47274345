"""The programs: stopped by SIGTERM, gone on, exported and merged to standard folders. In forked children."""

import dataclasses
import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import peft  # noqa: F401  (loaded once, before the forks)
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer

from benchmarks.processes.forked import exit_code, start_program
from espalier.data.records import BadInput
from espalier.data.training_layout import TrainingLayout, read_training_layout
from espalier.data.training_problems import problem_hash, read_training_problems
from espalier.models.load import load_policy
from espalier.models.scalar_head import load_process_reward
from espalier.pipeline.stage import StageContext
from espalier.pipeline.training.merge_lora import MergeLora
from espalier.runtime.entrypoint import BadConfig, compose_config
from espalier.runtime.fingerprints import model_fingerprint
from espalier.runtime.manifest import find_damage
from espalier.runtime.schemas import TrainConfig
from espalier.training.checkpoint import BadCheckpoint, TrainState, checkpoints, save
from espalier.training.engine import TorchEngine, load_weights, trained_tensors
from espalier.training.export_model import ExportModel

IDS = torch.tensor([[5, 9, 30, 31, 7]])
TRAINER, STAGE = "trainer_base_ds_mul.py", "run_stage.py"


def run(name: str, log: Path, *settings: str, code: int = 0) -> str:
    """What the program printed since; it must end with `code`."""
    before = log.stat().st_size if log.exists() else 0
    found = exit_code(start_program(name, settings, log))
    printed = log.read_text()[before:]
    assert found == code, printed
    return printed


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=IDS).logits
    return found


@pytest.fixture(scope="module")
def settings(tiny_policy: Path, demonstration_texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    path = tmp_path_factory.mktemp("data") / "train.jsonl"
    rows = [{"id": f"d{i}", "prompt": text[:20], "completion": text[20:40]} for i, text in enumerate(
        demonstration_texts[:16])]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = f"""-cn train model.path={tiny_policy} model.attention=eager examples.path={path} precision=fp32
        update.batch_size=8 update.micro_batch_size=4 update.learning_rate=0.01 update.warmup_steps=1 max_steps=4
        checkpoints.save_every=1
        checkpoints.keep=9"""
    return words.split()


@pytest.mark.slow
def test_sigterm_ends_the_program_with_143_and_a_checkpoint_it_goes_on_from(
    settings: list[str], tmp_path: Path
) -> None:
    run_dir, log = tmp_path / "run", tmp_path / "log"
    mine = [*settings, f"output_dir={run_dir}", "checkpoints.save_every=0"]
    pid = start_program(TRAINER, [*mine, "max_steps=100000"], log)
    deadline = time.monotonic() + 60
    while not (run_dir / "metrics.jsonl").is_file() and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(pid, signal.SIGTERM)
    assert exit_code(pid) == 143, log.read_text()
    (folder,) = checkpoints(run_dir)
    assert find_damage(folder) == ""
    step = int(folder.name.removeprefix("step-"))
    assert f"stopped by a signal after step {step} of 100000: the same command goes on" in log.read_text()
    assert not (run_dir / "model").exists()
    printed = run(TRAINER, log, *mine, f"max_steps={step + 1}", "checkpoints.resume=latest")
    assert f"at step {step} of {step + 1}" in printed
    assert find_damage(run_dir / "model") == ""
    assert run(TRAINER, log, *mine, f"max_steps={step + 1}", "checkpoints.resume=step-1", code=2).startswith(
        f"error: {run_dir} is finished: choose another output_dir to go on from checkpoints.resume=step-1")  # fmt: skip


def test_a_resume_of_nothing_is_one_line_and_exit_code_2(settings: list[str], tmp_path: Path) -> None:
    printed = run(
        TRAINER, tmp_path / "log", *settings, f"output_dir={tmp_path}/run", "checkpoints.resume=step-7", code=2
    )
    assert f"error: {tmp_path}/run has no checkpoint step-7: there are none\n" in printed
    assert "Traceback" not in printed


def test_a_checkpoint_becomes_a_standard_folder(settings: list[str], tiny_policy: Path, tmp_path: Path) -> None:
    run_dir, log, output = tmp_path / "run", tmp_path / "log", tmp_path / "step-3"
    run(TRAINER, log, *settings, f"output_dir={run_dir}")
    printed = run(STAGE, log, "-cn", "training/export_model", f"stage.run_dir={run_dir}", "stage.checkpoint=step-2",
                  f"output={output}")  # fmt: skip
    assert "step 2" in printed
    model = AutoModelForCausalLM.from_pretrained(output)
    own = load_policy(str(tiny_policy))
    pieces = run_dir / "checkpoints" / "step-00000002" / "pieces" / "shard-00001-model-00001-of-00001.safetensors"
    stored = {name.removeprefix("weights/"): value for name, value in load_file(pieces).items() if "weights/" in name}
    load_weights(own, {name: value.view(own.state_dict()[name].shape) for name, value in stored.items()}, "")
    assert torch.equal(logits(model), logits(own))
    assert not torch.equal(logits(model), logits(load_policy(str(tiny_policy))))
    assert AutoTokenizer.from_pretrained(output).pad_token_id == 0
    assert find_damage(output) == ""
    meta = json.loads((tmp_path / "step-3.meta.json").read_text())
    assert str(run_dir / "checkpoints" / "step-00000002" / "manifest.json") in meta["inputs"]

    content = bytearray(pieces.read_bytes())
    content[-1] ^= 1
    pieces.write_bytes(content)
    with pytest.raises(BadCheckpoint, match=r"is damaged: pieces/shard-.* has other bytes than were written"):
        ExportModel(str(run_dir), "step-2").inputs()
    with pytest.raises(BadCheckpoint, match="has no checkpoint step-9: there are step-00000001, step-00000002, step"):
        ExportModel(str(run_dir), "step-9").inputs()


def test_settings_of_an_export_that_cannot_work_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"stage.checkpoint must be latest, best or step-N, got 'auto'"):
        ExportModel("run", "auto")
    for stage in (ExportModel, MergeLora):
        with pytest.raises(BadInput, match=r"stage.dtype must be float32 or bfloat16, got 'fp16'"):
            stage("run", dtype="fp16")
    with pytest.raises(BadInput, match=r"config.yaml: no such file: stage.run_dir must be the directory of a training"):
        ExportModel(str(tmp_path)).inputs()
    for text in ("[]", "model: x", ""):
        (tmp_path / "config.yaml").write_text(text)
        with pytest.raises(BadInput, match="is not the config of a training run"):
            ExportModel(str(tmp_path)).inputs()


@pytest.mark.slow
def test_adapters_leave_a_merged_model_and_export_and_merge_agree(settings: list[str], tmp_path: Path) -> None:
    run_dir, log = tmp_path / "run", tmp_path / "log"
    printed = run(TRAINER, log, *settings, f"output_dir={run_dir}", "lora=dora", "lora.rank=4")
    assert "trained)" in printed
    assert sorted(path.name for path in (run_dir / "adapter").iterdir()) == [
        "adapter_config.json", "adapter_model.safetensors", "base.json", "manifest.json",
    ]  # fmt: skip
    run(STAGE, log, "-cn", "training/merge_lora", f"stage.adapter={run_dir}/adapter", f"output={tmp_path}/merged")
    run(
        STAGE,
        log,
        "-cn",
        "training/export_model",
        f"stage.run_dir={run_dir}",
        "stage.dtype=bfloat16",
        f"output={tmp_path}/3",
    )
    models = [AutoModelForCausalLM.from_pretrained(path, dtype="auto")
              for path in (run_dir / "model", tmp_path / "merged", tmp_path / "3")]  # fmt: skip
    assert torch.equal(logits(models[0]), logits(models[1]))
    assert {parameter.dtype for parameter in models[2].parameters()} == {torch.bfloat16}
    assert not (run_dir / "model" / "adapter_config.json").exists()
    assert (tmp_path / "3" / "adapter" / "adapter_model.safetensors").is_file()


def move_weights(folder: Path) -> None:
    """Make a model again under its name: other weights of the same shapes."""
    weights = {name: value + 0.1 for name, value in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def test_adapters_are_put_on_no_other_base_than_they_were_trained_on(
    settings: list[str], tiny_policy: Path, tmp_path: Path
) -> None:
    base, run_dir, adapter = tmp_path / "base", tmp_path / "run", tmp_path / "run" / "adapter"
    shutil.copytree(tiny_policy, base)
    mine = [*settings, f"model.path={base}", f"output_dir={run_dir}", "lora=lora", "lora.rank=4"]
    run(TRAINER, tmp_path / "log", *mine)
    ExportModel(str(run_dir)).run("", StageContext(None, tmp_path / "before", 10.0))
    move_weights(base)
    told = f"was trained on another model than stands at {base} now: put that one back"
    with pytest.raises(BadConfig, match=f"{run_dir} {told}"):
        ExportModel(str(run_dir)).run("", StageContext(None, tmp_path / "after", 10.0))
    for folder in (adapter, tmp_path / "before" / "adapter"):
        with pytest.raises(BadConfig, match=f"{folder} {told}"):
            MergeLora(str(folder)).run("", StageContext(None, tmp_path / "after", 10.0))
    assert not (tmp_path / "after").exists()
    MergeLora(str(adapter), str(tiny_policy)).run("", StageContext(None, tmp_path / "merged", 10.0))
    models = [logits(load_policy(str(tmp_path / name))) for name in ("run/model", "merged")]
    assert torch.equal(*models)
    (adapter / "base.json").unlink()  # an adapter of before does not say what it was trained on
    MergeLora(str(adapter)).run("", StageContext(None, tmp_path / "unknown", 10.0))


@pytest.mark.parametrize("trains", ["head", "all"])
def test_a_head_is_exported_on_the_body_it_was_trained_on(trains: str, tiny_policy: Path, tmp_path: Path) -> None:
    base, run_dir = tmp_path / "base", tmp_path / "run"
    shutil.copytree(tiny_policy, base)
    model = load_process_reward(str(base), 1, trains=trains)
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad])
    save(run_dir, TorchEngine(model, optimizer, torch.device("cpu"), 1.0), TrainState(1, "d"), keep=1)
    node = {"_target_": "espalier.models.scalar_head.load_process_reward", "path": str(base), "num_labels": 1}
    config = {"model": {**node, "trains": trains}, "examples": {}}
    (run_dir / "config.yaml").write_text(yaml.safe_dump(config))
    (run_dir / "provenance.yaml").write_text(yaml.safe_dump({"inputs": {str(base): model_fingerprint(str(base))}}))
    move_weights(base)
    stage = ExportModel(str(run_dir))
    if trains == "head":
        with pytest.raises(BadConfig, match=f"run was trained on another model than stands at {base} now"):
            stage.run("", StageContext(None, tmp_path / "out", 10.0))
        return
    stage.run("", StageContext(None, tmp_path / "out", 10.0))  # every weight is in the checkpoint
    assert torch.equal(logits(load_process_reward(str(tmp_path / "out"))), logits(model))


@pytest.mark.slow
def test_a_scalar_head_is_exported_with_its_config(tiny_policy: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    fixed = {
        "prompt": "Tom has 3.\n",
        "steps": ["He buys 2.\n", "#### 5"],
        "prompt_ids": [5, 9, 11],
        "step_ends": [2, 4],
    }
    rows = [
        {**fixed, "id": f"t{i}", "problem_id": f"t{i}", "response_ids": [20 + i, 30, 40, 50], "is_correct": i % 2 == 1,
         "values": [0.25, float(i % 2)], "num_correct": [1, i % 2], "num_completions": [4, 1]} for i in range(8)
    ]  # fmt: skip
    (tmp_path / "values.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = f"""-cn train model=process_reward model.num_labels=1 objective=process_reward examples=step_values
        precision=fp32 update.batch_size=8 update.micro_batch_size=8 max_steps=3 checkpoints.save_every=1
        update.learning_rate=0.01 lora=lora
        model.path={tiny_policy} examples.path={tmp_path}/values.jsonl output_dir={tmp_path}/run""".split()
    run(TRAINER, log, *words)
    run(STAGE, log, "-cn", "training/export_model", f"stage.run_dir={tmp_path}/run", f"output={tmp_path}/out")
    run(STAGE, log, "-cn", "training/merge_lora", f"stage.adapter={tmp_path}/run/adapter", f"output={tmp_path}/merged")
    shutil.copytree(tmp_path / "run" / "model", tmp_path / "finished")
    (tmp_path / "run" / "model" / "training_layout.json").unlink()  # as an earlier version left it
    run(STAGE, log, "-cn", "training/export_model", f"stage.run_dir={tmp_path}/run", f"output={tmp_path}/renewed")
    shutil.rmtree(tmp_path / "run" / "model")  # as a run that was ended before
    run(STAGE, log, "-cn", "training/export_model", f"stage.run_dir={tmp_path}/run", f"output={tmp_path}/early")
    (tmp_path / "values.jsonl").rename(tmp_path / "moved.jsonl")
    printed = run(
        STAGE, log, "-cn", "training/export_model", f"stage.run_dir={tmp_path}/run", f"output={tmp_path}/poor"
    )
    assert "poor does not say all of what it was trained on: the examples of" in printed
    (tmp_path / "values.jsonl").write_text((tmp_path / "moved.jsonl").read_text().replace('"t1"', '"u1"'))
    stored, out = tmp_path / "run" / "config.yaml", tmp_path / "changed"
    ExportModel(str(tmp_path / "run")).run("", StageContext(None, out, 10.0))
    assert read_training_problems(str(out)) is None, "the file is no longer the one that was trained on"
    (tmp_path / "values.jsonl").write_text((tmp_path / "moved.jsonl").read_text())
    config, out = yaml.safe_load(stored.read_text()), tmp_path / "earlier"
    config["examples"]["a_setting_of_before"] = 1
    stored.write_text(yaml.safe_dump(config))
    ExportModel(str(tmp_path / "run")).run("", StageContext(None, out, 10.0))
    assert read_training_problems(str(out)) is None
    names = ("finished", "run/adapter", "merged", "out", "out/adapter", "renewed", "early", "poor")
    says = {name: [read_training_layout(str(tmp_path / name)), read_training_problems(str(tmp_path / name))]
            for name in names}  # fmt: skip
    assert says.pop("poor") == [None, None]
    assert all(one == says["finished"] for one in says.values())
    assert says["finished"] == [TrainingLayout("steps", "text"), {problem_hash(f"t{i}") for i in range(8)}]
    for folder in ("finished", "out"):
        model, found = AutoModelForTokenClassification.from_pretrained(tmp_path / folder, output_loading_info=True)
        assert not found["missing_keys"]
        assert not found["unexpected_keys"]
        assert model.config.num_labels == 1
        assert float(logits(model).abs().max()) > 0


class Stateless:
    """An engine without a state."""

    def save_state(self, folder: Path) -> None: ...

    def load_state(self, folder: Path) -> None: ...


def test_the_best_checkpoint_is_the_one_that_the_runs_own_rule_names(settings: list[str], tmp_path: Path) -> None:
    rule = ["checkpoints.best_metric=eval/accuracy", "checkpoints.best_is=highest", "checkpoints.keep_best=1"]
    keys = {word.partition("=")[0] for word in rule}
    words = [word for word in settings if word.partition("=")[0] not in keys and word not in ("-cn", "train")]
    config = dataclasses.asdict(compose_config(TrainConfig, "train", [*words, *rule, f"output_dir={tmp_path}/run"]))
    for step, accuracy in ((10, 0.5), (20, 0.9), (30, 0.6)):
        save(tmp_path / "run", Stateless(), TrainState(step, "d", {"eval/accuracy": accuracy}), keep=9)
    before = {**config, **config["checkpoints"]}
    del before["checkpoints"]  # a run of an earlier version, whose settings had no topics
    for stored in (config, before):
        (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump(stored))
        assert ExportModel(str(tmp_path / "run"), "best").folder.name == "step-00000020"


def test_tied_weights_are_stored_once_and_stay_tied(tiny_policy: Path, tmp_path: Path) -> None:
    model = load_policy(str(tiny_policy))
    model.config.tie_word_embeddings = True
    model.tie_weights()
    stored = trained_tensors(model)
    assert "model.embed_tokens.weight" in stored
    assert "lm_head.weight" not in stored
    stored = {name: value + 1 for name, value in stored.items()}
    load_weights(model, stored, "")
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert torch.equal(model.lm_head.weight, stored["model.embed_tokens.weight"])
    model.save_pretrained(tmp_path / "tied")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "tied")), logits(model))
