"""Step splitters by name: where one step of a response ends and the next begins.

A splitter is a function `str -> list[str]` (`data.steps.StepSplitter`). What every one of them keeps:

- the pieces join to the response exactly, and none of them is empty ("" has none);
- it never raises, whatever the text (lone surrogates, NUL, LaTeX that is never closed), and its time grows
  linearly with the text;
- `data.token_text` moves its borders to the ends of the sampler's own tokens.

    lines           one line a step; blank lines belong to the step before
    paragraphs      one paragraph a step; blank lines part them
    gsm8k           one line a step; a newline opens the step after it; the `#### answer` joins the last step
    math            sentences and lines, long ones halved, never inside a formula or a LaTeX environment
    react           Thought, Action, Observation, State
    sentences       one sentence a step
    sub_questions   one sub-question with its answer a step

Steps by the policy's own probabilities (segment policy optimisation) need the tokens and not the text alone:
`cut_points_by_probability`.
"""

from espalier.data.records import BadInput
from espalier.data.splitters.latex import find_blocks
from espalier.data.splitters.lines import split_gsm8k, split_lines, split_paragraphs
from espalier.data.splitters.mathematics import split_math
from espalier.data.splitters.probability import cut_points_by_probability, is_cut_point
from espalier.data.splitters.react import (
    CleanedReact,
    ReactStep,
    clean_react_response,
    cleaned_react,
    react_steps,
    split_react,
)
from espalier.data.splitters.sentences import split_sentences
from espalier.data.splitters.sub_questions import split_sub_questions
from espalier.data.steps import StepSplitter

__all__ = [
    "SPLITTERS",
    "CleanedReact",
    "ReactStep",
    "clean_react_response",
    "cleaned_react",
    "cut_points_by_probability",
    "find_blocks",
    "is_cut_point",
    "react_steps",
    "split_gsm8k",
    "split_lines",
    "split_math",
    "split_paragraphs",
    "split_react",
    "split_sentences",
    "split_sub_questions",
    "splitter",
]

SPLITTERS: dict[str, StepSplitter] = {
    "lines": split_lines,
    "paragraphs": split_paragraphs,
    "gsm8k": split_gsm8k,
    "math": split_math,
    "react": split_react,
    "sentences": split_sentences,
    "sub_questions": split_sub_questions,
}


def splitter(name: str) -> StepSplitter:
    """Return the step splitter of that name. Raises BadInput, with the names there are, on any other."""
    if not isinstance(name, str) or name not in SPLITTERS:
        raise BadInput(f"there is no step splitter {name!r}: choose one of {', '.join(SPLITTERS)}, or list your "
                       "own in SPLITTERS of data/splitters/__init__.py")  # fmt: skip
    return SPLITTERS[name]
