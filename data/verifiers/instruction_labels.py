"""What a row's ground truth says about instructions to follow, in each published form.

| form | published with |
|---|---|
| `{"func_name": NAME, "N": 3, ...}`, as an object or as its JSON text | RLVR-IFeval: one instruction |
| `[{"instruction_id": [...], "kwargs": [...]}]`, as JSON or as Python writes it | the sets of several instructions |
| `{"instruction_id_list": [...], "kwargs": [...]}` | IFEval itself |
"""

import ast
import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from espalier.data.sources import BadRow
from espalier.data.verifiers.instructions import INSTRUCTIONS, RELATIONS, RLVR_NAMES


@dataclass(frozen=True)
class Instruction:
    """One instruction with its arguments."""

    id: str
    arguments: dict[str, Any] = field(default_factory=dict)

    def is_followed(self, text: str) -> bool:
        """Check a text; an empty one follows nothing."""
        return bool(text.strip()) and INSTRUCTIONS[self.id](text, **self.arguments)


def read_instructions(truth: Any) -> tuple[Instruction, ...]:
    """Return the instructions of a ground truth. Raises BadRow, naming what is wrong, on any other form."""
    value = _parsed(truth) if isinstance(truth, str) else truth
    if isinstance(value, Sequence) and not isinstance(value, str):
        found = [one for part in value for one in read_instructions(part)]
    elif isinstance(value, Mapping) and value.get("func_name"):
        found = [_from_rlvr(value)]
    elif isinstance(value, Mapping):
        ids = value.get("instruction_id_list", value.get("instruction_id"))
        ids = [ids] if isinstance(ids, str) else ids
        arguments = value.get("kwargs")
        if not isinstance(ids, list) or not isinstance(arguments, list) or len(ids) != len(arguments):
            raise BadRow("instructions need instruction_id_list and kwargs of equal length, or a func_name")
        found = [_checked(one, given or {}) for one, given in zip(ids, arguments, strict=True)]
    else:
        raise BadRow(f"instructions must be an object or a list of them, got {str(value)[:40]!r}")
    if not found:
        raise BadRow("the ground truth names no instruction")
    return tuple(found)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        try:
            return ast.literal_eval(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            raise BadRow(f"instructions are neither JSON nor a Python literal: {text[:40]!r}") from None


def _from_rlvr(label: Mapping[str, Any]) -> Instruction:
    name = str(label["func_name"])
    if name not in RLVR_NAMES:
        raise BadRow(f"there is no instruction '{name}': known are {', '.join(sorted(RLVR_NAMES))}")
    identity, arguments, more = RLVR_NAMES[name]
    given = {ours: label[theirs] for theirs, ours in arguments.items() if label.get(theirs) is not None}
    return _checked(identity, {**given, **more})


def _checked(identity: Any, arguments: Mapping[str, Any]) -> Instruction:
    """Return an instruction whose check takes just these arguments; null ones are left out, as the sets mean them."""
    if identity not in INSTRUCTIONS:
        raise BadRow(f"there is no instruction '{identity}': known are {', '.join(INSTRUCTIONS)}")
    given = {name: value for name, value in arguments.items() if value is not None}
    parameters = inspect.signature(INSTRUCTIONS[identity]).parameters
    missing = [n for n, p in parameters.items() if n != "text" and p.default is p.empty and n not in given]
    strange = [name for name in given if name not in parameters]
    if missing or strange:
        what = f"lacks '{missing[0]}'" if missing else f"has no argument '{strange[0]}'"
        raise BadRow(f"the instruction {identity} {what}")
    for name, value in given.items():
        if name.endswith("relation") and value not in RELATIONS:
            raise BadRow(f"{identity}: {name} must be one of {', '.join(RELATIONS)}, got {value!r}")
        if name in ("keywords", "forbidden_words") and not _is_list_of_words(value):
            raise BadRow(f"{identity}: {name} must be a list of texts, got {str(value)[:40]!r}")
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if name.startswith(("num_", "nth_")) or name.endswith("frequency"):
            if not is_number or value != int(value):
                raise BadRow(f"{identity}: {name} must be a whole number, got {value!r}")
            given[name] = int(value)
    return Instruction(str(identity), given)


def _is_list_of_words(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(word, str) and word.strip() for word in value)
