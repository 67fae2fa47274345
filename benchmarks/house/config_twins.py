"""Config twins: pairs of larger configs that say nearly the same and therefore want a base.

A line counts where it says something: blank lines and comments do not, and indentation is left out. Two files are
twins where both have MIN_LINES such lines and agree in TWIN_SHARE of them or more.

Run it: `python -m benchmarks.house.config_twins` lists the twins of conf/.
"""

from collections import Counter
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path

CONF = Path(__file__).resolve().parent.parent.parent / "conf"
MIN_LINES = 15
TWIN_SHARE = 0.9


def effective_lines(text: str) -> list[str]:
    """Return the lines of a YAML that say something: stripped, without blank lines and comments, in order."""
    lines = (line.strip() for line in text.splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def shared_share(left: list[str], right: list[str]) -> float:
    """Return the share of lines that two files have in common, from 0 to 1.

    The files are multisets of lines: a line that one file has twice and the other once is common once. The share is
    the number of common lines per line of the longer file; two empty files share 0.
    """
    longer = max(len(left), len(right))
    return (Counter(left) & Counter(right)).total() / longer if longer else 0.0


def config_twins(texts: Mapping[str, str]) -> list[tuple[str, str, float]]:
    """Return the twins among files (name -> text) as (one name, the other, their share), the closest first."""
    large = {name: lines for name, text in sorted(texts.items()) if len(lines := effective_lines(text)) >= MIN_LINES}
    pairs = [(a, b, shared_share(large[a], large[b])) for a, b in combinations(large, 2)]
    return sorted((pair for pair in pairs if pair[2] >= TWIN_SHARE), key=lambda pair: -pair[2])


def read_configs(folder: Path = CONF) -> dict[str, str]:
    """Return the text of every YAML below a folder by its path relative to that folder."""
    return {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*.yaml"))}


if __name__ == "__main__":
    for one, other, share in config_twins(read_configs()):
        print(f"{share:.2f}  {one}  {other}")
