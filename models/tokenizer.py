"""A model folder's tokenizer without its model: `import torch` alone takes seconds, which a caller of an HTTP server
need not pay at every start."""

import json
from pathlib import Path
from typing import Any

# What transformers 4 and 5 write for a tokenizer that is all in its tokenizer.json: no class has code of its own.
_PLAIN = ("PreTrainedTokenizerFast", "TokenizersBackend")
_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json")


def is_plain(path: str) -> bool:
    """Say whether the folder is complete and its tokenizer is in tokenizer.json, with a pad token."""
    folder = Path(path)
    if not all((folder / name).is_file() for name in _FILES) or not any(folder.glob("*.safetensors")):
        return False
    try:
        settings: Any = json.loads((folder / "tokenizer_config.json").read_bytes())
        return settings["tokenizer_class"] in _PLAIN and bool(settings["pad_token"]) and "auto_map" not in settings
    except (ValueError, KeyError, TypeError):
        return False


def load_tokenizer(path: str) -> Any:
    """Return what `models.load.load_tokenizer` loads, and raises; in a fifth of the time where the tokenizer is
    plain."""
    if is_plain(path):
        from transformers import PreTrainedTokenizerFast

        try:
            return PreTrainedTokenizerFast.from_pretrained(path)
        except (OSError, ValueError):
            pass  # the general way explains what is wrong
    from espalier.models import load

    return load.load_tokenizer(path)


def check_model_folder(path: str) -> None:
    """`models.load.check_model_folder`, loaded when it is needed."""
    from espalier.models import load

    load.check_model_folder(path)
