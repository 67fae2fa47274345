"""A published model's network, built natively: no code of a model's repository is run."""

import logging
import pickle
import re
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForTokenClassification, PreTrainedModel

from espalier.models.hub_snapshot import local_model
from espalier.models.load import BadModel, from_pretrained, load_config, load_policy
from espalier.models.published.reads import ClassShares, Read, Scalar
from espalier.models.published.table import CAUSAL, CLASSES, POLICIES, PUBLISHED, PublishedPRM

log = logging.getLogger(__name__)


def row_by_name(path: str) -> str:
    """Return the row of the table that a folder or a hub name is of by its name, "" where that says nothing."""
    own = Path(path).name
    for name, row in PUBLISHED.items():
        if any(re.search(rf"(^|[^a-z0-9]){re.escape(part)}", own, re.IGNORECASE) for part in row.names):
            return name
    return ""


def name_by_config(path: str) -> str:
    """Return the row that a folder is of by its config, with a warning. Raises BadModel where nothing says it."""
    config = load_config(path)
    architectures = " ".join(config.architectures or [])
    if "ForProcessRewardModel" in architectures:
        found = "qwen"
    elif "ReasonEval" in architectures:
        found = "reasoneval"
    elif "ForTokenClassification" in architectures and config.num_labels == 2:
        found = "trl"
    else:
        raise BadModel(f"{path}: nothing says which published model this is ({architectures or 'no architectures'}): "
                       "set stage.layout to task (a model trained here), or one of "
                       f"{', '.join(PUBLISHED)}")  # fmt: skip
    log.warning("%s is read as %s by its config: a model of these classes may be trained on another layout, which "
                "stage.layout names", path, found)  # fmt: skip
    return found


def load_published(path: str, row: PublishedPRM, attention: str = "auto") -> Any:
    """Return the network of a folder or a hub name, frozen. Raises BadModel where it is not what the row says."""
    if row.network == POLICIES:
        from espalier.models.log_ratio_reward import load_log_ratio_reward

        return load_log_ratio_reward(path, attention)
    model = load_policy(path, attention) if row.network == CAUSAL else _load_classes(path, row.head, attention)
    model.requires_grad_(False)
    model.train(False)
    return model


def is_plain(path: str) -> bool:
    """Say whether a folder is of transformers' own classifiers of tokens: one linear layer, under their name."""
    return any(name.endswith("ForTokenClassification") for name in load_config(path).architectures or [])


def row_of(layout: str, path: str) -> PublishedPRM:
    """Return how a folder is read in a layout of the table: as the table says, or, of a plain classifier that was
    written of such a model (`write_classifier`), by its own head."""
    row = PUBLISHED[layout]
    if row.network == POLICIES or not is_plain(path) or (row.head and _has_head(path, row.head)):
        return row
    by_width: dict[int, Read] = {1: Scalar(), 2: ClassShares()}
    read = by_width.get(load_config(path).num_labels, row.read)
    return replace(row, network=CLASSES, head="", read=read)


def _has_head(path: str, prefix: str) -> bool:
    """Say whether a folder holds a head of that name."""
    return (Path(path) / prefix).is_file() if prefix.endswith(".pt") else bool(read_tensors(path, prefix))


def _load_classes(path: str, prefix: str, attention: str) -> PreTrainedModel:
    config = load_config(path)
    config.classifier_dropout = 0.0
    if not prefix:
        return from_pretrained(
            AutoModelForTokenClassification, path, may_add=["lm_head."], config=config, attention=attention
        )
    head = make_head(read_tensors(path, prefix), f"{path}: its head {prefix.removesuffix('.pt')}*")
    config.num_labels = [part for part in head if isinstance(part, torch.nn.Linear)][-1].out_features
    model = from_pretrained(
        AutoModelForTokenClassification,
        path,
        may_lack=["score."],
        may_add=[prefix, "lm_head."],
        config=config,
        attention=attention,
    )
    model.score = head
    model.config.use_cache = False
    return model


def make_head(tensors: dict[str, torch.Tensor], place: str) -> torch.nn.Sequential:
    """Return the linear layers that weights `weight`, `bias` or `0.weight`, `2.weight` are of, with a ReLU between
    them. Raises BadModel where there is none."""
    numbers = sorted(
        {name.rpartition(".")[0] for name in tensors if name.endswith("weight")}, key=lambda n: int(n or 0)
    )
    layers: list[torch.nn.Module] = []
    for number in numbers:
        prefix = f"{number}." if number else ""
        weight, bias = tensors[f"{prefix}weight"], tensors.get(f"{prefix}bias")
        layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
        layer.load_state_dict({"weight": weight.float()} | ({} if bias is None else {"bias": bias.float()}))
        layers += ([torch.nn.ReLU()] if layers else []) + [layer]
    if not layers:
        raise BadModel(f"{place} is not there: this is another model than the layout's")
    return torch.nn.Sequential(OrderedDict((str(number), layer) for number, layer in enumerate(layers)))


def _head_of_file(path: Path) -> dict[str, torch.Tensor]:
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, pickle.UnpicklingError) as error:
        raise BadModel(f"{path}: no weights of a head can be read: {str(error).splitlines()[0][:120]}") from None
    tensors = {str(name): value for name, value in found.items() if torch.is_tensor(value)}
    names = [name for name in tensors if name.endswith("weight")]
    if len(names) == 1:  # one layer, whatever it is called
        stem = names[0].removesuffix("weight")
        return {name.removeprefix(stem): value for name, value in tensors.items()}
    return tensors


def read_tensors(path: str, prefix: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a model's files whose names begin so, by the rest of their names; of a `prefix` that is a
    file all that it holds. Raises BadModel where that is not there, or no weights alone."""
    from safetensors import safe_open

    folder = Path(local_model(path))
    if prefix.endswith(".pt"):
        return _head_of_file(folder / prefix)
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            names = [name for name in tensors.keys() if name.startswith(prefix)]  # noqa: SIM118
            found |= {name.removeprefix(prefix): tensors.get_tensor(name) for name in names}
    for file in sorted(folder.glob("pytorch_model*.bin")) if not found else ():
        weights = torch.load(file, map_location="cpu", weights_only=True)
        found |= {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
    return found
