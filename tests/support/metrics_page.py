"""docs/metrics.md, as tests read it."""

import re


def is_defined(name: str, page: str) -> bool:
    """Whether a metric stands on the page: by its whole name, or behind another of its group in one line."""
    group, _, rest = name.rpartition("/")
    if group == "reward":
        return "`reward/PART`" in page
    lines = [line for line in page.splitlines() if line.startswith(f"| `{group}/" if group else f"| `{name}`")]
    cells = [cell for line in lines for cell in re.findall(r"`([^`]+)`", line.split("|")[1])]
    heads = [cell.removeprefix(f"{group}/") for cell in cells]
    endings = [head + cell for head in heads for cell in cells if cell.startswith("_")]
    return rest in heads or rest in endings
