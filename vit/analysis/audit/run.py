"""The public function `vit.audit`, and its result."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vit.analysis.audit.page import build_audit_page
from vit.analysis.audit.suspects import Audit, audit_images
from vit.bundle import ModelLike, open_model
from vit.data.cache import decode_dataset
from vit.data.dataset import ImageDataset, ImageRule
from vit.data.open import open_for_model, open_passed
from vit.data.statistics import measure_value_range
from vit.evaluation.images import check_data
from vit.prediction.batch_predictor import BatchPredictor, read_dataset
from vit.runtime.arguments import check_minimum
from vit.runtime.files import FileContent, Result, format_json
from vit.runtime.progress import show_progress


@dataclass(frozen=True)
class AuditResult(Result):
    """An `Audit`, and the images that it describes."""

    audit: Audit
    images: ImageDataset = field(repr=False)

    def build_files(self) -> dict[str, FileContent]:
        return {
            "audit.html": build_audit_page(self.audit, self.images),
            "audit.json": format_json(asdict(self.audit)),
        }


def audit(
    data: str | Path | None = None,
    *,
    dataset: Any = None,
    class_names: Sequence[str] | None = None,
    model: ModelLike | None = None,
    root: str | Path | None = None,
    group_by: str | int | None = None,
    label_by: str | None = None,
    path_column: str | None = None,
    label_column: str | None = None,
    split_column: str | None = None,
    group_column: str | None = None,
    task: str | None = None,
    batch_size: int | None = None,
    device: str = "auto",
    precision: str = "auto",
) -> AuditResult:
    """Look for likely label errors, unusual images and near-duplicates.

    Args:
        data: A data set's name, a folder with a folder for each class, a
            table or shards. All its splits are used. A column "group" of a
            table holds: no image is judged by others of its group.
        dataset: Images instead of `data`, as `vit.train` takes them.
        class_names: Class names of `dataset`. None: its own.
        model: Model whose features are used: a file, a run or timm:NAME. A
            model that was trained with these labels may have memorised the
            wrong ones; pretrained weights find more.
        root: Folder of the data set that `data` names. None: its usual place.
        group_by: See `vit.train`.
        label_by: See `vit.train`.
        path_column: See `vit.train`.
        label_column: See `vit.train`.
        split_column: See `vit.train`.
        group_column: See `vit.train`.
        task: "multilabel" for a table whose images may have several labels.
        batch_size: See `vit.evaluate`.
        device: See `vit.evaluate`.
        precision: See `vit.evaluate`.

    Returns:
        The result: `.audit` holds what was found, `.save(directory)` writes
        what `vit audit` writes.

    Raises:
        ValueError: No model, or not exactly one of `data` and `dataset`,
            is given; the data is unknown, it has fewer than two
            classes, or cleanlab isn't installed.

    Example:
        >>> result = vit.audit("photos", model="timm:vit_small_patch14_dinov2")
        >>> result.audit.label_errors[:3]
    """
    check_minimum(1, batch_size=batch_size)
    if model is None:
        raise ValueError(
            "vit audit compares images by the features of a model: add --model timm:NAME, a folder of"
            " timm, a model file or a run"
        )
    rule = ImageRule(
        label_by=label_by,
        path_column=path_column,
        label_column=label_column,
        split_column=split_column,
        group_column=group_column,
        group_by=group_by,
        task=task,
    )
    check_data(data, dataset, rule)
    if data is None and dataset is None:
        raise ValueError("which images? name them as data, or pass them as dataset=…")
    # before minutes of work
    if find_spec("cleanlab") is None:
        raise ValueError("vit audit needs cleanlab: pip install '.[audit]' in the clone of vit")
    if dataset is None:
        if class_names is not None:
            raise ValueError("class_names are for dataset=…; leave them out")
        splits = open_for_model(data, root=root, recorded={}, rule=rule)
    else:
        splits = open_passed(dataset, class_names, rule=rule, model_classes=())
    listed = splits.split("all")
    bundle = open_model(model, device=device)
    # other images than the model was trained on may have another range
    value_range = measure_value_range(listed) or bundle.preprocess.value_range
    preprocess = replace(bundle.preprocess, value_range=value_range)
    bundle = replace(bundle, preprocess=preprocess)
    images = decode_dataset(
        listed,
        preprocess,
        # the audit lists them
        max_unreadable_fraction=1,
    )
    predictor = BatchPredictor.from_bundle(bundle, batch_size=batch_size, precision=precision)
    read = partial(read_dataset, images, preprocess)
    with show_progress("features", len(images)) as advance:
        features = predictor.predict_with_features(read, count=len(images), on_progress=advance)[1]
    names = {"data": splits.title, "model": bundle.name, "model_sha256": bundle.sha256}
    with show_progress("comparing images"):
        found = audit_images(images, features, **names)
    return AuditResult(found, images)
