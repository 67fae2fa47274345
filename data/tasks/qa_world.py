"""`qa_world`: questions about made-up people whose answers are drawn from known frequencies, embedded so that nothing
is downloaded: the probability of every answer is known, so calibration can be measured without noise.

Every person belongs to a clan, and every clan has, for each of four topics, an order of six answers: the same for all
of its members. How closely members follow that order is said in the question ("a firm clan"): the answer at place k of
the order is drawn with a probability proportional to ratio^k, where the word gives the ratio, from 0.05 ("strict") to
0.95 ("wild"). The people of the splits differ, so a test question is about somebody unknown: what carries over are the
clan's order and what the word means.

**The teacher is imperfect on purpose.** It writes the summary of `num_samples` answers that agree too much, as a
language model's samples do: they are drawn from the true frequencies raised to the power `sharpening`. A policy that
imitates it names likely answers and is too sure of them.

A response has one of two `form`s (data/answers/stated_answers.py): "confidence", an answer and a percentage in lines of
their own, or "paragraph", a sentence that names alternatives with a percentage behind each.
"""

import hashlib
import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

from espalier.data.answers.grade import Gold, Grade
from espalier.data.answers.short_answers import golds, normalise
from espalier.data.answers.stated_answers import stated_forecast
from espalier.data.records import BadInput, Demonstration, Problem
from espalier.data.splitters import split_lines

CLANS = ("Roth", "Vane", "Holm", "Kerr", "Lund", "Moss")
TOPICS = {
    "food": ("rice", "corn", "fish", "eggs", "nuts", "figs"),
    "pet": ("cat", "dog", "hen", "pig", "fox", "owl"),
    "job": ("cook", "monk", "smith", "guard", "clerk", "nurse"),
    "home": ("hut", "tent", "farm", "cave", "boat", "tower"),
}
RATIOS = {"strict": 0.05, "firm": 0.2, "mild": 0.45, "loose": 0.7, "wild": 0.95}
SPLITS = ("train", "dev", "test")
FORMS = ("confidence", "paragraph")
_STARTS, _MIDDLES, _ENDS = (
    ("B", "D", "F", "G", "L", "N", "P", "T"),
    ("a", "e", "i", "o"),
    ("la", "mi", "no", "ra", "vu"),
)


def frequencies(ratio: float, number: int) -> list[float]:
    """Return `number` probabilities that fall by `ratio` from place to place."""
    weights = [ratio**place for place in range(number)]
    return [weight / sum(weights) for weight in weights]


def sharpened(probabilities: list[float], power: float) -> list[float]:
    """Return probabilities proportional to their `power`."""
    weights = [probability**power for probability in probabilities]
    return [weight / sum(weights) for weight in weights]


def split_of(person: str) -> str:
    """Return the split a person belongs to, by hash: 1 in 10 dev, 2 in 10 test."""
    bucket = hashlib.sha256(person.encode()).digest()[0] % 10
    return "dev" if bucket == 0 else "test" if bucket <= 2 else "train"


def write_response(counts: list[tuple[str, int]], number: int, form: str) -> str:
    """Return answers with their counts among `number` samples, the most frequent first, as a response of a form."""
    ordered = sorted(counts, key=lambda row: -row[1])
    shares = [f"{100 * count / number:.0f}%" for _, count in ordered]
    if form == "confidence":
        return f"Answer: {ordered[0][0]}\nConfidence: {shares[0]}"
    parts = [f"{answer} ({share})" for (answer, _), share in zip(ordered, shares, strict=True)]
    return f"It is {parts[0]}" + (", or else " + " or ".join(parts[1:]) if parts[1:] else "") + "."


@dataclass(frozen=True)
class QAWorld:
    """Args: problems a split, demonstrations of the training problems, the teacher's samples and how far they agree too
    much (1: not at all), and the form of responses."""

    num_train: int = 8000
    num_dev: int = 200
    num_test: int = 1000
    num_demonstrations: int = 16000
    num_samples: int = 10
    sharpening: float = 3.0
    form: str = "confidence"
    seed: int = 0

    name = "qa_world"

    def __post_init__(self) -> None:
        for key in ("num_train", "num_dev", "num_test", "num_demonstrations", "num_samples"):
            if getattr(self, key) < 1:
                raise BadInput(f"task.{key} must be at least 1, got {getattr(self, key)}")
        if self.sharpening <= 0:
            raise BadInput(f"task.sharpening must be above 0, got {self.sharpening}")
        if self.form not in FORMS:
            raise BadInput(f"task.form must be {' or '.join(FORMS)}, got '{self.form}'")

    def order(self, clan: str, topic: str) -> list[str]:
        """Return a clan's answers to a topic, the most frequent first."""
        answers = list(TOPICS[topic])
        random.Random(f"qa_world/{self.seed}/{clan}/{topic}").shuffle(answers)
        return answers

    def problems(self, split: str) -> list[Problem]:
        """Draw people, each with one question, from a stream seeded by the seed and the split's name.

        The gold is one drawn answer; `info["probabilities"]` has the true probability of every answer. Accuracy and
        calibration are broken down by the word (`level`) and the topic (`subject`). Raises BadInput where there is no
        such split, or not as many people.
        """
        if split not in SPLITS:
            raise BadInput(f"qa_world has no split '{split}': it has {', '.join(SPLITS)}")
        number = {"train": self.num_train, "dev": self.num_dev, "test": self.num_test}[split]
        rng = random.Random(f"qa_world/{self.seed}/{split}")
        problems: list[Problem] = []
        seen: set[tuple[str, str, str]] = set()
        draws_in_vain = 0
        while len(problems) < number:
            draws_in_vain += 1
            if draws_in_vain > 20_000:
                raise BadInput(f"qa_world: {number} {split} problems are asked, {len(problems)} people found: lower "
                               f"num_{split}")  # fmt: skip
            person = "".join(rng.choice(part) for part in (_STARTS, _MIDDLES, _ENDS, _ENDS))
            clan, topic = rng.choice(CLANS), rng.choice(list(TOPICS))
            if split_of(f"{person} {clan}") != split or (person, clan, topic) in seen:
                continue
            seen.add((person, clan, topic))
            draws_in_vain = 0
            word = list(RATIOS)[hashlib.sha256(f"{person} {clan}".encode()).digest()[1] % len(RATIOS)]
            answers = self.order(clan, topic)
            shares = frequencies(RATIOS[word], len(answers))
            info: dict[str, Any] = {
                "subject": topic,
                "level": word,
                "probabilities": dict(zip(answers, shares, strict=True)),
            }
            question = f"{person} is of the {word} clan {clan}. What {topic}?"
            gold = rng.choices(answers, shares)[0]
            problems.append(Problem(f"qa-{split}-{len(problems)}", question, gold, info))
        return problems

    def demonstrations(self, split: str) -> list[Demonstration]:
        """Return `num_demonstrations` of the imperfect teacher for "train" (problems in turn); else one a problem by a
        teacher whose samples follow the true frequencies."""
        problems = self.problems(split)
        number = self.num_demonstrations if split == "train" else len(problems)
        rng = random.Random(f"qa_world/{self.seed}/{split}/teacher")
        demonstrations = []
        for index in range(number):
            problem = problems[index % len(problems)]
            answers, shares = zip(*problem.info["probabilities"].items(), strict=True)
            believed = sharpened(list(shares), self.sharpening if split == "train" else 1.0)
            counts = Counter(rng.choices(answers, believed, k=self.num_samples))
            completion = write_response(list(counts.items()), self.num_samples, self.form)
            identity = f"{problem.id}/teacher-{index // len(problems)}"
            demonstrations.append(Demonstration(identity, self.prompt(problem), completion))
        return demonstrations

    def prompt(self, problem: Problem) -> str:
        """Return the question and a newline."""
        return problem.question + "\n"

    def split_steps(self, response: str) -> list[str]:
        """Return one step a line."""
        return split_lines(response)

    def response_with(self, answer: str) -> str:
        """Return a response that gives an answer."""
        return f"Answer: {answer}\nConfidence: 60%\n"

    def grade(self, gold: Gold, response: str, num_options: int = 0) -> Grade:
        """By the answer that is stated with the highest probability, the first of equals."""
        answer, confidence = stated_forecast(response, gold).most_confident
        if answer is None:
            return Grade(None, False, "no answer with a probability can be read")
        is_right = normalise(answer) in {normalise(one) for one in golds(gold)}
        return Grade(answer, is_right, f"stated with {confidence:g}")
