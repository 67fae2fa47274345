"""What a model's folder says of its training, file by file: its problems, its responses, and how its rows were laid
out. Whoever makes another folder of the same weights takes them along."""

import shutil
from pathlib import Path

from espalier.data.seen_responses import FILE as RESPONSES
from espalier.data.training_layout import FILE as LAYOUT
from espalier.data.training_problems import FILE as PROBLEMS

FILES = (PROBLEMS, RESPONSES, LAYOUT)


def copy_trained_on(source: Path, target: Path) -> None:
    """Copy those of the files that `source` has."""
    for name in FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
