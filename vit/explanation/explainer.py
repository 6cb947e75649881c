"""The loop behind `vit.explain` and `vit explain`: from images to maps, one batch after another."""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from vit.bundle import Bundle
from vit.explanation.capture.forward import open_reader
from vit.explanation.checks.sanity_checks import check_map, measure_drops
from vit.explanation.items import ImageItem
from vit.explanation.methods.maps import compute_maps
from vit.explanation.methods.registry import Method, find_methods
from vit.explanation.methods.rollout import measure_attention
from vit.explanation.records import ImageResult, MapResult
from vit.explanation.render.overlay import PatchMap, resize_picture
from vit.explanation.targets import (
    FEATURES,
    TargetLike,
    build_target,
    choose_decided,
    find_decided,
    find_output_kind,
)
from vit.prediction.decision import compute_probabilities
from vit.runtime.device import copy_to_device, copy_to_host, run_in_memory
from vit.runtime.files import clean_name
from vit.runtime.progress import show_progress

_PHOTO_SIDES = (224, 512)  # smallest and largest side of a picture in pixels
# an image that is explained: its place among all from 0, its result, and the model's input
_Decoded = tuple[int, ImageResult, UInt8[np.ndarray, "H W 3"]]


def choose_explain_batch_size(image_size: tuple[int, int], device: torch.device) -> int:
    """Choose the images at a time, by measurements on a CPU; four times as many on a GPU."""
    batch_size = 64 if max(image_size) <= 64 else 16
    return batch_size if device.type == "cpu" else 4 * batch_size


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
        bundle = self.bundle
        self._reader = open_reader(bundle)
        image_size = bundle.preprocess.image_size
        self.batch_size = self.batch_size or choose_explain_batch_size(image_size, bundle.device)
        # number of images that fit a GPU's memory together
        self.part_size = self.batch_size
        if not self._reader.has_attention:
            self.num_attended = 0
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

    def __iter__(self) -> Iterator[list[ImageResult]]:
        """Explain one batch after another, because the images' photos and attention don't fit into
        memory for many images."""
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
                        lambda first, end: self._explain_part(batch[first:end]),  # noqa: B023
                        0,
                        len(batch),
                        part_size=self.part_size,
                        device=self.bundle.device,
                    )
                    yield [image for _, image, _ in batch]
                advance(len(chosen))

    def _decode(self, item: ImageItem) -> tuple[ImageResult, UInt8[np.ndarray, "H W 3"]] | str:
        """Read an image. Return the reason if it can't be read: the others are explained."""
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

    def _explain_part(self, batch: Sequence[_Decoded]) -> None:
        """Add to each image its maps and the model's outputs."""
        bundle = self.bundle
        numbers, images, pixels = zip(*batch, strict=True)
        inputs = copy_to_device(torch.from_numpy(np.stack(pixels)), bundle.device)
        forward, targets, maps = compute_maps(
            self._reader,
            bundle.preprocess.normalize(inputs),
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
        outputs = logits.float().numpy()
        probabilities = compute_probabilities(self.bundle, outputs)
        decided = find_decided(self.bundle, outputs)
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
