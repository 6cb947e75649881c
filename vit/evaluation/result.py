"""The result of an evaluation, which can be saved as files."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from vit.bundle import MODEL_FILE, Bundle
from vit.evaluation.calibration import save_temperature
from vit.evaluation.images import EvaluationSet
from vit.evaluation.metrics import Scores
from vit.evaluation.schema import (
    EVALUATION_FILE,
    PREDICTIONS_FILE,
    Evaluation,
    format_predictions,
)
from vit.runtime.files import FileContent, Result, expand_home, write_json


@dataclass(frozen=True, repr=False)
class EvaluationResult(Result):
    """An `Evaluation`, and what each image contributed to it.

    Attributes:
        evaluation: The metrics and the conditions.
        scores: Contribution of each image to the metrics.
        images: The images.
        bundle: The model, with its temperature.
        is_main: True in the process that writes files.
        has_new_temperature: True if no model file has the temperature yet; `save` writes one.
    """

    evaluation: Evaluation
    scores: Scores
    images: EvaluationSet
    bundle: Bundle
    is_main: bool = True
    has_new_temperature: bool = False

    def __repr__(self) -> str:
        return f"EvaluationResult{repr(self.evaluation).removeprefix('Evaluation')}"

    def _repr_html_(self) -> str:
        """Return the metrics as a table, for a notebook."""
        return self.evaluation._repr_html_()

    def build_files(self) -> dict[str, FileContent]:
        # templates and maps, which not every evaluation needs
        from vit.evaluation.confusion import plot_confusion
        from vit.evaluation.report.report import build_report, render_markdown

        names = self.bundle.class_names
        figure = plot_confusion(self.scores, class_names=names)
        return {
            PREDICTIONS_FILE: format_predictions(
                self.scores, ids=self.images.ids, class_names=names
            ),
            "confusion.png": partial(figure.savefig, format="png", dpi=120),
            "evaluation.md": render_markdown(self),
            "report.html": build_report(self),
        }

    def save(self, directory: str | Path, *, overwrite: bool = False) -> None:
        """Write predictions.csv, confusion.png, evaluation.md, report.html, the model file if a
        temperature was fitted, and last evaluation.json.

        Args:
            directory: New or empty directory.
            overwrite: Replace an earlier result of vit in it.

        Raises:
            FileExistsError: It holds files, and `overwrite` is not set or vit did not make them.
            ValueError: It holds the evaluated model.
        """
        if not self.is_main:
            return
        output = expand_home(directory)
        if Path(self.bundle.name).resolve().is_relative_to(output.resolve()):
            raise ValueError(f"{directory} holds the evaluated model; choose another --output")
        # evaluation.json is written last: whoever finds it finds the other files, too
        super().save(directory, overwrite=overwrite)
        evaluation = self.evaluation
        if self.has_new_temperature:
            # the evaluation is of this file
            sha256 = save_temperature(self.bundle, output / MODEL_FILE)
            evaluation = evaluation.model_copy(update={"model_sha256": sha256})
        write_json(output / EVALUATION_FILE, evaluation.model_dump(mode="json"))
