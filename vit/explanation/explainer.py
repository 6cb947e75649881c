"""The loop behind `vit.explain` and `vit explain`: from images to maps, one batch after another."""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vit.bundle import Bundle
from vit.data.images import DeepImage
from vit.explanation.capture.forward import open_reader
from vit.explanation.checks.sanity_checks import check_maps
from vit.explanation.items import ImageItem
from vit.explanation.methods.maps import compute_maps
from vit.explanation.methods.registry import Method, check_options, find_methods
from vit.explanation.methods.rollout import measure_attention
from vit.explanation.records import ImageResult, MapResult, describe_class
from vit.explanation.render.overlay import (
    PANEL_SIDES,
    PatchMap,
    fit_scale,
    relative_to_uniform,
    resize_picture,
)
from vit.explanation.targets import (
    FEATURES,
    TargetLike,
    build_target,
    choose_decided,
    find_decided,
    find_output_kind,
)
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


class Explainer:
    """Explain images with one model.

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
        self._is_verified = False
        self._kind = find_output_kind(
            bundle.model, bundle.class_names, is_multilabel=bundle.is_multilabel
        )
        is_auto = isinstance(target, str) and target == "auto"
        has_classes = any(method.class_specific for method in chosen)
        if self._kind == "features" and is_auto and not has_classes:
            self._target = FEATURES
            self._num_tested = 0  # removed patches have no effect on a class
        else:
            self._target = build_target(target, bundle.class_names, self._kind)
        if not is_auto and not has_classes:
            raise ValueError(
                f"{' and '.join(methods)}: the same map for every class, so --class {target} "
                "changes nothing; leave it out, or choose a method whose maps depend on it, such "
                "as libra-removal"
            )
        # the most probable class otherwise, without a copy to the host
        if is_auto and (self._kind == "labels" or bundle.operating_point):
            self._target = replace(self._target, choose=partial(choose_decided, bundle))
        # files of several classes of one image need the class in their names
        self._names_classes = not is_auto or self._kind == "labels"
        self.parameters = {
            **self._options,
            "methods": list(methods),
            "checks": self._num_tested,
            "batch_size": self._batch_size,
        }

    def explain(self, items: Sequence[ImageItem]) -> Iterator[list[ImageResult]]:
        """Yield explained images, one batch after another. They have pixels and attention, which
        don't fit into memory for many images."""
        with ThreadPoolExecutor() as pool, show_progress("explaining", len(items)) as advance:
            for start in range(0, len(items), self._batch_size):
                batch = items[start : start + self._batch_size]
                results = []
                for item, decoded in zip(batch, pool.map(self._decode, batch), strict=True):
                    if isinstance(decoded, str):
                        self.unreadable.append((item.path, decoded))
                    else:
                        results.append(decoded)
                if results:
                    self._explain_batch(results)
                    yield results
                advance(len(batch))

    def _decode(self, item: ImageItem) -> ImageResult | str:
        """Read an image. Return the reason if it can't be read: the others are explained."""
        preprocess = self.bundle.preprocess
        try:
            photo, sha256 = item.read()
            if isinstance(photo, DeepImage):
                photo = preprocess.to_rgb(photo)  # as the model sees it
            pixels = preprocess.to_uint8(photo)
        except (ValueError, OSError) as error:
            return " ".join(str(error).split())
        # others who get a page don't have the folders
        file = Path(item.path)
        return ImageResult(
            path=item.path,
            name=item.name,
            title=file.name if clean_name(file.stem) == item.name else item.name,
            number=item.number,
            sha256=sha256,
            # boxes are in pixels of the original, because maps are drawn on it
            geometry=preprocess.geometry(photo.size),
            # pictures are no larger, and many originals would not fit into memory
            photo=resize_picture(photo, min_side=PANEL_SIDES[0], max_side=PANEL_SIDES[1]),
            pixels=pixels,
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
        numbers = [result.number for result in results]
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
        checks = check_maps(forward, targets, maps, count=num_tested)
        logits = forward.logits.detach()
        scores = torch.stack(
            [self._target.score(logits, column) for column in targets.unbind(dim=1)], dim=1
        )
        attention: list[dict[str, Tensor]] = []
        if self._reader.has_attention:
            num_attended = sum(number < self._num_attended for number in numbers)
            attention = [measure_attention(forward, row) for row in range(num_attended)]

        # the only copy from the device, and the only time that the host waits for it
        logits, probabilities, scores, targets, maps, checks, attention = copy_to_host(
            (logits, self._compute_probabilities(logits), scores, targets, maps, checks, attention)
        )
        for result, parts in zip(results, attention, strict=False):
            result.attention = {name: part.numpy() for name, part in parts.items()}
        tests = [[column.to_list() for column in of_method] for of_method in checks]
        for row, result in enumerate(results):
            if not logits[row].isfinite().all():
                raise ValueError(
                    f"{self.bundle.name} gives logits that are not finite (NaN or infinite) for "
                    f"{result.name}, so there is nothing to explain"
                )
            result.probabilities = probabilities[row].numpy()
            # labels that fill a row are repeated
            explained = list(dict.fromkeys(targets[row].tolist()))
            self._add_prediction(result, logits[row : row + 1], explained[0], scores[row, 0].item())
            if self._target.name is None:
                result.targets = tuple(explained)
            for method_maps, of_method in zip(maps, tests, strict=True):
                columns = zip(method_maps.values[row].numpy(), explained, strict=False)
                for column, (values, index) in enumerate(columns):
                    found = self._build_map(result, method_maps.method, values, index)
                    if found.target_name is not None:
                        found.score = scores[row, column].item()
                    if row < num_tested:
                        found.sanity_check = of_method[column][row]
                    result.maps.append(found)

    def _compute_probabilities(self, logits: Tensor) -> Tensor:
        """Compute the probabilities [B, C]; [B, 0] if the outputs are no logits."""
        logits = logits.float() / self.bundle.temperature
        match self._kind:
            case "classes":
                return logits.softmax(dim=1)
            case "labels":
                return logits.sigmoid()
            case _:
                return logits[:, :0]

    def _add_prediction(
        self, result: ImageResult, logits: Tensor, explained: int, score: float
    ) -> None:
        """Add what the model predicts, by its thresholds if it has any; without classes, the target
        and its value."""

        def describe(index: int) -> dict[str, Any]:
            return describe_class(index, self.bundle.class_names[index], result.probabilities)

        if self._kind in ("classes", "labels"):
            (present,) = find_decided(self.bundle, logits.float().numpy())
            prediction = describe((present or [int(result.probabilities.argmax())])[0])
            if self._kind == "labels":
                prediction["labels"] = list(map(describe, present))
        else:
            name = self._target.name(explained) if self._target.name else ""
            if self._target is not FEATURES:
                name += f" = {score:.4g}"
            prediction = describe_class(None, name, result.probabilities)
        result.prediction = prediction

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
                found.target_name = name = self.bundle.class_names[index]
                found.caption, against = f"evidence for {name}", f"against {name}"
            if method.signed:
                found.caption += f" (red) and {against} (blue)"
            labels = result.prediction.get("labels", [result.prediction])
            is_predicted = found.target in [label["index"] for label in labels]
            if self._kind == "labels" and found.target is not None and not is_predicted:
                found.caption += f"; {name} is not predicted"
        # differences that are not drawn have to be named
        if fit_scale(relative_to_uniform(values), signed=method.signed).is_flat:
            found.caption += "; nearly even"
        if found.target_name is not None and self._names_classes:
            found.key += f".{clean_name(found.target_name)}"
        # a file name has no place for all characters
        if found.key.casefold() in {other.key.casefold() for other in result.maps}:
            found.key += f"-{index}"
        return found
