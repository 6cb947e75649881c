"""A teacher: pretrained weights from which a smaller model learns besides the labels.

The teacher's answer to an image is the logits of a linear probe on its features. Training images
are answered by probes that have not seen the image or its group, because a probe is overconfident
on images that it was fitted on. The student learns the softened predictions (Hinton, Vinyals & Dean
2015, "Distilling the knowledge in a neural network").
"""

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]
from torch import Tensor

from vit.config import Config
from vit.data.preprocess import Preprocess
from vit.model.find_file import find_initial_weights
from vit.model.model_file import hash_weights
from vit.prediction.features import Features, compute_features, find_features_path
from vit.prediction.probabilities import Float32s, Ints
from vit.runtime.files import open_cached, read_arrays, write_arrays
from vit.runtime.processes import current_process
from vit.training.data import TrainingData
from vit.training.folds import assign_folds
from vit.training.linear_probe import ABSENT_BIAS, Balance, as_array, fit_path, fit_probe
from vit.training.validation import build_predictor

# Raise it when the answers in the cache change.
_FORMAT = 1


@dataclass(frozen=True)
class Teacher:
    """The answers of a teacher to the training images.

    Attributes:
        logits: [n, C], float32.
        weights_hash: SHA-256 of its weights.
        name: Name or path of its weights.
        top1: Accuracy of the answers, 0 to 1.
        seconds: Seconds that they took.
    """

    logits: Float[Tensor, "n C"]
    weights_hash: str
    name: str
    top1: float
    seconds: float

    def describe(self) -> str:
        """Return the teacher and its accuracy in a phrase, for the user."""
        return (
            f"{self.name}: a linear probe on its features is right on {100 * self.top1:.1f} % of the"
            f" training images in cross-validation ({self.seconds:.0f} s)"
        )

    def build_targets(self, labels: Ints) -> Float[Tensor, "n 2C"]:
        """Return the targets of a training step: the class probabilities of the labels, then the
        logits."""
        classes = torch.eye(self.logits.shape[1])[torch.from_numpy(labels)]
        return torch.cat([classes, self.logits], dim=1)


def ask_teacher(config: Config, data: TrainingData, *, device: torch.device) -> Teacher:
    """Compute the answers of the teacher of a run, or read them from the cache.

    Args:
        config: Configuration of the run, with `train.teacher`.
        data: Images of the run.
        device: Device on which the teacher runs.

    Raises:
        FileNotFoundError: There are no such weights.
        ValueError, OSError: The weights or an image can't be read.
    """
    # timm takes seconds to import
    from vit.model.timm_weights import load_pretrained

    assert config.train.teacher is not None
    started_at = time.perf_counter()
    labels = data.train.labels
    num_classes = len(data.train.class_names)
    try:
        source = find_initial_weights(config.train.teacher)
    except (FileNotFoundError, ValueError) as error:
        raise type(error)(str(error).replace("--init", "train.teacher")) from None
    # the teacher's own crop and size
    model, values = load_pretrained(source, num_classes=num_classes)
    preprocess = data.preprocess
    if values is not None:
        preprocess = Preprocess.from_dict(values)
    preprocess = replace(
        preprocess, image_size=model.patch_embed.img_size, value_range=data.preprocess.value_range
    )
    predictor = build_predictor(
        replace(data, preprocess=preprocess), model.to(device), device=device
    )

    # read at full size, not at the student's
    images = replace(data.train, pixels=None)
    place = find_features_path(predictor, images, cache_dir=data.splits.cache_dir)
    conditions = [_FORMAT, place.name, labels.tolist(), images.groups, data.probe_balance]
    key = hashlib.sha256(json.dumps(conditions).encode()).hexdigest()[:16]
    path = place.with_name(f"{images.name}-{images.split}-teacher-{key}.npz")
    process = current_process()
    logits = open_cached(path, lambda: read_arrays(path)["logits"])
    # either all processes compute them or none
    if process.any_rank(logits is None):
        features = compute_features(predictor, images, cache_dir=data.splits.cache_dir)
        if process.is_main:
            logits = compute_answers(
                features,
                labels,
                num_classes=num_classes,
                balanced=data.probe_balance,
                groups=images.groups,
            )
            write_arrays(path, {"logits": logits})
    # Other processes take the main process's, because their libraries may round differently.
    logits = process.broadcast(logits)
    assert logits is not None
    return Teacher(
        torch.from_numpy(logits),
        weights_hash=hash_weights(model.state_dict()),
        name=config.train.teacher,
        top1=float((logits.argmax(axis=1) == labels).mean()),
        seconds=time.perf_counter() - started_at,
    )


def compute_answers(
    features: Features,
    labels: Ints,
    *,
    num_classes: int,
    balanced: Balance,
    groups: Sequence[str] | None,
) -> Float32s:
    """Compute a teacher's answers from its features.

    Args:
        features: Features of the training images, at each readout.
        labels: [n].
        num_classes: Number of classes C.
        balanced, groups: See `fit_probe`.

    Returns:
        Logits [n, C], by probes that were fitted without the image. An image that is never left out
        gets its label, for certain.
    """
    folds = assign_folds(labels, groups)
    probe = fit_probe(
        features, labels, num_classes=num_classes, balanced=balanced, folds=folds, groups=groups
    )
    values = as_array(features, probe.readout)
    logits = -ABSENT_BIAS * np.eye(num_classes)[labels]
    # several threads would wait for one another
    with threadpool_limits(1):
        for fold in range(folds.max() + 1):
            is_out = folds == fold
            ((weight, bias, classes),) = fit_path(
                values[~is_out], labels[~is_out], [probe.strength], balanced=balanced
            )
            # a class without images has the bias of `fit_probe`
            logits[is_out] = bias.min() + ABSENT_BIAS
            logits[np.ix_(is_out, classes)] = values[is_out] @ weight.T + bias
    return logits.astype(np.float32)
