"""Images and a model to an audit, its file and its page."""

from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

from vit.analysis.audit.page import build_audit_page
from vit.analysis.audit.suspects import AUDIT_FILE, Audit, audit_images
from vit.bundle import Bundle, load_model
from vit.data.cache import decode_dataset
from vit.data.dataset import ImageDataset
from vit.data.open import open_for_model
from vit.model.block_features import PRE_LOGITS
from vit.model.vision_transformer import VisionTransformer
from vit.prediction.features import compute_features
from vit.prediction.predictor import Predictor
from vit.runtime.arguments import check_arguments
from vit.runtime.device import choose_device
from vit.runtime.files import FileContent, Result, format_json


@dataclass(frozen=True, repr=False)
class AuditResult(Result):
    """An `Audit`, the images that it describes, and the model whose features it used."""

    audit: Audit
    images: ImageDataset
    bundle: Bundle

    def __repr__(self) -> str:
        return repr(self.audit)

    def build_files(self) -> dict[str, FileContent]:
        return {
            "audit.html": build_audit_page(self.audit, self.images, self.bundle),
            AUDIT_FILE: format_json(asdict(self.audit)),
        }


@check_arguments(batch_size=(1, None))
def audit(
    data: str | Path,
    *,
    init: str | Path | None = None,
    model: str | Path | None = None,
    root: str | Path | None = None,
    batch_size: int | None = None,
    device: str = "auto",
    precision: str = "auto",
) -> AuditResult:
    """Look for problems in labelled images: likely label errors,
    near-duplicates, odd images, and classes that can't be told apart.

    Args:
        data: A data set's name, a folder with a folder for each class, a
            table or shards. All its splits are used.
        init: Pretrained weights whose features are used: timm:NAME, a folder
            of timm, or a model file.
        model: A run, instead of `init`. Its features are used. It was trained
            with these labels and may have memorised the wrong ones, so that
            `init` finds more.
        root: Folder of the data set that `data` names. None: its usual place.
        batch_size: See `vit.evaluate`.
        device: See `vit.evaluate`.
        precision: See `vit.evaluate`.

    Returns:
        The result: `.audit` holds what was found, `.save(directory)` writes
        what `vit audit` writes.

    Raises:
        ValueError: Not exactly one of `init` and `model` is given, the data
            is unknown, or it has fewer than two classes.

    Example:
        >>> result = vit.audit("photos", init="timm:vit_small_patch14_dinov2")
        >>> result.audit.label_errors[:3]
    """
    if (init is None) == (model is None):
        raise ValueError(
            "vit audit compares images by features: add --init WEIGHTS (timm:NAME, a folder of timm"
            " or a model file) or --model RUN, and not both"
        )
    splits = open_for_model(data, root=root, trained_on={})
    source = splits.split("all")
    bundle = _load_backbone(str(init or model), device)
    preprocess = bundle.preprocess
    # hashes come with the pixels, and what can't be read is left out
    images = decode_dataset(
        source,
        size=preprocess.resize_size,
        interpolation=preprocess.interpolation,
        cache_dir=splits.cache_dir,
        # an audit is there to name them
        max_unreadable_fraction=1,
    )
    predictor = Predictor.from_bundle(bundle, batch_size=batch_size, precision=precision)
    features = compute_features(predictor, images, cache_dir=splits.cache_dir)
    found = audit_images(
        images,
        cast(NDArray[np.float32], features[_choose_readout(bundle)].numpy()),
        model=bundle.name,
        model_sha256=bundle.sha256,
    )
    return AuditResult(found, images, bundle)


def _load_backbone(source: str, device: str) -> Bundle:
    """Return the model whose features are used, as one of this project where that is possible."""
    path = Path(source).expanduser()
    # a folder of timm
    if path.is_dir() and (path / "config.json").is_file():
        source = f"timm:local-dir:{path}"
    bundle = load_model(source, device=choose_device(device))
    if not isinstance(bundle.model, VisionTransformer):
        # timm, which takes seconds to import
        from vit.model.timm_weights import load_timm

        with suppress(ValueError):
            model = load_timm(bundle.model).to(bundle.device).eval()
            bundle = replace(bundle, model=model)
    return bundle


def _choose_readout(bundle: Bundle) -> tuple[int, str]:
    """What the head of the model reads."""
    model = bundle.model
    if isinstance(model, VisionTransformer):
        return len(model.blocks), model.global_pool
    return PRE_LOGITS
