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
from vit.options import AuditOptions
from vit.prediction.features import compute_features
from vit.prediction.predictor import Predictor
from vit.runtime.device import choose_device
from vit.runtime.files import prepare_output, write_json, write_text


@dataclass(frozen=True, repr=False)
class AuditResult:
    """An `Audit`, the images that it is of, and the model whose features it is by."""

    audit: Audit
    images: ImageDataset
    bundle: Bundle

    def __repr__(self) -> str:
        return repr(self.audit)

    def save(self, directory: str | Path, *, overwrite: bool = False) -> None:
        """Write audit.html and audit.json.

        Args:
            directory: a new or empty directory.
            overwrite: replace an earlier audit in it.

        Raises:
            FileExistsError: it holds files, and `overwrite` is not set or they are not ours.
        """
        # before anything is written: a page that fails leaves no directory
        page = build_audit_page(self.audit, self.images, self.bundle)
        output = prepare_output(Path(directory), overwrite=overwrite)
        write_text(output / "audit.html", page)
        write_json(output / AUDIT_FILE, asdict(self.audit))


def run_audit(data: str | Path, options: AuditOptions) -> AuditResult:
    """Audit images; arguments and errors as of `vit.audit`."""
    if (options.init is None) == (options.model is None):
        raise ValueError(
            "vit audit needs features to look at images by: give --init WEIGHTS (timm:NAME, a folder"
            " of timm's or a model file) or --model RUN, and not both"
        )
    splits = open_for_model(data, root=options.root, trained_on={})
    source = splits.split("all")
    bundle = _load_backbone(options)
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
    predictor = Predictor.from_bundle(
        bundle, batch_size=options.batch_size, precision=options.precision
    )
    features = compute_features(predictor, images, cache_dir=splits.cache_dir)
    audit = audit_images(
        images,
        cast(NDArray[np.float32], features[_choose_readout(bundle)].numpy()),
        model=bundle.name,
        model_sha256=bundle.sha256,
    )
    return AuditResult(audit, images, bundle)


def _load_backbone(options: AuditOptions) -> Bundle:
    """The model whose features are taken, as one of ours where it can be."""
    source = str(options.init if options.model is None else options.model)
    path = Path(source).expanduser()
    # a folder of timm's
    if path.is_dir() and (path / "config.json").is_file():
        source = f"timm:local-dir:{path}"
    bundle = load_model(source, device=choose_device(options.device))
    if not isinstance(bundle.model, VisionTransformer):
        # timm, which takes seconds to import
        from vit.model.timm_weights import load_timm

        device = next(bundle.model.parameters()).device
        with suppress(ValueError):
            bundle = replace(bundle, model=load_timm(bundle.model).to(device).eval())
    return bundle


def _choose_readout(bundle: Bundle) -> tuple[int, str]:
    """What the head of the model reads."""
    model = bundle.model
    if isinstance(model, VisionTransformer):
        return len(model.blocks), model.global_pool
    return PRE_LOGITS
