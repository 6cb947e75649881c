"""The loop behind `vit.explain` and `vit explain`: from images to maps, one batch after another."""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from vit.bundle import Bundle
from vit.data.images import DeepImage
from vit.explanation.capture.forward import open_reader
from vit.explanation.checks.sanity_checks import check_maps, describe_check
from vit.explanation.items import ImageItem
from vit.explanation.methods.maps import compute_maps
from vit.explanation.methods.registry import Method, find_methods
from vit.explanation.methods.rollout import measure_attention
from vit.explanation.records import ImageResult, MapResult
from vit.explanation.render.overlay import PatchMap, fit_photo, is_flat
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


def choose_explain_batch_size(image_size: tuple[int, int], device: torch.device) -> int:
    """Choose the images at a time: 64 small or 16 large ones on a CPU, four times as many on a GPU.

    Small images need larger batches to keep two cores busy: with 65 tokens, 64 images at a time are
    1.1 (float32) to 1.4 times (bfloat16) as fast as 16 (2-core Zen 5).
    """
    batch_size = 64 if max(image_size) <= 64 else 16
    return batch_size if device.type == "cpu" else 4 * batch_size


class _Decoded(NamedTuple):
    """An image that is explained next: its place among the images that were asked for, from 0, its
    result, and the model's input."""

    number: int
    result: ImageResult
    pixels: UInt8[np.ndarray, "H W 3"]


class Explainer:
    """Explain images with one model.

    Args:
        bundle: The model, with its class names and preprocessing.
        methods: Names of registered methods.
        target: See `vit.explain`.
        map_options: See `vit.explain`.
        num_images: Number of images, which need a class each if `target` is a list.
        num_tested: Number of images, from the first on, whose maps are tested. None: all.
        num_attended: Number of images, from the first on, that get what their heads and patches
            attend to.
        batch_size: See `vit.explain`.

    Attributes:
        parameters: Everything that the maps depend on but the target, for the manifest.
        unreadable: Path and reason for each image that could not be read.

    Raises:
        ValueError: A method is unknown; the model lacks a class, layer or option; or a method needs
            attention and the model's can't be read.
    """

    # a copy of a model that is made in inference mode can't be differentiated
    @torch.inference_mode(False)
    def __init__(
        self,
        bundle: Bundle,
        methods: Sequence[str],
        *,
        target: TargetLike = "auto",
        map_options: Mapping[str, object] | None = None,
        num_images: int | None = None,
        num_tested: int | None = 0,
        num_attended: int = 0,
        batch_size: int | None = None,
    ) -> None:
        self._bundle = bundle
        self._reader = open_reader(bundle)
        self._methods = tuple(methods)
        self._options = dict(map_options or {})
        chosen = find_methods(methods, self._reader, options=self._options)
        self.unreadable: list[tuple[str, str]] = []
        self._num_tested = num_tested
        self._num_attended = num_attended
        self._batch_size = batch_size or choose_explain_batch_size(
            bundle.preprocess.image_size, bundle.device
        )
        # number of images that fit a GPU's memory together
        self._part_size = self._batch_size
        self._kind = find_output_kind(
            bundle.model, bundle.class_names, is_multilabel=bundle.is_multilabel
        )
        is_auto = isinstance(target, str) and target == "auto"
        has_classes = any(method.class_specific for method in chosen)
        if not is_auto and not has_classes:
            raise ValueError(
                f"{' and '.join(methods)}: the same map for every class, so --class {target} "
                "changes nothing; leave it out, or choose a method whose maps depend on it, such "
                "as libra-removal"
            )
        if self._kind == "features" and not has_classes:
            self._target = FEATURES
            self._num_tested = 0  # removed patches have no effect on a class
        else:
            self._target = build_target(
                target, bundle.class_names, self._kind, num_images=num_images
            )
        # the most probable class otherwise, without a copy to the host
        if is_auto and (self._kind == "labels" or bundle.operating_point):
            self._target = replace(self._target, predict=partial(choose_decided, bundle))
        # files of several classes of one image need the class in their names
        self._names_classes = not is_auto or self._kind == "labels"
        self.parameters = {
            "methods": list(methods),
            "map_options": self._options,
            "checks": self._num_tested,
            "batch_size": self._batch_size,
        }

    def explain(self, items: Sequence[ImageItem]) -> Iterator[list[ImageResult]]:
        """Yield explained images, one batch after another. They have photos and attention, which
        don't fit into memory for many images."""
        numbers = range(len(items))
        with ThreadPoolExecutor() as pool, show_progress("explaining", len(items)) as advance:
            for start in range(0, len(items), self._batch_size):
                rows = slice(start, start + self._batch_size)
                batch = []
                for decoded in pool.map(self._decode, numbers[rows], items[rows]):
                    if isinstance(decoded, _Decoded):
                        batch.append(decoded)
                    else:
                        self.unreadable.append(decoded)
                if batch:
                    self._part_size = run_in_memory(
                        lambda first, end: self._explain_part(batch[first:end]),  # noqa: B023
                        0,
                        len(batch),
                        part_size=self._part_size,
                        device=self._bundle.device,
                    )
                    yield [decoded.result for decoded in batch]
                advance(len(items[rows]))

    def _decode(self, number: int, item: ImageItem) -> _Decoded | tuple[str, str]:
        """Read an image. Return its path and the reason if it can't be read: the others are
        explained."""
        preprocess = self._bundle.preprocess
        try:
            photo = item.read()
            if isinstance(photo, DeepImage):
                photo = preprocess.to_rgb(photo)  # as the model sees it
            pixels = preprocess.to_uint8(photo)
        except (ValueError, OSError) as error:
            return item.path, " ".join(str(error).split())
        # boxes are in pixels of the original; pictures are no larger than these, and many
        # originals would not fit into memory
        geometry = preprocess.geometry(photo.size)
        result = ImageResult(item.path, item.name, geometry, fit_photo(photo))
        return _Decoded(number, result, pixels)

    def _explain_part(self, batch: Sequence[_Decoded]) -> None:
        """Add to each image its maps and the model's outputs."""
        bundle = self._bundle
        pixels = torch.from_numpy(np.stack([decoded.pixels for decoded in batch]))
        numbers = [decoded.number for decoded in batch]
        forward, targets, maps = compute_maps(
            self._reader,
            bundle.preprocess.normalize(copy_to_device(pixels, bundle.device)),
            methods=self._methods,
            target=self._target.select(numbers),
            options=self._options,
            # the reader is verified when it is opened
            verify=False,
        )
        num_tested = len(batch)
        if self._num_tested is not None:
            num_tested = sum(number < self._num_tested for number in numbers)
        checks = []
        if num_tested:
            checks = check_maps(forward, targets[:num_tested], maps)
        logits = forward.logits.detach()
        scores = torch.stack(
            [self._target.score(logits, column) for column in targets.unbind(dim=1)], dim=1
        )
        attention: list[dict[str, Tensor]] = []
        if self._reader.has_attention:
            num_attended = sum(number < self._num_attended for number in numbers)
            attention = [measure_attention(forward, row) for row in range(num_attended)]

        # the only copy from the device, and the only time that the host waits for it
        logits, scores, targets, maps, checks, attention = copy_to_host(
            (logits, scores, targets, maps, checks, attention)
        )
        for decoded, parts in zip(batch, attention, strict=False):
            decoded.result.attention = {name: part.numpy() for name, part in parts.items()}
        for row, (_, result, _) in enumerate(batch):
            # labels that fill a row are repeated
            explained = list(dict.fromkeys(targets[row].tolist()))
            self._add_prediction(result, logits[row : row + 1], explained, scores[row, 0].item())
            for place, (method, values) in enumerate(maps):
                columns = zip(values[row].numpy(), explained, strict=False)
                for column, (patches, index) in enumerate(columns):
                    found = self._build_map(result, method, patches, index)
                    if found.target_name is not None:
                        found.score = scores[row, column].item()
                    if row < num_tested:
                        p_value, agreement = checks[place][row, column].tolist()
                        found.sanity_check = describe_check(p_value, agreement, forward.grid)
                    result.maps.append(found)

    def _add_prediction(
        self, result: ImageResult, logits: Float[Tensor, "1 C"], explained: list[int], score: float
    ) -> None:
        """Add what the model predicts, by its thresholds if it has any; without classes, the target
        and its value."""
        if not logits.isfinite().all():
            raise ValueError(
                f"{self._bundle.name} gives logits that are not finite (NaN or infinite) for "
                f"{result.name}, so there is nothing to explain"
            )
        if self._target.name is None:
            result.targets = tuple(explained)
        if self._kind in ("classes", "labels"):
            outputs = logits.float().numpy()
            (probabilities,) = compute_probabilities(self._bundle, outputs)
            result.probabilities = probabilities.astype(np.float32)
            (present,) = find_decided(self._bundle, outputs)
            first, *_ = present or [int(probabilities.argmax())]
            described = {
                index: result.describe_class(index, self._bundle.class_names[index])
                for index in (first, *present)
            }
            result.prediction = described[first]
            if self._kind == "labels":
                labels = [described[index] for index in present]
                result.prediction = described[first] | {"labels": labels}
            return
        assert self._target.name is not None
        name = self._target.name(explained[0])
        if self._target is not FEATURES:
            name += f" = {score:.4g}"
        result.prediction = result.describe_class(None, name)

    def _build_map(
        self, result: ImageResult, method: Method, values: PatchMap, index: int
    ) -> MapResult:
        """Build the map of an image for one class or target."""
        noun = "label" if self._kind == "labels" else "class"
        caption = f"{method.title} (the same for every {noun})"
        found = MapResult(method, f"{result.name}.{method.name}", values, caption)
        if method.class_specific:
            # a number that is not about a class has no evidence, only patches that change it
            if self._target.name is not None:
                found.target_name = name = self._target.name(index)
                found.caption, against = f"patches that raise {name}", "lower it"
            else:
                found.target = index
                found.target_name = name = self._bundle.class_names[index]
                found.caption, against = f"evidence for {name}", f"against {name}"
            if method.signed:
                found.caption += f" (red) and {against} (blue)"
            labels = result.prediction.get("labels", [result.prediction])
            is_predicted = found.target in [label["index"] for label in labels]
            if self._kind == "labels" and found.target is not None and not is_predicted:
                found.caption += f"; {name} is not predicted"
            if self._names_classes:
                found.key += f".{clean_name(name)}"
        # differences that are not drawn have to be named
        if is_flat(values, signed=method.signed):
            found.caption += "; nearly even"
        # a file name has no place for all characters
        if found.key.casefold() in {other.key.casefold() for other in result.maps}:
            found.key += f"-{index}"
        return found
