"""Root configs of tests, whose fields are set by their own names wherever that says which."""

from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

C = TypeVar("C")


def root_config(config: C | type[C], **values: Any) -> C:
    """A copy of a config, or one of a class's defaults, with `values`: of its own fields, or of those of its topics.

    A field of a topic is called by its name, where no other topic has one of it, or as `topic_name`. Raises LookupError
    where a name says no field, or several.
    """
    made: Any = config() if isinstance(config, type) else config
    topics = {part.name for part in fields(made) if is_dataclass(getattr(made, part.name))}
    own = {part.name for part in fields(made)}
    changes: dict[str, Any] = {name: value for name, value in values.items() if name in own}
    for name in values.keys() - own:
        places = [(topic, part.name) for topic in topics for part in fields(getattr(made, topic))
                  if name in (part.name, f"{topic}_{part.name}")]  # fmt: skip
        if len(places) != 1:
            raise LookupError(f"{type(made).__name__}: {name} is in {places or 'no topic'}")
        topic, field = places[0]
        changes[topic] = replace(changes.get(topic, getattr(made, topic)), **{field: values[name]})
    return replace(made, **changes)
