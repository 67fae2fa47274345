"""A language model that continues short texts through engines of its own or on a server that runs, where
`models.text_writer` does it in the learner's process."""

from collections.abc import Sequence
from typing import ClassVar

from espalier.data.asked_texts import AskedText, Asks
from espalier.data.process_data.published import content_key
from espalier.data.prompts import encode_text
from espalier.data.records import BadInput
from espalier.models.load import check_model_folder, load_tokenizer


class AskedWriter:
    """Args: the model's folder `path`, with its own tokenizer, and who is asked (`asking`), opened by the first call.
    Raises BadInput where more than one text is to be written for each."""

    reads_texts: ClassVar[bool] = True
    has_engines: ClassVar[bool] = True

    def __init__(self, path: str, asking: Asks):
        check_model_folder(path)
        self.path, self.asking = path, asking
        self.tokenizer = load_tokenizer(path)
        if asking.num_texts != 1:
            raise BadInput(f"reward.forecasts.extractor.asking.params.n={asking.num_texts}: one list of answers is "
                           "read for each response: leave it 1")  # fmt: skip

    def __call__(self, prompts: Sequence[str]) -> list[str | None]:
        """Return continuations without their end token, in order; None where one did not end by itself. Raises BadInput
        on a prompt that is refused, and what is asked raises."""
        rows = [encode_text(self.tokenizer, prompt, self.path) for prompt in prompts]
        if not rows:
            return []
        probe = prompts[0]
        self.asking.open(self.path, probe, self.tokenizer(probe, add_special_tokens=False)["input_ids"])
        self._check_window(max(map(len, rows)))
        # a response that stands there twice is asked about twice, and by another name
        names = [f"{place}/{content_key(row)}" for place, row in enumerate(rows)]
        asked = [AskedText(name, prompt, row) for name, prompt, row in zip(names, prompts, rows, strict=True)]
        found: list[str | None] = []
        for written, row in zip(self.asking.texts(asked), rows, strict=True):
            if written is None:
                raise BadInput(f"{self.path}: a prompt of {len(row)} tokens is refused where it is asked: the line "
                               "above says why")  # fmt: skip
            (text,) = written
            found.append(text.text if text.is_whole else None)
        return found

    def _check_window(self, longest: int) -> None:
        """Raise BadInput where an engine would cut what is written short: a list without an end offers nothing."""
        most = self.asking.most_asked
        if most is not None and longest > most:
            raise BadInput(f"{self.path}: a prompt of {longest} tokens is longer than the {most} its window leaves "
                           "beside asking.params.max_tokens: raise the extractor's asking.client.max_model_len, or "
                           "shorten responses")  # fmt: skip

    def close(self) -> None:
        """End the engines."""
        self.asking.close()
