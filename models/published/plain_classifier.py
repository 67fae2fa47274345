"""Any reward model that reads one linear layer → transformers' own classifier of tokens, which TRL, vLLM and
`AutoModelForTokenClassification` load: the same scores, read at the same places.

Two labels are TRL's: class 1 is a right step. A number z becomes the logits (0, z), whose softmax is sigmoid(z); a
causal LM that is read by two tokens gives the rows of its output head for them, and one that is read by the mean of all
its logits the mean of the rows.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForTokenClassification

from espalier.models.load import BadModel, load_policy
from espalier.models.logprobs import plain_head
from espalier.models.published.layouts import only_id
from espalier.models.published.load import load_published
from espalier.models.published.reads import MeanLogit, Scalar, TokenShare
from espalier.models.published.table import CAUSAL, PublishedPRM
from espalier.models.scalar_head import load_process_reward

LABELS = {0: "wrong", 1: "right"}


def plain_classifier(path: str, row: PublishedPRM | None, tokenizer: Any, has_two_labels: bool) -> Any:
    """Return the classifier of a published model (`row`), or of one trained here (None). Raises BadModel where it reads
    something else than one linear layer, also where its network changes what that says, or more classes than two are to
    become `has_two_labels`."""
    weight, bias, body = _parts(path, row, tokenizer)
    is_number = row is None or isinstance(row.read, Scalar | MeanLogit)
    if has_two_labels and len(weight) == 1 and is_number:
        weight, bias = (torch.cat([torch.zeros_like(one), one]) for one in (weight, bias))
    if has_two_labels and len(weight) != 2:
        raise BadModel(f"{path} has {len(weight)} classes, which are no two labels: set stage.has_two_labels=false")
    config = body.config
    config.num_labels = len(weight)
    if len(weight) == 2:
        config.id2label, config.label2id = dict(LABELS), {name: number for number, name in LABELS.items()}
    config.classifier_dropout = 0.0
    model = AutoModelForTokenClassification.from_config(config, dtype=torch.float32)
    model.base_model.load_state_dict(body.base_model.state_dict())
    head = model.get_submodule("score")
    with torch.no_grad():
        head.weight.copy_(weight)
        head.bias.copy_(bias)
    return model


def _parts(path: str, row: PublishedPRM | None, tokenizer: Any) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Return (weight [L, h], bias [L], a network with the body)."""
    if row is not None and row.network == CAUSAL:
        body = load_policy(path)
        output = plain_head(body)
        if output is None:
            raise BadModel(f"{path} does more behind its output head than the head's own product (a soft cap, a "
                           "scale): a plain classifier has other scores; score with the model as it is")  # fmt: skip
        rows, offsets = output.weight.detach(), torch.zeros(len(output.weight))
        if output.bias is not None:
            offsets = output.bias.detach()
        if isinstance(row.read, TokenShare):
            ids = [only_id(tokenizer, one) for one in (row.read.bad, row.read.good)]
            return rows[ids], offsets[ids], body
        return rows.mean(0, keepdim=True), offsets.mean(0, keepdim=True), body
    body = load_process_reward(path) if row is None else load_published(path, row)
    head = getattr(body, "score", None)
    layers = list(head) if isinstance(head, torch.nn.Sequential) else [head]
    if len(layers) != 1 or not isinstance(layers[0], torch.nn.Linear):
        raise BadModel(f"{path} has no head of one linear layer: only such a model is a plain classifier of tokens")
    layer = layers[0]
    bias = torch.zeros(len(layer.weight)) if layer.bias is None else layer.bias.detach()
    return layer.weight.detach(), bias, body


def write_classifier(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write the folder, in files of 5 GB at most."""
    model.save_pretrained(folder, max_shard_size="5GB")
    tokenizer.save_pretrained(folder)
