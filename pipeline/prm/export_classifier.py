"""A reward model → a folder of transformers' own token classification with the same scores.

python run_stage.py -cn prm/export_classifier stage.model=experiments/quickstart/prm/model output=DIR
"""

from dataclasses import dataclass
from pathlib import Path

from espalier.data.records import BadInput, Trajectory
from espalier.data.trained_on import copy_trained_on
from espalier.pipeline.prm.step_inputs import TASK, TOKENS, WHOLE, choose_layout
from espalier.pipeline.stage import StageContext
from espalier.runtime.manifest import weight_files, write_folder


@dataclass(frozen=True)
class ExportClassifier:
    """`model`: a folder or a hub name, `revision` of the latter; `layout`: as of `prm/score_steps`; `has_two_labels`:
    wrong and right, as TRL has them, where a head says one number."""

    model: str
    revision: str = ""
    layout: str = "auto"
    has_two_labels: bool = True

    def inputs(self) -> list[str]:
        """Return the weights of a local model."""
        return weight_files(Path(self.model)) if Path(self.model).is_dir() else []

    def run(self, input_path: str, context: StageContext) -> None:
        """Write the folder, complete or not at all. Raises BadInput where there is an input, BadModel on a model that
        no linear layer reads."""
        if input_path:
            raise BadInput(f"input={input_path}: this stage reads a model: set stage.model, leave input empty")
        from espalier.models.hub_snapshot import local_model
        from espalier.models.load import load_tokenizer
        from espalier.models.published.load import row_of
        from espalier.models.published.plain_classifier import plain_classifier, write_classifier

        folder = local_model(self.model, self.revision)
        layout = choose_layout(self.layout, self.model, folder, Trajectory)
        row = None if layout in (TOKENS, TASK, WHOLE) else row_of(layout, folder)
        tokenizer = load_tokenizer(folder)
        model = plain_classifier(folder, row, tokenizer, self.has_two_labels)

        def write(partial: Path) -> None:
            write_classifier(model, tokenizer, partial)
            copy_trained_on(Path(folder), partial)

        write_folder(context.output, write)
        context.counts.update(layout=layout, labels=model.config.num_labels, parameters=model.num_parameters())
