"""Reward models written as plain classifiers: the scores of transformers' own class are those of the model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, Gemma2Config, GraniteConfig

from benchmarks.road.published_models import MODELS, build_tokenizers, write_model
from espalier.models.load import BadModel, load_tokenizer
from espalier.models.published.load import load_published, row_of
from espalier.models.published.plain_classifier import plain_classifier, write_classifier
from espalier.models.published.reads import TokenShare
from espalier.models.published.scoring import PublishedScorer, Solution, read_as
from espalier.models.published.table import PUBLISHED, PublishedPRM
from espalier.models.scalar_head import load_process_reward
from espalier.pipeline.prm.export_classifier import ExportClassifier
from espalier.pipeline.stage import StageContext
from tests.support.slow import slow_unless

SOLUTION = Solution("mia", "Mia has 3 apples and buys 4 more. How many now?",
                    ["Step 1: She begins with 3.", "Step 2: 3 + 4 = 7.", "Step 3: So \\boxed{7}."])  # fmt: skip
LINEAR = [layout for layout, (_, _, _, head) in MODELS.items() if head != "score."]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    pytest.importorskip("mistral_common", reason="the published tokenizers lie in the package mistral_common")
    pytest.importorskip("sentencepiece", reason="one of them is read with the package sentencepiece")
    return build_tokenizers(tmp_path_factory.mktemp("tokenizers"))


def scores(path: Path, layout: str) -> list[float]:
    row, tokenizer = row_of(layout, str(path)), load_tokenizer(str(path))
    return PublishedScorer(load_published(str(path), row), tokenizer, row, "fp32").scores([SOLUTION])[0]


@pytest.mark.parametrize("layout", slow_unless(lambda layout: layout == "pqm", LINEAR))
def test_a_published_model_of_one_layer_scores_alike_as_a_plain_classifier(
    layout: str, tokenizers: dict[str, Any], tmp_path: Path
) -> None:
    model = write_model(layout, tmp_path / "model", tokenizers)
    tokenizer = load_tokenizer(str(model))
    has_two = layout != "reasoneval"
    write_classifier(
        plain_classifier(str(model), row_of(layout, str(model)), tokenizer, has_two), tokenizer, tmp_path / "plain"
    )
    expected = scores(model, layout)
    assert scores(tmp_path / "plain", layout) == pytest.approx(expected, abs=1e-5)
    if has_two:  # as TRL reads it
        network = AutoModelForTokenClassification.from_pretrained(tmp_path / "plain", dtype=torch.float32).eval()
        assert network.config.id2label == {0: "wrong", 1: "right"}
        tokens = read_as(PUBLISHED[layout], tokenizer, SOLUTION)
        ids = [*tokens.prompt_ids, *tokens.response_ids]
        with torch.no_grad():
            logits = network(torch.tensor([ids])).logits[0]
        places = [len(tokens.prompt_ids) + end - 1 for end in tokens.step_ends]
        assert torch.softmax(logits[places], -1)[:, 1].tolist() == pytest.approx(expected, abs=1e-5)


def test_heads_of_several_layers_and_of_several_classes_are_refused(tokenizers: dict[str, Any], tmp_path: Path) -> None:
    for layout, why in (("qwen", "no head of one linear layer"), ("reasoneval", "3 classes, which are no two labels")):
        path = str(write_model(layout, tmp_path / layout, tokenizers))
        with pytest.raises(BadModel, match=why):
            plain_classifier(path, row_of(layout, path), load_tokenizer(path), True)


@pytest.mark.parametrize(
    ("config", "setting"), [(Gemma2Config, {"final_logit_softcapping": 3.0}), (GraniteConfig, {"logits_scaling": 2.0})]
)
def test_a_network_that_changes_logits_behind_its_head_is_refused(
    config: Any, setting: dict[str, float], tiny_policy: Path, tmp_path: Path
) -> None:
    """Its scores are no function of one linear layer's numbers alone, and the classifier's would be others."""
    tokenizer = load_tokenizer(str(tiny_policy))
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
             "num_attention_heads": 2, "num_key_value_heads": 2}  # fmt: skip
    AutoModelForCausalLM.from_config(config(**sizes, **setting)).save_pretrained(tmp_path / "model")
    row = PublishedPRM(PUBLISHED["math_shepherd"].layout, TokenShare("1", "2"))
    with pytest.raises(BadModel, match="does more behind its output head than the head's own product"):
        plain_classifier(str(tmp_path / "model"), row, tokenizer, True)


def test_a_model_trained_here_is_read_by_transformers_with_two_labels(tiny_prm: Path, tmp_path: Path) -> None:
    context = StageContext(None, tmp_path / "plain", 10.0)
    ExportClassifier(str(tiny_prm), layout="tokens").run("", context)
    ids = torch.arange(5, 45)[None]
    plain = AutoModelForTokenClassification.from_pretrained(tmp_path / "plain", dtype=torch.float32).eval()
    with torch.no_grad():
        own = torch.sigmoid(load_process_reward(str(tiny_prm)).eval()(ids).logits[0, :, 0])
        found = torch.softmax(plain(ids).logits[0], -1)[:, 1]
    assert found.tolist() == pytest.approx(own.tolist(), abs=1e-5)
    assert context.counts["labels"] == 2
