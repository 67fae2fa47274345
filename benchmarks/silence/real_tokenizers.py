"""The tokenizers of `token_paths`, and what their tokens are as bytes, read without any decoder of the product.

Two are published ones that lie in the package mistral_common: SentencePiece with 32k pieces and byte fallback, in the
two forms it is met in as a fast tokenizer (a space written before every text, or before a text that begins with none),
and byte-level BPE with 131k tokens. The third is the quick start's.
"""

import json
import tempfile
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

from espalier.models.tokenizer import is_plain, load_tokenizer

SENTENCE_PIECE, BYTE_LEVEL = "tokenizer.model.v1", "tekken_240718.json"
NAMES = ("sentencepiece", "sentencepiece_first", "tekken", "tiny")
_TINY_TEXTS = ["Mia has 3 apples. She buys 4 more.\n3 + 4 = 7\n#### 7\n", "Tom: 12 - 5 = 7\nleft: 7\n"]
_CHAT = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% else %} {{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
)


@dataclass(frozen=True)
class Subject:
    """A tokenizer as the product loads it; what only some ask is made when it is asked for."""

    name: str
    folder: Path
    tokenizer: Any

    @cached_property
    def token_bytes(self) -> dict[int, bytes]:
        """The bytes of its tokens by id, none for a special token."""
        return _token_bytes(self.name, self.tokenizer)

    @property
    def original(self) -> Any:
        """mistral_common's own (encode, decode), None for the tiny one."""
        if self.name == "tiny":
            return None
        return _tekken_original() if self.name == "tekken" else _sentence_piece_original()

    @property
    def is_sentence_piece(self) -> bool:
        """Whether the first space of a whole text is not part of it."""
        return self.name.startswith("sentencepiece")

    def raw(self, ids: list[int]) -> bytes:
        """Return the bytes of a whole sequence."""
        found = b"".join(self.token_bytes[token] for token in ids)
        return found.removeprefix(b" ") if self.is_sentence_piece else found

    def added(self, prompt_ids: list[int], ids: list[int]) -> bytes:
        """Return the bytes that `ids` add to their prompt."""
        return self.raw([*prompt_ids, *ids])[len(self.raw(prompt_ids)) :]


def data_folder() -> Path:
    """Say where mistral_common keeps its tokenizers. Raises ImportError where it is not installed."""
    import mistral_common

    return Path(mistral_common.__file__).parent / "data"


def build(name: str, folder: Path, num_ranks: int | None = None) -> Subject:
    """Return the tokenizer of that name, written to a folder as a model's and loaded from it. `num_ranks` takes the
    first tokens of the byte-level one alone (it is built faster)."""
    folder.mkdir(parents=True, exist_ok=True)
    if name == "tiny":
        from espalier.models.tiny import build_tokenizer

        return _saved(name, folder, build_tokenizer(_TINY_TEXTS, 320))
    if name == "tekken":
        return _saved(name, folder, _tekken(num_ranks))
    return _saved(name, folder, _sentence_piece(name == "sentencepiece"))


def _saved(name: str, folder: Path, tokenizer: Any) -> Subject:
    tokenizer.save_pretrained(folder)
    config = {"model_type": "llama", "vocab_size": len(tokenizer), "transformers_version": version("transformers")}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").touch()
    assert is_plain(str(folder)), "the light loader is to be measured"
    return Subject(name, folder, load_tokenizer(str(folder)))


def _fast(tokenizer: Any, **tokens: str) -> Any:
    from transformers import PreTrainedTokenizerFast

    # a copy: it is cached, and tokens are added to it
    return PreTrainedTokenizerFast(tokenizer_object=deepcopy(tokenizer), clean_up_tokenization_spaces=False, **tokens)


def _sentence_piece(is_legacy: bool) -> Any:
    """As a fast tokenizer, in one of its two forms."""
    found = _fast(_sentence_piece_backend(is_legacy), bos_token="<s>", eos_token="</s>", unk_token="<unk>",
                  pad_token="</s>")  # fmt: skip
    found.chat_template = _CHAT
    return found


@cache
def _sentence_piece_backend(is_legacy: bool) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
    from tokenizers.models import BPE

    vocab, merges = _pieces_and_merges()
    backend = Tokenizer(BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.add_special_tokens([AddedToken(name, normalized=False) for name in ("<unk>", "<s>", "</s>")])
    if is_legacy:  # what SentencePiece itself does: a space before every text
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1)]
    )
    return backend


@cache
def _pieces_and_merges() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """As the model's own fast tokenizer was published: a merge for every way to cut a piece into two, best score first.
    (transformers 5 orders them by id, and tokenises two spaces before a word otherwise.)"""
    from sentencepiece import SentencePieceProcessor

    source = SentencePieceProcessor(str(data_folder() / SENTENCE_PIECE))
    vocab = {source.id_to_piece(token): token for token in range(source.get_piece_size())}
    pairs = [
        (-source.get_score(token), vocab[piece[:cut]], vocab[piece[cut:]], piece[:cut], piece[cut:])
        for piece, token in vocab.items()
        if not source.is_byte(token) and not source.is_control(token)
        for cut in range(1, len(piece))
        if piece[:cut] in vocab and piece[cut:] in vocab
    ]
    merges = [(left, right) for *_, left, right in sorted(pairs)]
    return vocab, merges


def _tekken(num_ranks: int | None) -> Any:
    found = _fast(_tekken_backend(num_ranks), bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>")
    found.chat_template = _CHAT
    return found


@cache
def _tekken_backend(num_ranks: int | None) -> Any:
    from transformers.integrations.mistral import MistralConverter

    path = data_folder() / BYTE_LEVEL
    if num_ranks is None:
        return MistralConverter(str(path)).converted()
    table = json.loads(path.read_bytes())
    with tempfile.NamedTemporaryFile("w", suffix=".json") as part:
        json.dump({**table, "vocab": table["vocab"][:num_ranks]}, part)
        part.flush()
        return MistralConverter(part.name).converted()


@cache
def _sentence_piece_original() -> Any:
    from mistral_common.tokens.tokenizers.sentencepiece import SentencePieceTokenizer

    return SentencePieceTokenizer(str(data_folder() / SENTENCE_PIECE))


@cache
def _tekken_original() -> Any:
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    return Tekkenizer.from_file(str(data_folder() / BYTE_LEVEL))


def _token_bytes(name: str, tokenizer: Any) -> dict[int, bytes]:
    """From the names of the tokens: `▁` is a space and `<0x0A>` a byte, or a letter for each byte."""
    special, found = set(tokenizer.all_special_ids), dict[int, bytes]()
    special |= {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    letters = _letters()
    for piece, token in tokenizer.get_vocab().items():
        if token in special:
            found[token] = b""
        elif name in ("tekken", "tiny"):
            found[token] = bytes(letters[letter] for letter in piece)
        elif piece.startswith("<0x") and len(piece) == 6:
            found[token] = bytes([int(piece[3:5], 16)])
        else:
            found[token] = piece.replace("▁", " ").encode()
    return found


def _letters() -> dict[str, int]:
    """Letter → byte, as byte-level BPE writes bytes (Radford et al. 2019): printable ones as they are, the others from
    U+0100 on."""
    shown = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + k): byte for k, byte in enumerate(hidden)}
