"""The model file of a run, written whenever its model is the best so far."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from torch import nn

from vit.bundle import MODEL_FILE, MULTILABEL, Bundle
from vit.config import Config, values_to_save
from vit.data.splits import write_splits
from vit.model.model_file import ModelFile, read_model_file, write_model_file
from vit.runtime.background_writer import BackgroundWriter
from vit.runtime.processes import Process
from vit.training.data import TrainingData


def read_run_model(directory: Path, *, run_id: str, step: int | None = None) -> ModelFile | None:
    """Read the model file that a run has left in its directory. None if it is missing, damaged or,
    with `step`, of another step.

    Raises:
        ValueError: It is of another run.
        PermissionError: It may not be read, so that its run is unknown.
    """
    path = directory / MODEL_FILE
    try:
        content = read_model_file(path)
    except PermissionError:
        raise
    except (OSError, ValueError):
        return None
    owner = content.metadata.get("run_id")
    if owner != run_id:
        whose = "not of a run" if owner is None else f"of run {owner}"
        raise ValueError(
            f"{path} is {whose}, this is run {run_id}; move it away, or choose another --output"
        )
    if step is not None and content.metadata.get("step") != step:
        return None
    return content


@dataclass(frozen=True, eq=False)
class BundleWriter:
    """Writes a bundle: a file that needs nothing else.

    Args:
        directory: Directory of the run.
        config: Configuration of the run, with the pipeline that was chosen.
        data: Images that the model is trained on.
        process: This process; the main process writes.
        run_id: Id of the run.
        writer: Writer of the run's files.
    """

    directory: Path
    config: Config
    data: TrainingData
    process: Process
    run_id: str
    writer: BackgroundWriter

    def write(self, model: nn.Module, *, step: int) -> None:
        """Write the model. All processes call it, with the best model so far, of this step."""
        state = model.state_dict()
        if not self.process.is_main:
            return
        # On a CPU the model's own tensors would be changed by the next step.
        weights = {name: tensor.detach().to("cpu", copy=True) for name, tensor in state.items()}
        data = self.data
        config = values_to_save(self.config)
        # The values themselves: the files that they are from may change.
        config["data"]["class_names"] = dict(data.splits.images.renamed_classes) or None
        config["data"]["corrections"] = dict(data.splits.corrections) or None
        task = {"task": MULTILABEL} if data.train.is_multilabel else {}
        datasets = {"train": data.train}
        if data.validation is not None:
            datasets["validation"] = data.validation
        # so that no later command draws a split again
        held_out = data.splits.list_held_out()
        table = self.directory / "splits.csv"
        if held_out and not table.exists():
            write_splits(table, held_out)
        hashes = None
        if data.train.hashes is not None:
            # safetensors takes contiguous arrays only
            exact, perceptual = np.ascontiguousarray(data.train.hashes)
            hashes = (exact, perceptual)
        bundle = Bundle(
            model=model,
            preprocess=data.preprocess,
            class_names=data.train.class_names,
            name="",
            sha256="",
            config=config,
            data={
                "name": data.train.name,
                "fingerprint": data.train.fingerprint,
                "splits": {
                    split: {"num_images": len(dataset), "fingerprint": dataset.fingerprint}
                    for split, dataset in datasets.items()
                },
                "unreadable": sum(len(dataset.unreadable) for dataset in datasets.values()),
                "notes": list(data.train.notes),
                "held_out": held_out,
                "num_trained_on": len(data.splits.split("train")),
                **task,
            },
            metadata={"run_id": self.run_id, "step": step},
            training_hashes=hashes,
        )
        content = bundle.to_file(weights)
        self.writer.submit(partial(write_model_file, self.directory / MODEL_FILE, content))

    def has_written(self, step: int) -> bool:
        """Return whether the model file is there, intact and of this step. Raises ValueError for a
        file of another run."""
        return read_run_model(self.directory, run_id=self.run_id, step=step) is not None
