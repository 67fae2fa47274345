"""Words of a dialect of our own, in product code, configurations, scripts and documentation."""

import re
from collections import Counter
from pathlib import Path

from benchmarks.house.source import Found, packages

# A line may end between two words, with a comment sign before the next.
WORDS = re.compile(
    r"(?<![A-Za-z])(foretold|told|kin|mend(?:s|ed|ing)?|stands[\s#]+in|what[\s#]+there[\s#]+is)(?![A-Za-z])", re.I
)


def text_files(root: Path) -> list[Path]:
    """List what a user reads: code of the product, conf/, scripts/, docs/ and the pages at the top."""
    code = [path for name in [*packages(root), "espalier"] for path in (root / name).rglob("*.py")]
    texts = [*(root / "conf").rglob("*.yaml"), *(root / "scripts").glob("*.sh"), *(root / "docs").rglob("*.md")]
    files = [*root.glob("*.py"), *root.glob("*.md"), *code, *texts]
    return sorted({path for path in files if not path.is_symlink() and path.is_file()})


def dialect_words(root: Path) -> Found:
    """Count the occurrences; the files with most of them first."""
    total: Counter[str] = Counter()
    places: dict[str, list[str]] = {}
    for path in text_files(root):
        text, name = path.read_text(), str(path.relative_to(root))
        for match in WORDS.finditer(text):
            total[name] += 1
            line = text.count("\n", 0, match.start()) + 1
            places.setdefault(name, []).append(f"{line} {' '.join(match[1].replace('#', ' ').split()).lower()}")
    rows = [f"{name}: {number} (lines {', '.join(places[name])})" for name, number in total.most_common()]
    return Found(sum(total.values()), rows)
