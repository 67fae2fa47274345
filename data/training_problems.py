"""Which problems a model was trained on: `training_problems.json` in its folder, hashes of their ids.

Published judged steps have the hash of their question for an id (`problem_key`), tasks have names: `gsm8k-train-0`. So
a problem is looked for by its id and by its text, and where neither can be in the file nobody knows.

A reward model flatters what it was trained on: its scores of those problems say less about a step than about its
memory. So the folder of a model trained on steps, pairs or outcomes says which problems these were, those of the
model of its kind that it started from included, and whoever scores with it can tell.
"""

import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from espalier.data.process_data.published import problem_key
from espalier.data.records import BadInput
from espalier.data.splits import original_id

log = logging.getLogger(__name__)
FILE = "training_problems.json"
_OF_QUESTION = re.compile(r"problem-[0-9a-f]{16}")
NAME, QUESTION = "name", "question"


def problem_hash(problem_id: str) -> str:
    """Return 16 hexadecimal digits of a problem's id; its copies in a mixture have the same."""
    return hashlib.sha256(f"problem/{original_id(problem_id)}".encode()).hexdigest()[:16]


def kind_of_id(problem_id: str) -> str:
    """Say what an id comes from: NAME, which a set gave its problem, or QUESTION (`problem_key`)."""
    return QUESTION if _OF_QUESTION.fullmatch(original_id(problem_id)) else NAME


@dataclass(frozen=True)
class SeenProblems:
    """What a model was trained on: `hashes` of ids, and of which `kinds` these are, as far as its folder says."""

    hashes: frozenset[str]
    kinds: frozenset[str] = frozenset()

    def says(self, problem_id: str, text: str = "", is_question: bool = False) -> bool | None:
        """Say whether the model was trained on a problem: its id, and a text that may be its question or is it
        (`is_question`). None where ids of another kind are known of the model than of the problem."""
        if {problem_hash(problem_id), problem_hash(problem_key(text))} & self.hashes:
            return True
        known = {kind_of_id(problem_id), *([QUESTION] if is_question else [])}
        return None if self.kinds - known else False


def write_training_problems(
    folder: Path, problem_ids: Iterable[str], started_from: str, must_say: bool = False, policy: str = ""
) -> None:
    """Write the file of a model trained on these problems, from a model in the folder (or hub name) `started_from` (""
    where that one's problems do not count). `policy`: the one that a reward model was made from; what it learned right
    from wrong on is written beside, not among them: the head has not seen it, the layers below have.
    Nothing is written where that one `must_say` its own problems and does not: a list without them would call unseen
    what was seen."""
    earlier = known_before(read_training_problems, started_from, must_say, folder)
    if earlier is None:
        return
    own = {problem_hash(problem_id): kind_of_id(problem_id) for problem_id in problem_ids}
    hashes, kinds = sorted(earlier | own.keys()), {*own.values()}
    below = read_policy_problems(started_from) if started_from else frozenset()
    below |= read_training_problems(policy) or frozenset() if policy else frozenset()
    more = {"of_its_policy": sorted(below)} if below else {}
    if earlier:
        more["own"] = sorted(own)
        before = _read(started_from)
        kinds = kinds | before.kinds if before and before.kinds else set()
    if kinds:
        more["kinds"] = sorted(kinds)
    (folder / FILE).write_text(json.dumps({"problems": hashes, **more}) + "\n")


def known_before(
    read: Callable[[str], frozenset[str] | None], started_from: str, must_say: bool, folder: Path
) -> frozenset[str] | None:
    """Return what the model that `folder`'s was trained from says of its own training by `read`, nothing for a policy
    that says nothing; None, with a warning, for a reward model or verifier, which `must_say`, and does not."""
    earlier = read(started_from) if started_from else None
    if earlier is None and must_say:
        log.warning("%s: a reward model or verifier that does not say what it was trained on, so neither does %s",
                    started_from, folder)  # fmt: skip
        return None
    return earlier or frozenset()


def write_problems_of_log_ratio(folder: Path, policy: str) -> None:
    """Write the file of a reward model that is the log-ratio of `policy` and the one before it: what `policy` itself
    was trained on; what the one before had seen, which both have, stands beside. Nothing is there where the policy's
    folder does not say."""
    found = _read(policy)
    (folder / FILE).unlink(missing_ok=True)
    if found is None:
        log.warning("%s does not say which problems it was trained on, so neither does %s", policy, folder)
        return
    more = {"of_its_policy": sorted((found.below | found.problems) - found.own), "kinds": sorted(found.kinds)}
    row = {"problems": sorted(found.own)} | {name: value for name, value in more.items() if value}
    (folder / FILE).write_text(json.dumps(row) + "\n")


def read_training_problems(folder: str) -> frozenset[str] | None:
    """Return the hashes of the problems that a model was trained on; None where its folder does not say. Raises
    BadInput on a file that cannot be read."""
    found = _read(folder)
    return None if found is None else found.problems


def read_seen_problems(folder: str) -> SeenProblems | None:
    """Return what a model was trained on; None where its folder does not say. Raises BadInput on a file that cannot be
    read."""
    found = _read(folder)
    return None if found is None else SeenProblems(found.problems, found.kinds)


def read_policy_problems(folder: str) -> frozenset[str]:
    """Return the hashes of the problems on which the policy that a reward model was made from had learned right from
    wrong, as far as its folder says. Raises BadInput on a file that cannot be read."""
    found = _read(folder)
    return frozenset() if found is None else found.below


@dataclass(frozen=True)
class _Said:
    """What a file says: the problems, those of the policy below a head, those of the last training alone, and the kinds
    of ids that the first are hashes of (none: the file is from before these were written)."""

    problems: frozenset[str]
    below: frozenset[str]
    own: frozenset[str]
    kinds: frozenset[str]


def _read(folder: str) -> _Said | None:
    path = Path(folder) / FILE
    if not path.is_file():
        return None
    try:
        row = json.loads(path.read_text())
        parts = row["problems"], row.get("of_its_policy", ()), row.get("own", row["problems"]), row.get("kinds", ())
        return _Said(*(frozenset(map(str, part)) for part in parts))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInput(f"{path} cannot be read ({error}): train the model again, or remove the file") from None
