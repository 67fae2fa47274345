"""Networks of the classes of published reward models with random weights, saved under the published names of weights,
with published tokenizers: what the product's readings are held against where the weights themselves are not at hand."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, LlamaConfig, MistralConfig, Qwen2Config

from benchmarks.silence.real_tokenizers import build

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 512}  # fmt: skip
LLAMA_CHAT = (
    "{{ bos_token }}{% for m in messages %}<|head|>{{ m['role'] }}<|/head|>\n\n{{ m['content'] }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|head|>assistant<|/head|>\n\n{% endif %}"
)
QWEN_CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONFIGS = {"llama": LlamaConfig, "mistral": MistralConfig, "qwen2": Qwen2Config}
# layout → (tokenizer, kind of network, labels, the head's own name "" for none)
MODELS = {
    "math_shepherd": ("pieces", "mistral", 0, ""),
    "rlhflow": ("llama", "llama", 0, ""),
    "qwen": ("qwen", "qwen2", 2, "score."),
    "skywork": ("qwen", "qwen2", 1, "v_head.summary."),
    "reasoneval": ("pieces", "mistral", 3, "score_head."),
    "easy_to_hard": ("pieces", "llama", 0, ""),
    "versa": ("llama", "llama", 0, ""),
    "pure": ("qwen", "qwen2", 2, ""),
    "trl": ("qwen", "qwen2", 2, ""),
    "math_psa": ("llama", "qwen2", 0, ""),
    "er_prm": ("llama", "llama", 0, ""),
    "pqm": ("llama", "llama", 1, "v_head.summary."),
    "math_minos": ("pieces", "mistral", 1, ""),
    "reasonflux": ("qwen", "qwen2", 2, "score."),
    "reasonflux_small": ("qwen", "qwen2", 1, "reward_head.pt"),
}


def build_tokenizers(folder: Path) -> dict[str, Any]:
    """Return "pieces" (Mistral's first vocabulary) and "llama" and "qwen" (a byte-level one with their chat templates
    and special tokens). Raises ImportError where mistral_common is not installed."""
    found = {"pieces": build("sentencepiece", folder / "pieces").tokenizer}
    for name, template in (("llama", LLAMA_CHAT), ("qwen", QWEN_CHAT)):
        made = build("tekken", folder / name, 16000).tokenizer
        special = ["<extra_0>", "[PRM]", "<|head|>", "<|/head|>", "<|eot|>", "<|im_start|>", "<|im_end|>"]
        made.add_special_tokens({"additional_special_tokens": special})
        made.add_tokens([" \n\n\n\n", " \n\n\n\n\n", " ки"])  # one token each in the models' vocabularies
        made.chat_template = template
        found[name] = made
    return found


def save(
    folder: Path,
    tokenizer: Any,
    kind: str,
    labels: int = 0,
    head: dict[str, torch.Tensor] | None = None,
    sizes: dict[str, int] | None = None,
) -> None:
    """Write a random network as it is published: a causal LM, transformers' classifier of tokens, or a body with a head
    of other names."""
    torch.manual_seed(len(str(folder)) % 7)
    shape = SIZES | (sizes or {})
    config = CONFIGS[kind](
        vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, tie_word_embeddings=False, **shape
    )
    if labels and head is None:
        config.num_labels = labels
        model = AutoModelForTokenClassification.from_config(config)
    else:
        model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(3.0)  # scores that are not all alike
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if head is not None:
        weights = load_file(folder / "model.safetensors")
        save_file(weights | head, folder / "model.safetensors", metadata={"format": "pt"})


def write_model(layout: str, folder: Path, tokenizers: dict[str, Any], **sizes: int) -> Path:
    """Write a random model of a layout, with the architecture that its config says as published; its folder."""
    name, kind, labels, prefix = MODELS[layout]
    size = (SIZES | sizes)["hidden_size"]
    draw = torch.Generator().manual_seed(len(layout))

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw) / size**0.5

    head: dict[str, torch.Tensor] | None = None
    if prefix == "score.":
        head = {f"{prefix}0.weight": random(size, size), f"{prefix}0.bias": random(size),
                f"{prefix}2.weight": random(labels, size), f"{prefix}2.bias": random(labels)}  # fmt: skip
    elif prefix.endswith("."):
        head = {f"{prefix}weight": random(labels, size), f"{prefix}bias": random(labels)}
    save(folder, tokenizers[name], kind, labels if head is not None or not prefix else 0, head, sizes)
    if prefix == "reward_head.pt":
        torch.save({"weight": random(labels, size), "bias": random(labels)}, folder / prefix)
    if prefix == "score.":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen2ForProcessRewardModel"]}))
    return folder
