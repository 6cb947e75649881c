"""The public function `vit.explain`: from images to maps, one batch after another."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from vit.bundle import Bundle, Models, keeps_mode, open_model
from vit.data.images import ImageInputs
from vit.data.preprocess import Preprocess
from vit.explanation.capture.forward import draw_image, open_reader
from vit.explanation.checks.sanity_checks import check_map, measure_drops
from vit.explanation.gallery.gallery import MAX_IMAGES, describe_card
from vit.explanation.items import ImageItem, find_items
from vit.explanation.methods.maps import choose_explain_batch_size, compute_maps
from vit.explanation.methods.registry import Method, find_methods, list_methods
from vit.explanation.methods.rollout import measure_attention
from vit.explanation.records import MAX_SHEET_IMAGES, Explanations, ImageResult, MapResult
from vit.explanation.render.overlay import PatchMap, resize_picture
from vit.explanation.targets import (
    FEATURES,
    TargetLike,
    build_target,
    choose_decided,
    describe_target,
    find_decided,
    find_output_kind,
)
from vit.explanation.writer import FORMATS, write_pictures, write_results
from vit.prediction.decision import compute_probabilities
from vit.runtime.arguments import as_tuple, check_choice, check_minimum
from vit.runtime.device import copy_to_device, copy_to_host, run_in_memory
from vit.runtime.files import check_output, clean_name, expand_home, open_output
from vit.runtime.progress import show_progress

# images whose maps are tested by default; a test takes five times as long as the maps of a ViT-S/16
_NUM_TESTED = 16
_PHOTO_SIDES = (224, 512)  # smallest and largest side of a picture in pixels
# an image that is explained: its number from 0, its result, and the model's input
_Decoded = tuple[int, ImageResult, UInt8[np.ndarray, "H W 3"]]


@keeps_mode
@torch.inference_mode(False)  # a model that is loaded in it can't be differentiated
def explain(
    model: Models,
    images: ImageInputs | None = None,
    *,
    methods: str | Sequence[str] = "auto",
    target: TargetLike = "auto",
    map_options: Mapping[str, object] | None = None,
    checks: bool | None = None,
    num_images: int | None = None,
    batch_size: int | None = None,
    device: str = "auto",
    class_names: Sequence[str] | None = None,
    preprocess: Preprocess | None = None,
    output: str | Path | None = None,
    formats: str | Sequence[str] = ("png", "npz"),
    overwrite: bool = False,
) -> Explanations:
    """Compute attention maps: which parts of an image explain the prediction.

    Args:
        model: See `vit.evaluate`.
        images: Paths, folders, PIL images, uint8 arrays [H, W, 3], or one of
            them. None: `num_images` images of the model's test split.
        methods: Names of methods. "auto" is libra-removal and rollout; for a
            model without attention (ResNet, ConvNeXt, Swin), grad-cam. For
            thousands of images, rollout alone takes a quarter of the time.
        target: Class to explain: a name, an index, or "auto" (the predicted
            one, every predicted label, or a model's only output). "A - B" is
            the difference of two classes' logits. A function from outputs
            [B, C] to numbers [B] is explained itself, such as
            `lambda logits: logits[:, 3]`. A list or a tensor has a class for
            each image.
        map_options: Options of the methods, such as {"head_fusion": "max"}.
            None: their defaults.
        checks: Test every map: are its patches important for the prediction?
            None: the maps of the first 16 images.
        num_images: Images of the model's test split. None: 16.
        batch_size: Images at a time. None: 64 for images of up to 64 pixels a
            side, otherwise 16.
        device: See `vit.evaluate`.
        class_names: Name of each class, for a module. None: the model's own.
        preprocess: Preprocessing of images, for a module. None: the model's
            own, else ImageNet's.
        output: Directory for the results. None: nothing is written.
        formats: Files in `output`: "png", "svg" and "pdf" (figures for papers),
            "npz", "html".
        overwrite: Replace an earlier result.

    Returns:
        The result: `.maps[method]` is a tensor [images, rows, columns] on the
        patch grid, or [images, labels, rows, columns] for several labels;
        `.checks[method]` has the patch-removal test of each map, and
        `.draw_sheet()` draws the first images with their maps.

    Raises:
        ValueError: A method, option, format or class is unknown, or no image
            can be read.
        FileExistsError: `output` contains files, and `overwrite` isn't set.

    Example:
        >>> result = vit.explain("runs/digits", "photo.png", methods="gae")
        >>> result.maps["gae"].shape  # [1, rows, columns]
    """
    check_minimum(1, num_images=num_images, batch_size=batch_size)
    bundle = open_model(model, device=device, class_names=class_names, preprocess=preprocess)
    items = find_items(bundle, images, num_images)
    kinds = as_tuple(formats)
    # everything that can be wrong with the options is checked before an earlier result is replaced
    explainer = Explainer(
        bundle,
        items,
        as_tuple(methods),
        target=target,
        map_options=map_options,
        num_tested={None: _NUM_TESTED, True: len(items), False: 0}[checks],
        num_attended=MAX_IMAGES * (output is not None and "html" in kinds),
        batch_size=batch_size or 0,
    )
    folder = None if output is None else expand_home(output)
    if folder is not None:
        for name in kinds:
            check_choice(name, FORMATS, name="--format")
        check_output(folder, overwrite=overwrite, sources=(bundle.name,))
    found = Explanations(bundle, explainer.methods, images=[], unreadable=explainer.unreadable)
    cards: list[dict[str, Any]] = []  # images of the gallery
    for batch in explainer:
        if folder is not None:
            if not found.images:
                # not earlier, so that a command that can read no image leaves nothing
                open_output(folder, overwrite=overwrite)
            write_pictures(folder, batch, kinds)
            if "html" in kinds:
                cards += map(describe_card, batch[: MAX_IMAGES - len(cards)])
        for image in batch:
            # pictures of all images may not fit into memory
            image.attention = None
            if len(found.images) >= MAX_SHEET_IMAGES:
                image.photo = None
            found.images.append(image)
    problem = "there are no images to explain"
    if found.unreadable:
        count, (_, reason) = len(found.unreadable), found.unreadable[0]
        problem = f"{count} images can't be read; the first: {reason}"
    if not found.images:
        raise ValueError(problem)
    if folder is not None:
        parameters = {
            "methods": list(explainer.methods),
            "map_options": dict(map_options or {}),
            "checks": explainer.num_tested,
            "batch_size": explainer.batch_size,
            "target": describe_target(target),
        }
        write_results(folder, found, kinds, parameters=parameters, cards=cards)
    elif found.unreadable:
        warnings.warn(problem, stacklevel=2)
    return found


@dataclass
class Explainer:
    """Explain images with one model, see `vit.explain`.

    The maps of the first `num_tested` images are tested, and the first `num_attended` get what
    their heads and patches attend to. `unreadable` has the path and the reason for each image that
    could not be read.
    """

    bundle: Bundle
    items: Sequence[ImageItem]
    methods: Sequence[str]
    target: TargetLike = "auto"
    map_options: Mapping[str, object] | None = None
    num_tested: int = 0
    num_attended: int = 0
    batch_size: int = 0
    unreadable: list[tuple[str, str]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        bundle, size = self.bundle, self.bundle.preprocess.image_size
        self._reader = open_reader(bundle)
        self.batch_size = self.batch_size or choose_explain_batch_size(size, bundle.device)
        # number of images that fit a GPU's memory together
        self.part_size = self.batch_size
        if not self._reader.has_attention:
            self.num_attended = 0
        if self.methods == ("auto",):
            self.methods = self._choose_methods()
        self._methods = find_methods(self.methods, self._reader, options=self.map_options or ())
        has_classes = any(method.class_specific for method in self._methods)
        is_auto = isinstance(self.target, str) and self.target == "auto"
        if not is_auto and not has_classes:
            raise ValueError(
                f"{' and '.join(self.methods)}: the same map for every class, so --class "
                f"{self.target} changes nothing; leave it out, or take libra-removal"
            )
        names = bundle.class_names
        self._kind = find_output_kind(bundle.model, names, is_multilabel=bundle.is_multilabel)
        if self._kind == "features" and not has_classes:
            self._target = FEATURES
            self.num_tested = 0  # removed patches have no effect on a class
        else:
            count = len(self.items)
            self._target = build_target(self.target, names, self._kind, num_images=count)
        # the most probable class otherwise, without a copy to the host
        if is_auto and (self._kind == "labels" or bundle.operating_point):
            self._target = replace(self._target, predict=partial(choose_decided, bundle))
        # files of several classes of one image need the class in their names
        self._names_classes = not is_auto or self._kind == "labels"

    def _choose_methods(self) -> Sequence[str]:
        """Choose the methods for "auto"."""
        reader, bundle = self._reader, self.bundle
        if not reader.has_attention:
            return list_methods(reader.source)
        # a model without a classifier has no evidence for a class
        if bundle.class_names:
            # a pooling may have no gates; it is tried on noise, because all tokens of an even image
            # may count alike
            with suppress(ValueError):
                compute_maps(reader, draw_image(bundle), methods=["removal-gradient"])
                return ("libra-removal", "rollout")
        return ("rollout",)

    def __iter__(self) -> Iterator[list[ImageResult]]:
        """Explain one batch after another: photos and attention of many images are too large."""
        with ThreadPoolExecutor() as pool, show_progress("explaining", len(self.items)) as advance:
            for start in range(0, len(self.items), self.batch_size):
                chosen = self.items[start : start + self.batch_size]
                batch: list[_Decoded] = []
                for number, decoded in enumerate(pool.map(self._decode, chosen), start):
                    if isinstance(decoded, str):
                        self.unreadable.append((self.items[number].path, decoded))
                    else:
                        batch.append((number, *decoded))
                if batch:
                    self.part_size = run_in_memory(
                        partial(self._explain_part, batch),
                        0,
                        len(batch),
                        part_size=self.part_size,
                        device=self.bundle.device,
                    )
                    yield [image for _, image, _ in batch]
                advance(len(chosen))

    def _decode(self, item: ImageItem) -> tuple[ImageResult, UInt8[np.ndarray, "H W 3"]] | str:
        """Read an image, or return the reason why it can't be read."""
        preprocess = self.bundle.preprocess
        try:
            photo = preprocess.to_rgb(item.read())
            pixels = preprocess.to_uint8(photo)
        except (ValueError, OSError) as error:
            return " ".join(str(error).split())
        # boxes are in pixels of the original; many originals would not fit into memory
        geometry = preprocess.geometry(photo.size)
        shown = resize_picture(photo, min_side=_PHOTO_SIDES[0], max_side=_PHOTO_SIDES[1])
        return ImageResult(item.path, item.name, geometry, shown), pixels

    def _explain_part(self, batch: Sequence[_Decoded], start: int, stop: int) -> None:
        """Add to some images their maps and the model's outputs."""
        numbers, images, pixels = zip(*batch[start:stop], strict=True)
        inputs = copy_to_device(torch.from_numpy(np.stack(pixels)), self.bundle.device)
        forward, targets, maps = compute_maps(
            self._reader,
            self.bundle.preprocess.normalize(inputs),
            methods=self.methods,
            target=self._target.select(numbers),
            options=self.map_options,
        )
        num_tested = sum(number < self.num_tested for number in numbers)
        drops = measure_drops(forward, targets[:num_tested]) if num_tested else None
        num_attended = sum(number < self.num_attended for number in numbers)
        attention = [measure_attention(forward, row) for row in range(num_attended)]
        logits = forward.logits.detach()
        scores = self._target.score(logits, targets[:, 0])
        # the only copy from the device, and the only time that the host waits for it
        logits, scores, targets, maps, drops, attention = copy_to_host(
            (logits, scores, targets, maps, drops, attention)
        )
        for image, parts in zip(images, attention, strict=False):
            image.attention = {name: part.numpy() for name, part in parts.items()}
        self._add_predictions(images, logits, targets[:, 0], scores)
        for row, image in enumerate(images):
            # labels that fill a row are repeated
            explained = tuple(dict.fromkeys(targets[row].tolist()))
            for method, values in zip(self._methods, maps, strict=True):
                columns = zip(explained, values[row].numpy(), strict=False)
                for column, (index, patches) in enumerate(columns):
                    found = self._add_map(image, method, index, patches)
                    if drops is not None and row < num_tested:
                        evidence = drops[row, column if method.class_specific else -1]
                        found.sanity_check = check_map(patches, evidence)

    def _add_predictions(
        self, images: Sequence[ImageResult], logits: Tensor, targets: Tensor, scores: Tensor
    ) -> None:
        """Add what the model predicts; without classes, the target and its value."""
        is_finite = logits.isfinite().all(dim=1).tolist()
        if not all(is_finite):
            name = images[is_finite.index(False)].name
            raise ValueError(f"{self.bundle.name} gives NaN or infinite logits for {name}")
        if self._kind not in ("classes", "labels"):
            assert self._target.name is not None
            for image, index, score in zip(images, targets.tolist(), scores.tolist(), strict=True):
                name = self._target.name(index)
                if self._target is not FEATURES:
                    name += f" = {score:.4g}"
                image.prediction = image.describe_class(None, name)
            return
        probabilities = compute_probabilities(self.bundle, logits.float().numpy())
        decided = find_decided(self.bundle, probabilities)
        for image, row, present in zip(images, probabilities, decided, strict=True):
            image.probabilities = row.astype(np.float32)
            described = [
                image.describe_class(index, self.bundle.class_names[index])
                for index in present or [int(row.argmax())]
            ]
            image.prediction = described[0]
            if self._kind == "labels":
                image.prediction = described[0] | {"labels": described[: len(present)]}

    def _add_map(
        self, image: ImageResult, method: Method, index: int, values: PatchMap
    ) -> MapResult:
        """Add, and return, the map of an image for one class or target."""
        noun = "label" if self._kind == "labels" else "class"
        key, caption = f"{image.name}.{method.name}", f"{method.name} (the same for every {noun})"
        target = None
        if method.class_specific:
            if self._target.name is None:
                target = image.describe_class(index, self.bundle.class_names[index])
                caption, against = f"evidence for {target['name']}", "against it"
            else:
                # a number that is not about a class has no evidence, only patches that change it
                target = image.describe_class(None, self._target.name(index))
                caption, against = f"patches that raise {target['name']}", "lower it"
            if method.signed:
                caption += f" (red) and {against} (blue)"
            if self._names_classes:
                key += f".{clean_name(target['name'])}"
        # a file name has no place for all characters
        if key.casefold() in {other.key.casefold() for other in image.maps}:
            key += f"-{index}"
        image.maps.append(MapResult(method, key, values, caption, target))
        return image.maps[-1]
