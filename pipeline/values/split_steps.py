"""Trajectory → Trajectory with other steps: at improbable tokens, or by another step splitter; nothing is sampled anew.

    python run_stage.py -cn values/split_steps input=sampled.jsonl output=trajectories.jsonl stage.policy=MODEL

Everything that reads steps (cutting, completing, valuing, labelling, training, scoring, pairing) reads the new ones:
the states of segment policy optimisation (SPO, Guo et al. 2025) are the states of these trajectories. Responses, ids
and grades stay as they are, and step ends are found on the sampler's own tokens. Score and label files of the
trajectories before are of other steps: make them again.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from espalier.data.records import BadInput, Trajectory
from espalier.data.row_index import stream_records
from espalier.data.splitters import SPLITTERS, splitter
from espalier.data.steps import Decoder, check_ends, check_join
from espalier.data.token_text import read_response, steps_on_tokens
from espalier.pipeline.stage import StageContext
from espalier.values.cut_points import split_at_cut_points

AT_CUT_POINTS = "cut_points"


@dataclass(frozen=True)
class SplitSteps:
    """`policy`: the model folder whose tokenizer wrote the tokens. `by`: `cut_points` or a splitter of
    `data.splitters`.

    At cut points a step ends after a token sampled with a probability below `threshold`: after every one, with
    `cut_points_per_segment` after every so many, with `num_segments` so that all steps hold equally many (see
    `data.splitters.probability`; this last form looks ahead). They need
    trajectories sampled with params.return_logprobs=true.
    """

    policy: str
    by: str = AT_CUT_POINTS
    threshold: float = 0.9
    num_segments: int | None = None
    cut_points_per_segment: int | None = None

    def __post_init__(self) -> None:
        if self.by != AT_CUT_POINTS and self.by not in SPLITTERS:
            raise BadInput(f"stage.by must be {AT_CUT_POINTS} or one of {', '.join(SPLITTERS)}, got '{self.by}'")

    def inputs(self) -> list[str]:
        """Return the tokenizer, where the policy is a folder."""
        path = Path(self.policy) / "tokenizer.json"
        return [str(path)] if path.is_file() else []

    def run(self, input_path: str, context: StageContext) -> Iterator[Trajectory]:
        """As many trajectories, in their order, read one by one. Raises BadInput where log-probs or token ids are
        missing, where the tokens are another tokenizer's, and where an id stands twice."""
        from espalier.models.load import load_tokenizer

        decode = Decoder(load_tokenizer(self.policy))
        number = before = steps = tokens = 0
        for row in stream_records(Trajectory, input_path, context.output):
            found = self._split(row, decode)
            number, before = number + 1, before + len(row.steps)
            steps, tokens = steps + len(found.steps), tokens + len(found.response_ids)
            yield found
        context.counts.update(trajectories=number, steps_before=before, steps=steps)
        context.counts["steps_mean"] = round(steps / max(1, number), 3)
        context.counts["tokens_a_step"] = round(tokens / max(1, steps), 3)

    def _split(self, row: Trajectory, decode: Decoder) -> Trajectory:
        check_ends(row.steps, row.step_ends, row.id)
        if not row.response:
            return row
        if self.by == AT_CUT_POINTS:
            if row.logprobs is None:
                raise BadInput(f"trajectory '{row.id}' has no log-probs: sample it with params.return_logprobs=true")
            return split_at_cut_points(
                row,
                row.logprobs,
                decode,
                threshold=self.threshold,
                num_segments=self.num_segments,
                cut_points_per_segment=self.cut_points_per_segment,
            )
        steps = splitter(self.by)(row.response)
        place = f"trajectory '{row.id}'"
        check_join(steps, row.response, place)
        tokens = read_response(row.prompt_ids, row.response_ids, decode, row.response, place)
        steps, step_ends = steps_on_tokens(steps, tokens)
        return replace(row, steps=steps, step_ends=step_ends)
