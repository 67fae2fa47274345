"""Prompts as data: a template with named fields, an instruction, worked examples."""

from dataclasses import dataclass

from data.records import Problem


@dataclass(frozen=True)
class PromptTemplate:
    """`template` may name {question}, {context} and {options}; conf/prompt/*.yaml holds the published ones."""

    template: str = "{question}\n"

    def render(self, problem: Problem) -> str:
        """The text the model continues."""
        return self.template.format(question=problem.question, context=problem.context, options="")
