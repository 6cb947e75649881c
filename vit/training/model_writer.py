"""The model file of a run, written whenever its model is the best so far."""

from functools import partial
from pathlib import Path

from torch import nn

from vit.bundle import MULTILABEL, Bundle
from vit.config import values_to_save
from vit.data.groups import MAX_COMPARED
from vit.model.find_file import MODEL_FILE
from vit.model.model_file import write_model_file
from vit.runtime.processes import current_process
from vit.training.background_writer import BackgroundWriter
from vit.training.data import TrainingData


def write_bundle(
    model: nn.Module,
    step: int,
    *,
    directory: Path,
    data: TrainingData,
    run_id: str,
    writer: BackgroundWriter,
) -> None:
    """Write a model, the best so far, of this step, into the directory of its run: a file that
    needs nothing else. Only the main process writes."""
    if not current_process().is_main:
        return
    # On a CPU the model's own tensors would be changed by the next step.
    weights = {name: value.to("cpu", copy=True) for name, value in model.state_dict().items()}
    config = values_to_save(data.config)
    # The values themselves: the files that they are from may change.
    config["data"]["class_names"] = dict(data.splits.renamed_classes) or None
    config["data"]["corrections"] = dict(data.splits.corrections) or None
    train = data.train
    datasets = [train, *filter(None, [data.validation])]
    facts = {
        "name": train.name,
        "fingerprint": train.fingerprint,
        "splits": {
            dataset.split: {"num_images": len(dataset), "fingerprint": dataset.fingerprint}
            for dataset in datasets
        },
        # so that no later command draws a split again
        "held_out": data.splits.list_held_out(),
        "num_trained_on": len(data.splits.split("train")),
    }
    if train.is_multilabel:
        facts["task"] = MULTILABEL
    hashes = train.hashes
    # frames of many images would take much of the file
    if hashes is not None and len(train) > MAX_COMPARED:
        hashes = hashes[:2]
    bundle = Bundle(
        model=model,
        preprocess=data.preprocess,
        class_names=train.class_names,
        name="",
        sha256="",
        config=config,
        data=facts,
        metadata={"run_id": run_id, "step": step},
        training_hashes=hashes,
    )
    content = bundle.to_file(weights)
    writer.submit(partial(write_model_file, directory / MODEL_FILE, content))
