"""The loop behind `vit.explain` and `vit explain`: from images to maps, one batch after another."""

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor, nn

from vit.bundle import Bundle
from vit.data.images import DeepImage
from vit.explanation.capture.forward import Forward, open_reader
from vit.explanation.capture.reader import ModelReader
from vit.explanation.checks.sanity_checks import MapChecks, SanityCheck, check_maps
from vit.explanation.heads import compute_head_effects
from vit.explanation.items import ImageItem
from vit.explanation.methods.completeness import measure_completeness_error
from vit.explanation.methods.maps import (
    ROLLOUT_OPTIONS,
    Keep,
    Maps,
    check_ranges,
    compute_maps,
)
from vit.explanation.methods.registry import Method, check_options, find_methods
from vit.explanation.records import Explanations, ImageResult, MapResult, Sink
from vit.explanation.render.scale import FIXED_END, SCALES, ColourScale, PatchMap, fit_scale
from vit.explanation.render.token_details import TokenDetails, measure_tokens
from vit.explanation.targets import (
    FEATURES,
    OutputKind,
    Target,
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
from vit.prediction.conformal import predict_p_values, predict_sets
from vit.prediction.predictor import BatchPredictor, read_from
from vit.prediction.records import find_note
from vit.runtime.arguments import check_choice
from vit.runtime.device import (
    autocast,
    choose_precision,
    copy_to_device,
    copy_to_host,
    run_in_memory,
)
from vit.runtime.files import clean_name
from vit.runtime.progress import show_progress
from vit.runtime.tensors import Images
from vit.runtime.threads import BatchThreads

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

    On a CPU several threads each take a part of the batch. Each has its own copy of the model,
    because hooks record one pass.

    Args:
        bundle: The model, with its class names and preprocessing.
        methods: Names of registered methods.
        target: See `vit.explain`.
        map_options: See `vit.explain`.
        sanity_checks: Test every map.
        batch_size: See `vit.explain`.
        precision: See `vit.explain`.

    Attributes:
        methods: Names of the methods.
        map_options: Values of all options of the methods, by name.
        sanity_checks: True if every map is tested.
        batch_size: Images at a time.
        precision: Precision of the forward pass.

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
        precision: str = "float32",
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
        self.precision = choose_precision(precision, bundle.device)
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
        self._completeness_error: float | None = None

        # other models may not allow copies, so they run alone with all of torch's threads
        has_threads = bundle.device.type == "cpu" and self._reader.is_ours
        self._threads = BatchThreads(None if has_threads else 1)
        self._readers = [self._reader]
        for _ in range(self._threads.count - 1):
            # a copy shares the memory of the parameters
            shared: dict[int, object] = {
                id(parameter): nn.Parameter(parameter.detach(), parameter.requires_grad)
                for parameter in bundle.model.parameters()
            }
            self._readers.append(ModelReader(copy.deepcopy(bundle.model, shared)))

    def explain(
        self,
        items: Sequence[ImageItem],
        *observers: Callable[[Sequence[ImageResult]], object],
        scale: str = "image",
        token_bytes: Callable[[], int] = lambda: 0,
    ) -> Explanations:
        """Explain images, one batch after another.

        Args:
            items: The images, see `vit.explanation.items`.
            observers: Called with each batch as soon as it is explained. Only they get pixels and
                the details of tokens, which don't fit into memory for many images.
            scale: See `vit.explain`.
            token_bytes: Called before each batch; returns the largest size of an image's
                `TokenDetails`, 0 for none.

        Returns:
            The explanations of the images that could be read.

        Raises:
            ValueError: Without observers, no image could be read.
        """
        check_choice(scale, SCALES, name="scale")
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
                    self._explain_batch(results, token_bytes())
                    _set_scales(results, scale)
                    for observe in observers:
                        observe(results)
                    # the pixels of an observed image are no longer needed
                    explanations.images += [
                        replace(result, image=None, pixels=None, tokens=None) for result in results
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

    def _explain_batch(self, results: Sequence[ImageResult], token_bytes: int) -> None:
        """Explain a batch: on a CPU each thread takes a part; on a GPU one part after another runs
        if the batch doesn't fit its memory."""
        # once, because it is about the model and the target
        if not self._is_verified and any(method.uses_libra for method in self._methods):
            self._completeness_error = self._measure_completeness(results[:1])
        # rounded up, so that there are at most as many parts as threads
        part_size = -(-len(results) // self._threads.count)

        def explain_part(start: int) -> None:
            reader = self._readers[start // part_size]
            self._explain_part(results[start : start + part_size], reader, token_bytes)

        starts = range(0, len(results), part_size)
        if self.bundle.device.type != "cpu":
            self._part_size = run_in_memory(
                lambda first, end: self._explain_part(
                    results[first:end], self._reader, token_bytes
                ),
                0,
                len(results),
                part_size=self._part_size,
                device=self.bundle.device,
            )
        elif len(starts) == 1:
            explain_part(0)
        else:
            list(self._threads.map(explain_part, starts))
        if self.sanity_checks and (self.bundle.likeness or self.bundle.metadata.get("conformal")):
            self._add_notes(results)
        # verifying the capture waits for the device, and one batch is enough
        self._is_verified = True

    @torch.inference_mode(False)  # each thread has its own modes
    def _explain_part(
        self, results: Sequence[ImageResult], reader: ModelReader, token_bytes: int
    ) -> None:
        """Add to each image its maps, the model's outputs and the details of its tokens."""
        # the gallery shows the tokens of each block; other callers do without that memory
        keep: Keep = "nothing"
        if token_bytes:
            keep = "gradients" if self.sanity_checks else "block tokens"
        target = self._select_target(results)
        with autocast(self.bundle.device, self.precision):
            forward, targets, maps = compute_maps(
                reader,
                self._normalize(results),
                methods=self.methods,
                target=target,
                options=self.map_options,
                keep=keep,
                verify=not self._is_verified and reader is self._reader,
            )
            checks: list[list[MapChecks]] = [[] for _ in maps]
            if self.sanity_checks:
                checks = check_maps(
                    forward, targets, maps, predicted_first=self._has_predicted_first
                )
        logits = forward.logits.detach()
        probabilities = self._to_probabilities(logits.float())
        scores = torch.stack(
            [self._target.score(logits, column) for column in targets.unbind(dim=1)], dim=1
        )
        tokens = []
        if token_bytes and reader.has_attention:
            tokens = self._measure_tokens(forward, targets, max_bytes=token_bytes)

        # the only copy from the device, and the only time that the host waits for it
        logits, probabilities, scores, targets, maps, checks, tokens = copy_to_host(
            (logits, probabilities, scores, targets, maps, checks, tokens)
        )
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
            if tokens:
                result.tokens = tokens[row]
        for method_maps, method_checks in zip(maps, checks, strict=True):
            checks_by_class = [class_checks.to_list() for class_checks in method_checks]
            self._add_maps(results, method_maps, targets, scores, checks_by_class)

    def _add_notes(self, results: Sequence[ImageResult]) -> None:
        """Say which images are unusual or unsure, as `vit predict` does."""
        predictor = BatchPredictor.from_bundle(self.bundle, precision=self.precision)
        read = read_from([result.pixels for result in results if result.pixels is not None])
        features = None
        if self.bundle.likeness is None:
            logits = predictor.predict(read, count=len(results))
        else:
            logits, features = predictor.predict_with_features(read, count=len(results))
        unknown = [None] * len(results)
        p_values = predict_p_values(self.bundle, features) or unknown
        sets = predict_sets(self.bundle, logits, coverage=0.95) or unknown
        for result, p_value, chosen in zip(results, p_values, sets, strict=True):
            result.p_value = p_value
            result.note = find_note(p_value, chosen)

    def _select_target(self, results: Sequence[ImageResult]) -> Target:
        return self._target.select([result.item.number for result in results])

    def _to_probabilities(self, logits: Tensor) -> Tensor:
        return compute_probabilities(logits / self.bundle.temperature, self._kind)

    def _measure_tokens(
        self, forward: Forward, targets: Tensor, *, max_bytes: int
    ) -> list[TokenDetails]:
        """Measure the details of each image's tokens, see `measure_tokens`."""
        # gradients by Libra's rules have another meaning than the model's own
        has_own_gradients = self.sanity_checks or any(
            method.class_specific and not method.libra for method in self._methods
        )
        effects: list[Tensor | None] = [None] * len(targets)
        if has_own_gradients:
            score = self._target.score(forward.logits, targets[:, 0])
            effects = list(compute_head_effects(forward, score))
        options = {
            name: self.map_options[name] for name in ROLLOUT_OPTIONS if name in self.map_options
        }
        measure = partial(
            measure_tokens,
            forward,
            max_bytes=max_bytes,
            to_probabilities=(
                self._to_probabilities if self._kind in ("classes", "labels") else None
            ),
            rollout_options=options,
        )
        return [
            measure(row, targets=targets[row, : self._num_classes_explained])._replace(
                head_effects=effects[row]
            )
            for row in range(len(targets))
        ]

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

    @torch.inference_mode(False)
    def _measure_completeness(self, results: Sequence[ImageResult]) -> float | None:
        return measure_completeness_error(
            self._reader, self._normalize(results), self._select_target(results)
        )

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
                    prefix_mass=float(maps.prefix_mass[row, column]),
                    entropy=float(maps.entropy[row, column]),
                    is_label=self._kind == "labels",
                )
                if method.uses_libra:
                    map_result.completeness_error = self._completeness_error
                if maps.sinks is not None:
                    map_result.sinks = _list_sinks(
                        maps.sinks[row], values, start_layer=maps.start_layer
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


def _list_sinks(
    sinks: Bool[Tensor, "layers rows columns"], values: PatchMap, *, start_layer: int
) -> tuple[Sink, ...]:
    """List the patches that are sinks of a layer, those with most of the map first."""
    patches = sinks.any(dim=0).nonzero().tolist()
    patches.sort(key=lambda patch: -float(values[patch[0], patch[1]]))
    return tuple(
        Sink(row, column, tuple((start_layer + sinks[:, row, column].nonzero()[:, 0]).tolist()))
        for row, column in patches
    )


def _set_scales(results: Sequence[ImageResult], scale: str) -> None:
    """Set the colour scale of each map."""
    maps = [map_result for result in results for map_result in result.maps]
    for map_result in maps:
        signed = map_result.method.signed
        # on the fixed scale, maps of different images and batches can be compared
        if scale == "fixed":
            low = -FIXED_END if signed else 0.0
            map_result.scale = ColourScale(low, FIXED_END, signed, "fixed scale")
        elif scale == "batch":
            compared = [other.shown_values for other in maps if other.method is map_result.method]
            map_result.scale = fit_scale(
                compared, signed=signed, label=f"scale of {len(results)} images"
            )
        else:
            map_result.scale = fit_scale([map_result.shown_values], signed=signed)
