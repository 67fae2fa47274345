"""Whether what a chat model read belongs to the responses it is joined to: ids alone do not say.

Trajectories are called `{problem}/{k}` in every sampling of the same problems.
"""

import logging
from collections.abc import Sequence
from pathlib import Path

from espalier.data.jsonl import file_sha256
from espalier.data.records import BadInput
from espalier.runtime.stored_provenance import asked_about

log = logging.getLogger("stage")


def check_readings(trajectories: str, readings: Sequence[str]) -> None:
    """Raise BadInput where the provenance of a file of `readings` says that other responses were read than those of
    the file `trajectories` as it is now; warn once of files whose provenance does not say."""
    if not readings:
        return
    own, read = file_sha256(trajectories), {path: asked_about(Path(path)) for path in readings}
    for path, digest in read.items():
        if digest not in ("", own):
            raise BadInput(f"{path}: is what a chat model read in another file than {trajectories}, or in that one "
                           "before it changed: name as input the file that was read, or read this one")  # fmt: skip
    unknown = [path for path, digest in read.items() if not digest]
    if unknown:
        log.warning("%s: no provenance says that %s was read in these responses: they are joined by id, and ids are "
                    "the same in every sampling of the problems", trajectories, ", ".join(unknown))  # fmt: skip
