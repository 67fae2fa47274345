"""What a sampling run is given, checked before the first request: ids, and whose states and tokens they are."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from espalier.data.records import BadInput, State
from espalier.data.steps import Decode
from espalier.data.token_text import added_text
from espalier.runtime.fingerprints import model_fingerprint, same_weights
from espalier.runtime.stored_provenance import read_meta, sampled_by
from espalier.sampling.client import SampleRequest

log = logging.getLogger("sample")

_MANY = 32


def check_unique(requests: Sequence[SampleRequest]) -> None:
    """Raise BadInput on an id that two requests have: their rows could not be distinguished."""
    seen: set[str] = set()
    for request in requests:
        if request.id in seen:
            raise BadInput(f"two problems have the id '{request.id}': ids must be unique, correct the problems' file")
        seen.add(request.id)


def check_state_tokens(states: Sequence[State], decode: Decode, place: str) -> None:
    """Raise BadInput where the token ids of most of the first states do not read as their text, or as more: they are
    another tokenizer's."""
    looked = [state for state in states if state.prefix.strip() and state.prefix_ids][:_MANY]
    wrong = []
    for state in looked:
        try:
            text = added_text(state.prompt_ids, state.prefix_ids, decode)
        except (IndexError, OverflowError, TypeError, ValueError):  # an id that the tokenizer does not have
            text = ""
        if not text.startswith(state.prefix):
            wrong.append(state.id)
    if len(wrong) * 2 > len(looked):
        remedy = "the states were cut for another policy: set policy= to that, or cut them again"
        raise BadInput(f"{place}: token ids and text of state '{wrong[0]}' differ in policy's tokenizer: {remedy}")


def is_same_model(model: str, policy: str) -> bool | None:
    """Say whether a model that somebody serves is the policy: the same name, the same folder, or a copy of it. None
    where that cannot be told, as one of them is no model folder here: a hub name, an alias, another machine's path."""
    if model == policy or Path(model).resolve() == Path(policy).resolve():
        return True
    if not (Path(model).is_dir() and Path(policy).is_dir()):
        return None
    one, other = model_fingerprint(model), model_fingerprint(policy)
    return same_weights(one, other) if one and other else None


def choose_served(served: Mapping[str, str], policy: str, url: str) -> str:
    """Return the name of the policy among those that a server has; `served`: name → what it is a name of. Raises
    BadInput where all of them are names of others: two policies of one tokenizer could not be distinguished by their
    tokens."""
    if policy in served:
        return policy
    known = {name: is_same_model(model, policy) for name, model in served.items()}
    chosen = next((name for said in (True, None) for name in known if known[name] is said), None)
    if chosen is None:
        raise BadInput(f"{url} serves {', '.join(served.values())}, policy is {policy}: serve that, or set policy= to "
                       "what is served")  # fmt: skip
    if known[chosen] is None:
        log.warning("%s serves %s: that it is the policy, %s, is taken on trust", url, served[chosen], policy)
    return chosen


def check_started(model: str, policy: str, key: str) -> None:
    """Raise BadInput where the model that a run starts an engine for, by the setting `key`, is not the policy."""
    is_same = is_same_model(model, policy)
    if is_same is None:
        log.warning("%s=%s: that it is the policy, %s, is taken on trust", key, model, policy)
    elif not is_same:
        raise BadInput(f"{key}={model} is another model than policy={policy}: leave {key} out, or set policy= to it")


def check_served(served: str, policy: str) -> None:
    """Raise BadInput where a script's server was started for another model (`served`; "": nobody says)."""
    if served and not is_same_model(served, policy):
        raise BadInput(f"the server that this script has started serves {served}, policy is {policy}: serve that "
                       "(unset ESPALIER_SERVER starts a server for it)")  # fmt: skip


def check_origin(states: str, policy: str, fingerprint: str, is_of_any_policy: bool) -> None:
    """Raise BadInput where the provenance of a states file leads to trajectories of another policy.

    `X.meta.json` names the inputs of X; theirs name the policy and its weights. What does not stand there cannot be
    asked, and passes.
    """
    if is_of_any_policy:
        return
    for trajectories in read_meta(Path(states)).get("inputs", {}):
        origin = sampled_by(Path(trajectories)) or sampled_by(Path(states).parent / Path(trajectories).name)
        if origin is None:
            continue
        is_known = origin.weights and fingerprint
        is_same = same_weights(origin.weights, fingerprint) if is_known else Path(origin.policy) == Path(policy)
        if not is_same:
            now = "" if origin.policy != policy else ", which has changed since"
            remedy = "set policy= to that, or requests.is_of_any_policy=true to complete them with another policy"
            raise BadInput(
                f"{states}: its trajectories were sampled by {origin.policy}{now}, policy is {policy}: {remedy}"
            )
