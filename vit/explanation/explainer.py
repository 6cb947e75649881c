"""The loop behind `vit.explain` and `vit explain`: from images to maps, one batch after another."""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vit.bundle import Bundle
from vit.data.images import DeepImage
from vit.explanation.capture.forward import open_reader
from vit.explanation.checks.sanity_checks import check_maps
from vit.explanation.items import ImageItem
from vit.explanation.methods.maps import Maps, compute_maps
from vit.explanation.methods.registry import check_options, find_methods
from vit.explanation.methods.rollout import measure_attention
from vit.explanation.records import ImageResult, MapResult
from vit.explanation.targets import (
    FEATURES,
    TargetLike,
    build_target,
    choose_decided,
    compute_probabilities,
    find_decided,
    find_output_kind,
    has_many,
    list_targets,
    starts_with_predicted,
)
from vit.runtime.device import copy_to_device, copy_to_host, run_in_memory
from vit.runtime.files import clean_name
from vit.runtime.progress import show_progress

_MAX_KEPT_PIXELS = 100_000_000  # in all images that wait to be explained and drawn


def choose_explain_batch_size(image_size: tuple[int, int], device: torch.device) -> int:
    """Choose the images at a time: 64 small or 16 large ones on a CPU, four times as many on a GPU.

    Small images need larger batches to keep two cores busy: with 65 tokens, 64 images at a time are
    1.1 (float32) to 1.4 times (bfloat16) as fast as 16 (2-core Zen 5).
    """
    batch_size = 64 if max(image_size) <= 64 else 16
    return batch_size if device.type == "cpu" else 4 * batch_size


class Explainer:
    """Explain images with one model. Threads decode the next batch while the model runs.

    Args:
        bundle: The model, with its class names and preprocessing.
        methods: Names of registered methods.
        target: See `vit.explain`.
        map_options: See `vit.explain`.
        num_tested: Number of images, from the first on, whose maps are tested. None: all.
        num_attended: Number of images, from the first on, that get what their heads and patches
            attend to.
        batch_size: See `vit.explain`.

    Attributes:
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
        num_tested: int | None = 0,
        num_attended: int = 0,
        batch_size: int | None = None,
    ) -> None:
        # everything that can be wrong is checked before an image is read
        self._reader = open_reader(bundle)
        chosen = find_methods(methods, self._reader)
        self._options = check_options(chosen, map_options or {}, self._reader)
        self.bundle = bundle
        self.methods = tuple(methods)
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
        if has_many(target):
            target = list_targets(target)
        has_classes = any(method.class_specific for method in chosen)
        if self._kind == "features" and target == "auto" and not has_classes:
            self._target = FEATURES
            self._num_tested = 0  # removed patches have no effect on a class
        else:
            self._target = build_target(target, bundle.class_names, self._kind)
        if target != "auto" and not has_classes:
            raise ValueError(
                f"{' and '.join(methods)}: the same map for every class, so --class {target} "
                "changes nothing; leave it out, or choose a method whose maps depend on it, such "
                "as libra-removal"
            )
        # the most probable class otherwise, without a copy to the host
        self._has_thresholds = self._kind == "labels" or bool(bundle.operating_point)
        if self._has_thresholds and target == "auto":
            self._target = replace(self._target, choose=partial(choose_decided, bundle))
        # a target that isn't about a class is the same in every column
        self._has_predicted_first = self._target.name is not None or starts_with_predicted(
            target, bundle.class_names
        )
        # files of several classes of one image need the class in their names
        self._names_classes = target != "auto" or self._kind == "labels"
        self._is_verified = False

    @property
    def parameters(self) -> dict[str, Any]:
        """Everything that the maps depend on but the target, for the manifest."""
        return {
            **self._options,
            "methods": list(self.methods),
            "checks": self._num_tested,
            "batch_size": self._batch_size,
        }

    def explain(self, items: Sequence[ImageItem]) -> Iterator[list[ImageResult]]:
        """Yield explained images, one batch after another. They have pixels and attention, which
        don't fit into memory for many images."""
        # large images are decoded again for drawing, because two batches of them may not fit into
        # memory
        max_pixels = _MAX_KEPT_PIXELS // max(min(2 * self._batch_size, len(items)), 1)

        with ThreadPoolExecutor() as pool, show_progress("explaining", len(items)) as advance:

            def decode_ahead(start: int) -> list[Future[ImageResult]]:
                batch = items[start : start + self._batch_size]
                return [pool.submit(self._decode, item, max_pixels) for item in batch]

            decoding = decode_ahead(0)
            for start in range(0, len(items), self._batch_size):
                results = []
                # a file that can't be read is named, and the others are explained
                for item, future in zip(items[start:], decoding, strict=False):
                    try:
                        results.append(future.result())
                    except (ValueError, OSError) as error:
                        self.unreadable.append((item.path, " ".join(str(error).split())))
                num_items = len(decoding)
                decoding = decode_ahead(start + self._batch_size)
                if results:
                    self._explain_batch(results)
                    yield results
                advance(num_items)

    def _decode(self, item: ImageItem, max_pixels: int) -> ImageResult:
        photo, sha256 = item.read()
        preprocess = self.bundle.preprocess
        if isinstance(photo, DeepImage):
            # as the model sees it, also when it is read again
            item = item.convert(preprocess.to_rgb)
            photo = preprocess.to_rgb(photo)
        return ImageResult(
            item=item,
            sha256=sha256,
            class_names=self.bundle.class_names,
            # boxes are in pixels of the original, because maps are drawn on it
            geometry=preprocess.geometry(photo.size),
            image=photo if photo.width * photo.height <= max_pixels else None,
            pixels=preprocess.to_uint8(photo),
        )

    def _explain_batch(self, results: Sequence[ImageResult]) -> None:
        """Explain a batch: on a GPU one part after another, if it doesn't fit its memory."""
        self._part_size = run_in_memory(
            lambda first, end: self._explain_part(results[first:end]),
            0,
            len(results),
            part_size=self._part_size,
            device=self.bundle.device,
        )
        # verifying the capture waits for the device, and one batch is enough
        self._is_verified = True

    def _explain_part(self, results: Sequence[ImageResult]) -> None:
        """Add to each image its maps and the model's outputs."""
        pixels = np.stack([result.pixels for result in results if result.pixels is not None])
        batch = copy_to_device(torch.from_numpy(pixels), self.bundle.device)
        numbers = [result.item.number for result in results]
        forward, targets, maps = compute_maps(
            self._reader,
            self.bundle.preprocess.normalize(batch),
            methods=self.methods,
            target=self._target.select(numbers),
            options=self._options,
            verify=not self._is_verified,
        )
        num_tested = len(results)
        if self._num_tested is not None:
            num_tested = sum(number < self._num_tested for number in numbers)
        checks = check_maps(
            forward, targets, maps, count=num_tested, predicted_first=self._has_predicted_first
        )
        logits = forward.logits.detach()
        probabilities = compute_probabilities(logits.float() / self.bundle.temperature, self._kind)
        scores = torch.stack(
            [self._target.score(logits, column) for column in targets.unbind(dim=1)], dim=1
        )
        attention: list[dict[str, Tensor]] = []
        if self._reader.has_attention:
            num_attended = sum(number < self._num_attended for number in numbers)
            attention = [measure_attention(forward, row) for row in range(num_attended)]

        # the only copy from the device, and the only time that the host waits for it
        logits, probabilities, scores, targets, maps, checks, attention = copy_to_host(
            (logits, probabilities, scores, targets, maps, checks, attention)
        )
        for result, parts in zip(results, attention, strict=False):
            result.attention = {name: part.numpy() for name, part in parts.items()}
        tests = [[column.to_list() for column in of_method] for of_method in checks]
        for row, result in enumerate(results):
            if not logits[row].isfinite().all():
                raise ValueError(
                    f"{self.bundle.name} gives logits that are not finite (NaN or infinite) for "
                    f"{result.item.name}, so there is nothing to explain"
                )
            result.probabilities = probabilities[row].numpy()
            self._add_prediction(result, logits[row : row + 1].float().numpy())
            # labels that fill a row are repeated
            explained = list(dict.fromkeys(targets[row].tolist()))
            if self._target.name is None:
                result.targets = tuple(explained)
            else:
                result.output = self._target.name(explained[0])
                if self._target is not FEATURES:
                    result.output += f" = {scores[row, 0].item():.4g}"
            for place, method_maps in enumerate(maps):
                added = self._add_maps(result, method_maps, row, explained, scores[row].tolist())
                if row < num_tested:
                    for map_result, test in zip(added, tests[place], strict=False):
                        map_result.sanity_check = test[row]

    def _add_prediction(self, result: ImageResult, logits: np.ndarray) -> None:
        """Add what the model predicts, by its thresholds if it has any."""
        if self._has_thresholds:
            (present,) = find_decided(self.bundle, logits)
            result.predicted = present[0] if present else int(result.probabilities.argmax())
            result.labels = present if self._kind == "labels" else None
        elif len(result.probabilities):
            result.predicted = int(result.probabilities.argmax())

    def _add_maps(
        self,
        result: ImageResult,
        maps: Maps,
        row: int,
        explained: Sequence[int],
        scores: Sequence[float],
    ) -> list[MapResult]:
        """Add the maps of a method, one for each class if they depend on it, and return them."""
        method = maps.method
        added: list[MapResult] = []
        for values, index, score in zip(maps.values[row].numpy(), explained, scores, strict=False):
            map_result = MapResult(
                method, f"{result.item.name}.{method.name}", values, is_label=self._kind == "labels"
            )
            if method.class_specific:
                map_result.score = score
                if self._target.name is not None:
                    map_result.target_name = self._target.name(index)
                else:
                    map_result.target = index
                    map_result.target_name = self.bundle.class_names[index]
                    map_result.is_predicted = result.labels is None or index in result.labels
                if self._names_classes:
                    map_result.key += f".{clean_name(map_result.target_name)}"
                # a file name has no place for all characters
                if map_result.key.casefold() in {other.key.casefold() for other in added}:
                    map_result.key += f"-{index}"
            added.append(map_result)
        result.maps += added
        return added
