"""The loop behind `vit.explain` and `vit explain`: from images to maps, one batch after another."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from vit.bundle import Bundle
from vit.data.images import DeepImage
from vit.explanation.capture.forward import open_reader
from vit.explanation.checks.sanity_checks import MapChecks, SanityCheck, check_maps
from vit.explanation.items import ImageItem
from vit.explanation.methods.maps import Maps, check_ranges, compute_maps
from vit.explanation.methods.registry import Method, check_options, find_methods
from vit.explanation.methods.rollout import measure_attention
from vit.explanation.records import Explanations, ImageResult, MapResult
from vit.explanation.targets import (
    FEATURES,
    OutputKind,
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
from vit.runtime.tensors import Images

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
        sanity_checks: Test every map.
        batch_size: See `vit.explain`.

    Attributes:
        methods: Names of the methods.
        map_options: Values of all options of the methods, by name.
        sanity_checks: True if every map is tested.
        batch_size: Images at a time.

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
        sanity_checks: bool = False,
        batch_size: int | None = None,
    ) -> None:
        # everything that can be wrong is checked before an image is read
        self._reader = open_reader(bundle)
        self._methods = find_methods(methods, self._reader)
        # a wrong option is reported before the first image is read
        self.map_options = check_options(self._methods, map_options or {})
        check_ranges(self.map_options, self._reader)
        self.bundle = bundle
        self.methods = tuple(methods)
        self.sanity_checks = sanity_checks
        self.batch_size = batch_size or choose_explain_batch_size(
            bundle.preprocess.image_size, bundle.device
        )
        # number of images that fit a GPU's memory together
        self._part_size = self.batch_size
        self._kind: OutputKind = find_output_kind(
            bundle.model, bundle.class_names, is_multilabel=bundle.is_multilabel
        )
        if has_many(target):
            target = list_targets(target)
        self._target_name = target
        has_classes = any(method.class_specific for method in self._methods)
        if self._kind == "features" and target == "auto" and not has_classes:
            self._target = FEATURES
            # removed patches have no effect on a class
            self.sanity_checks = False
        else:
            self._target = build_target(target, bundle.class_names, self._kind)
        # the most probable class otherwise, without a copy to the host
        self._has_thresholds = self._kind == "labels" or bool(bundle.operating_point)
        if self._has_thresholds and target == "auto":
            self._target = replace(self._target, choose=partial(choose_decided, bundle))
        _check_target(target, self._methods)
        # a target that isn't about a class is the same in every column
        self._has_predicted_first = self._target.name is not None or starts_with_predicted(
            target, bundle.class_names
        )
        self._is_verified = False

    def explain(
        self,
        items: Sequence[ImageItem],
        *observers: Callable[[Sequence[ImageResult]], object],
        needs_attention: Callable[[], bool] = lambda: False,
    ) -> Explanations:
        """Explain images, one batch after another.

        Args:
            items: The images, see `vit.explanation.items`.
            observers: Called with each batch as soon as it is explained. Only they get pixels and
                attention, which don't fit into memory for many images.
            needs_attention: Called before each batch; returns whether observers need what heads
                and patches attend to.

        Returns:
            The explanations of the images that could be read.

        Raises:
            ValueError: Without observers, no image could be read.
        """
        explanations = Explanations(self.bundle, self.methods, images=[], unreadable=[])
        unreadable = explanations.unreadable
        # large images are decoded again for drawing, because two batches of them may not fit into
        # memory
        max_pixels = _MAX_KEPT_PIXELS // max(min(2 * self.batch_size, len(items)), 1)

        with ThreadPoolExecutor() as pool, show_progress("explaining", len(items)) as advance:

            def decode_ahead(start: int) -> list[Future[ImageResult]]:
                batch = items[start : start + self.batch_size]
                return [pool.submit(self._decode, item, max_pixels) for item in batch]

            decoding = decode_ahead(0)
            for start in range(0, len(items), self.batch_size):
                results = []
                # a file that can't be read is named, and the others are explained
                for item, future in zip(items[start:], decoding, strict=False):
                    try:
                        results.append(future.result())
                    except (ValueError, OSError) as error:
                        unreadable.append((item.path, " ".join(str(error).split())))
                num_items = len(decoding)
                decoding = decode_ahead(start + self.batch_size)

                if results:
                    self._explain_batch(results, has_attention=needs_attention())
                    for observe in observers:
                        observe(results)
                    # the pixels of an observed image are no longer needed
                    explanations.images += [
                        replace(result, image=None, pixels=None, attention=None)
                        for result in results
                    ]
                advance(num_items)

        # an observer reports unreadable images itself, after it has saved the others
        if not observers:
            _check_read(explanations)
        return explanations

    def _decode(self, item: ImageItem, max_pixels: int) -> ImageResult:
        photo, sha256 = item.read()
        if isinstance(photo, DeepImage):
            # as the model sees it, also when it is read again
            item = item.convert(self.bundle.preprocess.to_rgb)
            photo = self.bundle.preprocess.to_rgb(photo)
        return ImageResult(
            item=item,
            sha256=sha256,
            # boxes are in pixels of the original, because maps are drawn on it
            geometry=self.bundle.preprocess.geometry(photo.size),
            image=photo if photo.width * photo.height <= max_pixels else None,
            pixels=self.bundle.preprocess.to_uint8(photo),
        )

    def _explain_batch(self, results: Sequence[ImageResult], *, has_attention: bool) -> None:
        """Explain a batch: on a GPU one part after another, if it doesn't fit its memory."""
        self._part_size = run_in_memory(
            lambda first, end: self._explain_part(results[first:end], has_attention=has_attention),
            0,
            len(results),
            part_size=self._part_size,
            device=self.bundle.device,
        )
        # verifying the capture waits for the device, and one batch is enough
        self._is_verified = True

    def _explain_part(self, results: Sequence[ImageResult], *, has_attention: bool) -> None:
        """Add to each image its maps and the model's outputs."""
        forward, targets, maps = compute_maps(
            self._reader,
            self._normalize(results),
            methods=self.methods,
            target=self._target.select([result.item.number for result in results]),
            options=self.map_options,
            verify=not self._is_verified,
        )
        checks: list[list[MapChecks]] = [[] for _ in maps]
        if self.sanity_checks:
            checks = check_maps(forward, targets, maps, predicted_first=self._has_predicted_first)
        logits = forward.logits.detach()
        probabilities = compute_probabilities(logits.float() / self.bundle.temperature, self._kind)
        scores = torch.stack(
            [self._target.score(logits, column) for column in targets.unbind(dim=1)], dim=1
        )
        attention: list[dict[str, Tensor]] = []
        if has_attention and self._reader.has_attention:
            attention = [measure_attention(forward, row) for row in range(len(results))]

        # the only copy from the device, and the only time that the host waits for it
        logits, probabilities, scores, targets, maps, checks, attention = copy_to_host(
            (logits, probabilities, scores, targets, maps, checks, attention)
        )
        for result, parts in zip(results, attention, strict=False):
            result.attention = {name: part.numpy() for name, part in parts.items()}
        for row, result in enumerate(results):
            if not logits[row].isfinite().all():
                raise ValueError(
                    f"{self.bundle.name} gives logits that are not finite (NaN or infinite) for "
                    f"{result.item.name}, so there is nothing to explain"
                )
            result.probabilities = probabilities[row].numpy()
            # labels that fill a row are repeated
            explained = dict.fromkeys(targets[row, : self._num_classes_explained].tolist())
            result.targets = tuple(explained)
            if self._has_thresholds:
                (present,) = find_decided(self.bundle, logits[row : row + 1].float().numpy())
                result.predicted = present[0] if present else int(probabilities[row].argmax())
                result.labels = present if self._kind == "labels" else None
            elif len(result.probabilities):
                result.predicted = int(result.probabilities.argmax())
            if self._target.name is not None:
                name = self._target.name(int(targets[row, 0]))
                result.output = f"{name} = {scores[row, 0].item():.4g}"
                if self._target is FEATURES:
                    result.output = name
        for method_maps, method_checks in zip(maps, checks, strict=True):
            checks_by_class = [class_checks.to_list() for class_checks in method_checks]
            self._add_maps(results, method_maps, targets, scores, checks_by_class)

    @property
    def _num_classes_explained(self) -> int | None:
        """Number of explained classes of an image: None for all targets, 0 if the target isn't
        about a class."""
        return None if self._target.name is None else 0

    def _normalize(self, results: Sequence[ImageResult]) -> Images:
        """Return the model's input, on its device."""
        pixels = np.stack([result.pixels for result in results if result.pixels is not None])
        batch = copy_to_device(torch.from_numpy(pixels), self.bundle.device)
        return self.bundle.preprocess.normalize(batch)

    def _add_maps(
        self,
        results: Sequence[ImageResult],
        maps: Maps,
        targets: Tensor,
        scores: Tensor,
        checks_by_class: list[list[SanityCheck]],
    ) -> None:
        """Add the map of each class to each image."""
        method = maps.method
        for row, result in enumerate(results):
            num_columns = len(set(targets[row].tolist())) if method.class_specific else 1
            taken: set[str] = set()
            for column, values in enumerate(maps.values[row, :num_columns].numpy()):
                map_result = MapResult(
                    method=method,
                    key=f"{result.item.name}.{method.name}",
                    values=values,
                    is_label=self._kind == "labels",
                )
                if checks_by_class:
                    map_result.sanity_check = checks_by_class[column][row]
                if method.class_specific:
                    map_result.score = scores[row, column].item()
                    index = int(targets[row, column])
                    if self._target.name is not None:
                        map_result.target_name = self._target.name(index)
                    else:
                        map_result.target = index
                        map_result.target_name = self.bundle.class_names[index]
                        map_result.is_predicted = result.labels is None or index in result.labels
                    # files of several classes of one image need the class in their names
                    if self._target_name != "auto" or self._kind == "labels":
                        map_result.key += f".{clean_name(map_result.target_name)}"
                        # a file name has no place for all characters
                        if map_result.key.casefold() in taken:
                            map_result.key += f"-{index}"
                        taken.add(map_result.key.casefold())
                result.maps.append(map_result)


def _check_read(explanations: Explanations) -> None:
    """Raise ValueError if no image could be read, and warn about some that could not."""
    unreadable = explanations.unreadable
    if not unreadable and not explanations.images:
        raise ValueError("there are no images to explain")
    if not explanations.images:
        raise ValueError(f"none of the {len(unreadable)} images could be read: {unreadable[0][1]}")
    if unreadable:
        warnings.warn(
            f"{len(unreadable)} images are left out; the first: {unreadable[0][1]}", stacklevel=3
        )


def _check_target(target: TargetLike, methods: Sequence[Method]) -> None:
    """Raise ValueError if a class is named and no method's maps depend on it."""
    if target == "auto" or any(method.class_specific for method in methods):
        return
    names = " and ".join(method.name for method in methods)
    text = f"{names}: the same map for every class, so --class {target} changes nothing"
    hint = "leave it out, or choose a method whose maps depend on it, such as libra-removal"
    raise ValueError(f"{text}; {hint}")
