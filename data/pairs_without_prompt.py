"""Pairs that name their question and do not hold it: columns `chosen`, `reject`, `id` (Jiao et al. 2024, its files).

The prompt comes from another file, whose rows hold the same `id` and the prompt as `text` (the sampled solutions that
the pairs were made of) or `prompt`. Prompt and response are joined as they stand. A side is whole, and an end token
stands behind it, unless `is_full` (both sides), `chosen_full` or `reject_full` is false: then it is the beginning of a
solution, behind which the model must go on.
"""

from collections.abc import Mapping
from typing import Any

from espalier.data.conversations import PairTokens, ended_response
from espalier.data.prompts import encode_text
from espalier.data.records import BadInput
from espalier.data.sources import BadRow, Row, read_json_rows
from espalier.data.token_text import encode_response


def is_without_prompt(row: Row) -> bool:
    """Say whether a row has the columns of such a pair."""
    return row.has("reject") and not row.has("rejected")


def read_prompts(path: str) -> dict[str, str]:
    """Id → prompt. Raises BadInput on a row without one, or with two that differ, and where an id has two."""
    prompts: dict[str, str] = {}
    for row in read_json_rows(path):
        said = [row.fields[name] for name in ("text", "prompt") if row.has(name)]
        prompt = said[0] if said else None
        if said[1:] not in ([], [prompt]):
            raise BadInput(f"{row.place}: text and prompt differ: keep the one that the pairs go on from")
        if row.error or not isinstance(prompt, str) or not prompt:
            raise BadInput(f"{row.place}: {row.error or 'no prompt'}: a row must hold id and text (or prompt)")
        if prompts.setdefault(_key(row, row.place), prompt) != prompt:
            raise BadInput(
                f"{row.place}: id '{row.fields['id']}' has another prompt above: name the file of one prompt"
            )
    return prompts


def _key(row: Row, place: str) -> str:
    identity = row.fields.get("id")
    if not isinstance(identity, str | int) or isinstance(identity, bool):
        raise BadInput(f"{place}: no id, which names the question")
    return str(identity)


def tokens_without_prompt(row: Row, tokenizer: Any, prompts: Mapping[str, str]) -> PairTokens:
    """Return the pair of a row and its question's prompt. Raises BadRow on a row that holds none."""
    if row.has("chosen_prefix") or row.has("reject_prefix"):
        raise BadRow(
            "its sides go on from different beginnings (chosen_prefix, reject_prefix), and a pair has one prompt"
        )
    chosen, reject = (row.fields.get(name) for name in ("chosen", "reject"))
    if not isinstance(chosen, str) or not isinstance(reject, str) or not chosen or not reject:
        raise BadRow("chosen and reject must be texts")
    if chosen == reject:
        raise BadRow("chosen and reject are the same")
    identity = row.fields.get("id")
    prompt = prompts.get(str(identity))
    if prompt is None or isinstance(identity, bool):
        raise BadRow(f"no prompt of id {identity!r}: name the file of its questions as stage.prompts")
    if chosen.startswith(prompt) and reject.startswith(prompt):
        raise BadRow("chosen and reject repeat the prompt of their id")
    prompt_ids = encode_text(tokenizer, prompt, row.place)
    sides = []
    for name, text in (("chosen", chosen), ("reject", reject)):
        is_whole = next((row.fields[flag] for flag in (f"{name}_full", "is_full") if row.has(flag)), True)
        if not isinstance(is_whole, bool):
            raise BadRow(f"{name}_full or is_full must be true or false, got {is_whole!r}")
        sides.append(ended_response(tokenizer, prompt_ids, text) if is_whole
                     else encode_response(tokenizer, prompt_ids, text)[0])  # fmt: skip
    return PairTokens(prompt, chosen, reject, prompt_ids, *sides)
