"""Names with two meanings: a module, a class or a public function whose name another package uses as well."""

import ast
from collections import defaultdict
from collections.abc import Iterable, Mapping

from benchmarks.house.source import Found, Source, public

# Name → why it means the same thing in every package that has it.
SAME_IDEA: dict[str, str] = {
    "main": "what a program does when it is run",
}


def names_with_two_meanings(sources: Iterable[Source], same_idea: Mapping[str, str] | None = None) -> Found:
    """Count the names that two packages give to two modules, two classes or two public functions."""
    excused = SAME_IDEA if same_idea is None else same_idea
    sources = list(sources)
    users: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)
    for source in sources:
        if source.path.stem != "__init__":
            users["module", source.path.stem].setdefault(source.package, source.place())
    for found in public(sources):
        if not found.owner:
            kind = "class" if isinstance(found.node, ast.ClassDef) else "function"
            users[kind, found.name].setdefault(found.source.package, found.source.place(found.node))
    twice = {key: places for key, places in users.items() if len(places) > 1 and key[1] not in excused}
    return Found(len(twice), [f"{kind} {name}: {', '.join(places.values())}" for (kind, name), places in twice.items()])
