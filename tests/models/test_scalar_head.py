"""The process reward model's network: fresh, trained, refused; its scores."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from espalier.models.load import BadModel, load_policy
from espalier.models.scalar_head import load_critic, load_process_reward, scores_from_logits

IDS = torch.tensor([[5, 9, 30, 31, 7]])


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=IDS, attention_mask=torch.ones_like(IDS)).logits
    return found


def edited(policy: Path, folder: Path, **weights: torch.Tensor | None) -> str:
    """A copy of a model folder with weights replaced, added or (None) dropped."""
    shutil.copytree(policy, folder)
    stored = load_file(folder / "model.safetensors")
    for name, value in weights.items():
        stored.pop(name, None)
        if value is not None:
            stored[name] = value
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def test_one_label_scores_by_the_sigmoid() -> None:
    logits = torch.tensor([[0.0], [math.log(3.0)], [-math.log(3.0)]])
    torch.testing.assert_close(scores_from_logits(logits), torch.tensor([0.5, 0.75, 0.25]))


def test_classes_score_by_the_expected_share_of_right_completions() -> None:
    # K = 2: classes 0, 1, 2 of 2 are worth 0, 1/2, 1; shares 1/4, 1/4, 1/2 give 5/8.
    logits = torch.tensor([[0.0, 0.0, math.log(2.0)], [0.0, 0.0, 0.0]])
    torch.testing.assert_close(scores_from_logits(logits), torch.tensor([0.625, 0.5]))


def test_scores_keep_the_shape_of_the_positions() -> None:
    assert scores_from_logits(torch.zeros(2, 3, 5)).shape == (2, 3)
    assert scores_from_logits(torch.zeros(2, 3, 1, dtype=torch.bfloat16)).dtype == torch.float32


@pytest.mark.parametrize("num_labels", [1, 5])
def test_a_fresh_head_gives_one_half(num_labels: int, tiny_policy: Path) -> None:
    scores = scores_from_logits(logits_of(load_process_reward(str(tiny_policy), num_labels)))
    torch.testing.assert_close(scores, torch.full((1, 5), 0.5), rtol=0, atol=1e-6)


def test_a_fresh_head_stands_on_the_policys_body(tiny_policy: Path) -> None:
    body = load_process_reward(str(tiny_policy), 1).model.state_dict()
    for name, weight in load_policy(str(tiny_policy)).model.state_dict().items():
        assert torch.equal(body[name], weight), name


def test_a_trained_folder_is_a_standard_one_with_the_same_scores(tiny_policy: Path, tmp_path: Path) -> None:
    model = load_process_reward(str(tiny_policy), 3)
    torch.nn.init.normal_(model.score.weight)
    torch.nn.init.normal_(model.score.bias)
    model.save_pretrained(tmp_path / "prm")
    standard = AutoModelForTokenClassification.from_pretrained(tmp_path / "prm")
    assert standard.config.num_labels == 3
    assert torch.equal(logits_of(standard), logits_of(model))
    assert torch.equal(logits_of(load_process_reward(str(tmp_path / "prm"))), logits_of(model))


def test_a_trained_folder_with_another_number_of_labels_is_refused(tiny_policy: Path, tmp_path: Path) -> None:
    load_process_reward(str(tiny_policy), 3).save_pretrained(tmp_path / "prm")
    with pytest.raises(BadModel, match=r"has 3 labels, not 1: set model.num_labels=null"):
        load_process_reward(str(tmp_path / "prm"), 1)


def test_a_policy_is_not_scored_with_as_if_it_were_trained(tiny_policy: Path) -> None:
    with pytest.raises(BadModel, match="is no process reward model: train one"):
        load_process_reward(str(tiny_policy))


SIZES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 32},
    "bloom": {"hidden_size": 8, "n_layer": 1, "n_head": 2},
    "falcon": {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2},
    "bert": {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8},
}


@pytest.mark.parametrize("family", SIZES)
def test_a_network_whose_head_is_not_named_score_is_refused_in_one_line(family: str, tmp_path: Path) -> None:
    """Trained heads of tokens and of texts, and bodies that would get one."""
    config = AutoConfig.for_model(family, vocab_size=50, num_labels=1, **SIZES[family])
    for kind in (AutoModelForTokenClassification, AutoModelForSequenceClassification, AutoModelForCausalLM):
        folder = str(tmp_path / kind.__name__)
        kind.from_config(config).save_pretrained(folder)
        says = r"its head, of transformers' \w+ForTokenClassification, is not named score, .*Llama, .*$"
        with pytest.raises(BadModel, match=says) as error:
            load_process_reward(folder, 1)
        assert "\n" not in str(error.value)
        for source in ("auto", "scratch"):
            with pytest.raises(BadModel, match=says):
                load_critic(folder, source)


def test_a_network_without_a_token_classifier_is_refused_in_one_line(tmp_path: Path) -> None:
    config = AutoConfig.for_model("gptj", vocab_size=50, n_embd=8, n_layer=1, n_head=2, rotary_dim=4)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    for load in (lambda path: load_process_reward(path, 1), lambda path: load_critic(path, "scratch")):
        with pytest.raises(BadModel, match=r"transformers has no network of GPTJConfig with a head of tokens: .*Llama"):
            load(str(tmp_path))


def test_a_trained_folder_that_lacks_its_head_is_refused(tiny_policy: Path, tmp_path: Path) -> None:
    load_process_reward(str(tiny_policy), 1).save_pretrained(tmp_path / "prm")
    folder = edited(tmp_path / "prm", tmp_path / "cut", **{"score.weight": None})
    with pytest.raises(BadModel, match=r"it lacks score.weight \(1 weights\)"):
        load_process_reward(folder)


def test_a_process_reward_model_is_no_policy(tiny_policy: Path, tmp_path: Path) -> None:
    load_process_reward(str(tiny_policy), 1).save_pretrained(tmp_path / "prm")
    with pytest.raises(BadModel, match=r"is not a LlamaForCausalLM: it lacks lm_head.weight"):
        load_policy(str(tmp_path / "prm"))


@pytest.mark.parametrize(
    ("weights", "text"),
    [
        ({"model.norm.weight": None}, "it lacks model.norm.weight"),
        ({"model.norm.weight": torch.zeros(7)}, "it has other shapes of model.norm.weight"),
        ({"model.extra.weight": torch.zeros(2)}, "it holds more than such a model: model.extra.weight"),
    ],
)
def test_a_folder_whose_weights_do_not_fit_is_refused(
    weights: dict[str, Any], text: str, tiny_policy: Path, tmp_path: Path
) -> None:
    folder = edited(tiny_policy, tmp_path / "bad", **weights)
    for load in (load_policy, lambda path: load_process_reward(path, 1)):
        with pytest.raises(BadModel, match=text):
            load(folder)


def test_a_torn_folder_is_refused_in_the_users_words(tiny_policy: Path, tmp_path: Path) -> None:
    with pytest.raises(BadModel, match="no such model folder"):
        load_policy(str(tmp_path / "nosuch"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadModel, match=r"no config.json there"):
        load_policy(str(tmp_path / "empty"))
    shutil.copytree(tiny_policy, tmp_path / "light")
    (tmp_path / "light" / "model.safetensors").unlink()
    with pytest.raises(BadModel, match="no weights there"):
        load_policy(str(tmp_path / "light"))
    shutil.copytree(tiny_policy, tmp_path / "cut")
    weights = tmp_path / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(BadModel, match="cannot load the model"):
        load_policy(str(tmp_path / "cut"))
    (tmp_path / "cut" / "config.json").write_text(json.dumps({"model_type": "llama"})[:-5])
    with pytest.raises(BadModel, match=r"cannot read config.json"):
        load_process_reward(str(tmp_path / "cut"), 1)


def test_loading_says_nothing(
    tiny_policy: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    load_process_reward(str(tiny_policy), 1)
    assert capfd.readouterr() == ("", "")
    assert caplog.records == []
