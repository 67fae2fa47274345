"""What a sampling run is given, checked before the first request: ids, and whose states and tokens they are."""

from collections.abc import Sequence
from pathlib import Path

from espalier.data.records import BadInput, State
from espalier.data.steps import Decode
from espalier.data.token_text import added_text
from espalier.runtime.fingerprints import same_fingerprint
from espalier.runtime.stored_provenance import read_meta, sampled_by
from espalier.sampling.client import SampleRequest

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


def check_served(served: str, policy: str) -> None:
    """Raise BadInput where a script's server was started for another model (`served`; "": nobody says): two policies
    of one tokenizer could not be distinguished by their tokens."""
    is_same = not served or served == policy or Path(served).resolve() == Path(policy).resolve()
    if not is_same:
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
        is_same = same_fingerprint(origin.weights, fingerprint) if is_known else Path(origin.policy) == Path(policy)
        if not is_same:
            now = "" if origin.policy != policy else ", which has changed since"
            remedy = "set policy= to that, or requests.is_of_any_policy=true to complete them with another policy"
            raise BadInput(
                f"{states}: its trajectories were sampled by {origin.policy}{now}, policy is {policy}: {remedy}"
            )
