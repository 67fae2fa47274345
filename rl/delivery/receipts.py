"""What an engine read of a delivery, beside what was sent."""

from collections.abc import Mapping, Sequence

from espalier.rl.probes.checks import WEIGHTS, Fault, ProbeFailed


class StaleWeights(ProbeFailed):
    """The engine does not serve the trainer's policy: the run stops before it learns from wrong samples."""

    def __init__(self, evidence: str, kind: str = WEIGHTS):
        super().__init__(Fault(kind, evidence))


def check_receipt(
    sent: Mapping[str, str],
    receipt: Mapping[str, str],
    earlier: Sequence[Mapping[str, str]],
    name: str = "the engine",
) -> None:
    """Raise StaleWeights where the engine `name` did not read what was sent; `earlier` are deliveries, the newest last.

    Named: the tensors, and how many versions old they are where they are known.
    """
    missing = [name for name in sent if name not in receipt]
    wrong = [name for name in sent if name in receipt and receipt[name] != sent[name]]
    if not missing and not wrong:
        return
    found = [*missing, *wrong]
    names = ", ".join(found[:3]) + (" …" if len(found) > 3 else "")
    message = f"{name} read {len(sent) - len(found)} of {len(sent)} tensors as they were sent; not {names}"
    for age, before in enumerate(reversed(earlier), start=1):
        if wrong and all(receipt[name] == before.get(name) for name in wrong):
            message += f", which {'is' if len(wrong) == 1 else 'are'} {age} version{'s' if age > 1 else ''} old"
            break
    raise StaleWeights(message)
