"""Whether a model was trained on the rows that it is evaluated on: hashes of the responses it was trained on.

A response is named by its text without case and white space, so that a template, a tokenizer or a chat format around it
changes nothing. A row of a benchmark counts as seen where one of its chosen **and** one of its rejected responses were
trained on, or any response of at least `LONG` words, or of `LONG_UNSPACED` characters in a script without spaces
between words: a short one ("I cannot help with that.") occurs by chance.

What a generative verifier learned to judge was trained on like any other response, though it stands in its prompts.
Paraphrases are not found, nor rows of which only the prompt was trained on.
"""

import hashlib
import json
import re
from collections.abc import Collection, Iterable
from pathlib import Path

from espalier.data.ranked_responses import RankedResponses
from espalier.data.records import BadInput
from espalier.data.training_problems import known_before

FILE = "training_responses.json"
LONG = 20
LONG_UNSPACED = 60
# Thai and Lao, Burmese, Khmer, kana, Han
_UNSPACED = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff]")


def response_hash(text: str) -> str:
    """Return 16 hexadecimal digits of a response's text."""
    return hashlib.sha256(("response/" + "".join(text.casefold().split())).encode("utf-8", "replace")).hexdigest()[:16]


def is_seen(row: RankedResponses, hashes: Collection[str]) -> bool:
    """Say whether a row was seen, by the rule of the module."""
    chosen, rejected = ([text for text in side if response_hash(text) in hashes] for side in (row.chosen, row.rejected))
    return bool(chosen and rejected) or any(map(_is_long, (*chosen, *rejected)))


def _is_long(text: str) -> bool:
    return len(text.split()) >= LONG or len(_UNSPACED.findall(text)) >= LONG_UNSPACED


def seen_rows(rows: Iterable[RankedResponses], hashes: Collection[str]) -> list[str]:
    """Return the ids of the rows that were seen."""
    return [row.id for row in rows if is_seen(row, hashes)]


def write_training_responses(folder: Path, hashes: Iterable[str], started_from: str, must_say: bool = False) -> None:
    """Write the file of a model trained on these responses and on those of the model it `started_from`. Nothing is
    written where that one `must_say` its own and does not: a list without them would call unseen what was seen."""
    earlier = known_before(read_training_responses, started_from, must_say, folder)
    if earlier is None:
        return
    (folder / FILE).write_text(json.dumps({"responses": sorted(earlier | frozenset(hashes))}) + "\n")


def read_training_responses(folder: str) -> frozenset[str] | None:
    """Return the hashes of the responses that a model was trained on; None where its folder does not say. Raises
    BadInput on a file that cannot be read."""
    path = Path(folder) / FILE
    if not path.is_file():
        return None
    try:
        return frozenset(map(str, json.loads(path.read_text())["responses"]))
    except (ValueError, KeyError, TypeError) as error:
        raise BadInput(f"{path} cannot be read ({error}): train the model again, or remove the file") from None
