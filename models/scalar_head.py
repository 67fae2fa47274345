"""Scalars or classes at every position: the process reward model's network.

It is transformers' own token-classification model (`AutoModelForTokenClassification`), so a trained one is
a standard Hugging Face folder, and one forward pass scores all steps of a trajectory: the head is read at
step ends. With one label the score is sigmoid(logit), the value of the state the step leads to; with K + 1
labels class k means "k of K completions are correct" and the score is the expected share E[k] / K.
"""

import torch
from transformers import AutoModelForTokenClassification, PreTrainedModel

from models.load import BadModel, checkpoint_gradients, from_pretrained, load_config
from models.packed_attention import attention_name


def load_process_reward(
    path: str, num_labels: int | None = None, attention: str = "sdpa", is_checkpointing_gradients: bool = False
) -> PreTrainedModel:
    """A process reward model: a trained folder, or a policy's body with a fresh head of `num_labels`.

    The fresh head is zero: before training every score is 1/2 (one label) or the middle of the classes.
    """
    config = load_config(path)
    is_trained = any(name.endswith("ForTokenClassification") for name in config.architectures or [])
    if is_trained and num_labels not in (None, config.num_labels):
        raise BadModel(f"{path} has {config.num_labels} labels, not {num_labels}: set model.num_labels=null")
    if not is_trained and num_labels is None:
        raise BadModel(f"{path} is no process reward model: train one, or set model.num_labels for a fresh head")
    config.classifier_dropout = 0.0
    if num_labels is not None:
        config.num_labels = num_labels
    new, dropped = ([], []) if is_trained else (["score."], ["lm_head."])
    model = from_pretrained(
        AutoModelForTokenClassification,
        path,
        may_lack=new,
        may_add=dropped,
        config=config,
        attn_implementation=attention_name(attention),
    )
    model.config.use_cache = False
    if is_checkpointing_gradients:
        checkpoint_gradients(model)
    if not is_trained:
        for parameter in model.get_submodule("score").parameters():
            torch.nn.init.zeros_(parameter)
    return model


def scores_from_logits(logits: torch.Tensor) -> torch.Tensor:
    """Logits [..., L] → scores [...] in [0, 1] (L = 1: sigmoid; L = K + 1: expected share of K)."""
    logits = logits.float()
    num_labels = logits.shape[-1]
    if num_labels == 1:
        return torch.sigmoid(logits.squeeze(-1))
    shares = torch.arange(num_labels, device=logits.device) / (num_labels - 1)
    return (torch.softmax(logits, dim=-1) * shares).sum(-1)
