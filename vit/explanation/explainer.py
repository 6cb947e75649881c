"""The loop behind `vit explain` and `vit.explain`: images in, maps out, a batch at a time."""

import copy
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor, nn

from vit.bundle import Bundle
from vit.data.listing import ImageInputs, list_images
from vit.explanation.capture.feature_maps import run_classifier
from vit.explanation.capture.layers import find_attention_layers, has_attention
from vit.explanation.checks.sanity_checks import (
    RELIABILITY_IMAGES,
    GroupSize,
    MapChecks,
    SanityCheck,
    check_maps,
    choose_group_size,
)
from vit.explanation.heads import compute_head_effects
from vit.explanation.items import ImageItem, items_from_images
from vit.explanation.methods.registry import (
    Maps,
    Method,
    check_options,
    compute_maps,
    find_methods,
)
from vit.explanation.records import Explanations, ImageResult, MapResult, Sink
from vit.explanation.render.overlay import (
    FIXED_END,
    INTERPOLATIONS,
    SCALES,
    ColourScale,
    PatchMap,
    fit_scale,
)
from vit.explanation.render.token_details import measure_tokens
from vit.explanation.targets import (
    OutputKind,
    build_target,
    compute_probabilities,
    find_output_kind,
    starts_with_predicted,
)
from vit.model.vision_transformer import VisionTransformer
from vit.options import ExplainOptions, MapOptions, TargetLike
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

_MAX_KEPT_PIXELS = 100_000_000  # of all images that wait to be explained and drawn


def explain_images(
    bundle: Bundle,
    images: ImageInputs,
    method: str = "rollout",
    *,
    target: TargetLike = "auto",
    options: MapOptions | None = None,
    batch_size: int = 32,
) -> Explanations:
    """Explain images with one method, without sanity checks.

    Args:
        bundle: the model, with its class names and preprocessing.
        images: paths, folders, PIL images, uint8 arrays [H, W, 3], or one of them.
        method: a name of `vit.explanation.methods.registry.METHODS`, as `vit explain --help` lists
            them. docs/attention-maps.md has the paper of each.
        target: what to explain: "auto" (the predicted class), or as of `vit.explain`.
        options: of the method. None: its defaults.
        batch_size: images that are explained together; the maps are the same of any.

    Returns:
        The explanations: `.maps[method]` is [images, rows, columns].

    Raises:
        ValueError: for an unknown method, option or class, and where no image can be read.

    Example:
        >>> bundle = vit.load_bundle("runs/digits")
        >>> vit.explain_images(bundle, "photo.png", "gae").maps["gae"]  # [1, rows, columns]
    """
    explain_options = ExplainOptions(
        methods=(method,),
        target=target,
        sanity_checks=False,
        batch_size=batch_size,
        map_options=options or MapOptions(),
    )
    return Explainer(bundle, explain_options).explain(items_from_images(list_images(images)))


def choose_explain_batch_size(image_size: tuple[int, int], device: torch.device) -> int:
    """Few tokens keep two cores busy only in larger batches: 64 images of 65 tokens are explained
    1.1 × (float32) to 1.4 × (bfloat16) as fast as 16 on a 2-core Zen 5. A GPU takes four times as
    many, and fewer where they don't fit its memory."""
    batch_size = 64 if max(image_size) <= 64 else 16
    return batch_size if device.type == "cpu" else 4 * batch_size


class Explainer:
    """Explains images with one model. Threads decode the next batch while the model works.

    On a CPU each of several threads takes a part of the batch, with a copy of the model of its own:
    what hooks record is of one pass.

    Args:
        bundle: the model, with its class names and preprocessing.
        options: how images are explained; those of files concern others. `Explainer.options` has
            the batch size and precision that suit the model in the place of None and "auto".
            Without `sanity_checks` there are none.

    Raises:
        ValueError: for an unknown method or scale, for a class, layer or option that the model does
            not have, and for a model whose attention can't be read where the method needs it.
    """

    # copies of the model that are made in inference mode could not be differentiated
    @torch.inference_mode(False)
    def __init__(self, bundle: Bundle, options: ExplainOptions) -> None:
        # whatever can be wrong is said before any image is read
        methods = find_methods(options.methods, bundle.model)
        check_choice(options.scale, SCALES, name="scale")
        check_choice(options.interpolation, INTERPOLATIONS, name="--interpolation")
        self._has_attention = has_attention(bundle.model)
        if self._has_attention:
            check_options(options.map_options, find_attention_layers(bundle.model))
        self.bundle = bundle
        self.device = next(bundle.model.parameters()).device
        self._precision = choose_precision(options.precision, self.device)
        self._batch_size = options.batch_size or choose_explain_batch_size(
            bundle.preprocess.image_size, self.device
        )
        # images that fit a GPU's memory together
        self._part_size = self._batch_size
        self.options = replace(
            options,
            batch_size=self._batch_size,
            precision=self._precision,
        )
        self._kind: OutputKind = find_output_kind(bundle.model, bundle.class_names)
        self._target, self._choose_targets = build_target(
            options.target, bundle.class_names, self._kind
        )
        _check_target(options, methods)
        self._is_verified = False
        self._group_size: GroupSize | None = None

        # other models' modules may not be copied: they explain with all of torch's threads
        has_threads = self.device.type == "cpu" and isinstance(bundle.model, VisionTransformer)
        self._threads = BatchThreads(None if has_threads else 1)
        self._models = [bundle.model]
        for _ in range(self._threads.count - 1):
            # the parameters of a copy lie in the same memory
            shared: dict[int, object] = {
                id(parameter): nn.Parameter(parameter.detach(), parameter.requires_grad)
                for parameter in bundle.model.parameters()
            }
            self._models.append(copy.deepcopy(bundle.model, shared))

    def explain(
        self,
        items: Sequence[ImageItem],
        *observers: Callable[[Sequence[ImageResult]], object],
        token_bytes: Callable[[], int] = lambda: 0,
    ) -> Explanations:
        """Explain images, one batch after another.

        Args:
            items: the images, see `vit.explanation.items`.
            observers: take each batch as soon as it is explained. Pixels and the details of tokens
                go to them alone: of many images they don't fit into memory.
            token_bytes: how much each image's `TokenDetails` may take, asked before each batch; 0
                where none are wanted.

        Returns:
            The explanations of the images that could be read.

        Raises:
            ValueError: without observers, where no image could be read.
        """
        explanations = Explanations(self.bundle, self.options, images=[], unreadable=[])
        unreadable = explanations.unreadable
        # of the same images it is the same, whatever was explained before
        self._group_size = None
        # large images are decoded again where they are drawn: two batches of them at once may not
        # fit into memory
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
                        unreadable.append((item.path, " ".join(str(error).split())))
                num_items = len(decoding)
                decoding = decode_ahead(start + self._batch_size)

                if results:
                    self._explain_batch(results, token_bytes() if self._has_attention else 0)
                    for observe in observers:
                        observe(results)
                    # what was observed needs its pixels no more
                    explanations.images += [
                        replace(result, image=None, pixels=None, tokens=None) for result in results
                    ]
                advance(num_items)

        if observers or (explanations.images and not unreadable):
            return explanations
        if not unreadable:
            raise ValueError("there are no images to explain")
        if not explanations.images:
            raise ValueError(
                f"none of the {len(unreadable)} images could be read: {unreadable[0][1]}"
            )
        warnings.warn(
            f"{len(unreadable)} images are left out; the first: {unreadable[0][1]}", stacklevel=2
        )
        return explanations

    def _decode(self, item: ImageItem, max_pixels: int) -> ImageResult:
        photo, sha256 = item.read()
        return ImageResult(
            item=item,
            sha256=sha256,
            geometry=self.bundle.preprocess.geometry(photo.size),
            image=photo if photo.width * photo.height <= max_pixels else None,
            pixels=self.bundle.preprocess.to_uint8(photo),
        )

    def _explain_batch(self, results: Sequence[ImageResult], token_bytes: int) -> None:
        """Each thread of a CPU explains a part of the batch; a GPU one part after the other where
        its memory doesn't hold the whole."""
        if self.options.sanity_checks and self._group_size is None:
            # before the batch is divided, so that it doesn't depend on the number of threads
            self._group_size = self._choose_group_size(results[:RELIABILITY_IMAGES])
        part_size = -(-len(results) // self._threads.count)

        def explain_part(start: int) -> None:
            model = self._models[start // part_size]
            self._explain_part(results[start : start + part_size], model, token_bytes)

        starts = range(0, len(results), part_size)
        if self.device.type != "cpu":
            self._part_size = run_in_memory(
                lambda first, end: self._explain_part(
                    results[first:end], self.bundle.model, token_bytes
                ),
                0,
                len(results),
                part_size=self._part_size,
                device=self.device,
            )
        elif len(starts) == 1:
            explain_part(0)
        else:
            list(self._threads.map(explain_part, starts))
        # checking the capture waits for the device: the first batch is enough
        self._is_verified = True
        _set_scales(results, self.options.scale)

    @torch.inference_mode(False)  # each thread has modes of its own
    def _explain_part(
        self, results: Sequence[ImageResult], model: nn.Module, token_bytes: int
    ) -> None:
        """Add to each image its maps, what the model answered and the details of its tokens."""
        bundle = self.bundle
        options = self.options
        images = self._normalize(results)
        with autocast(self.device, self._precision):
            forward, targets, maps = compute_maps(
                model,
                images,
                methods=options.methods,
                choose_targets=self._choose_targets,
                target=self._target,
                options=options.map_options,
                keep_graph=bool(options.sanity_checks),
                block_tokens=token_bytes > 0,
                verify=not self._is_verified,
            )
            checks: list[list[MapChecks]] = [[] for _ in maps]
            if options.sanity_checks:
                # what is no class's is the same of every column
                predicted_first = self._target.name is not None or starts_with_predicted(
                    options.target, bundle.class_names
                )
                checks = check_maps(
                    forward,
                    targets,
                    maps,
                    predicted_first=predicted_first,
                    group_size=self._group_size,
                )
        logits = forward.logits.detach()
        probabilities = compute_probabilities(logits.float() / bundle.temperature, self._kind)
        scores = torch.stack(
            [self._target.score(logits, column) for column in targets.unbind(dim=1)], dim=1
        )
        tokens = []
        if token_bytes:
            # Libra's gradients would say something else than the model's own
            has_own_gradients = any(
                method.class_specific and (method.uses_removal or not method.libra)
                for method in find_methods(options.methods)
            )
            effects = None
            if options.sanity_checks or has_own_gradients:
                effects = compute_head_effects(
                    forward, self._target.score(forward.logits, targets[:, 0])
                )
            tokens = [
                measure_tokens(
                    forward,
                    row,
                    targets=targets[row, : self._num_classes_explained],
                    temperature=bundle.temperature,
                    kind=self._kind,
                    max_bytes=token_bytes,
                    head_effects=None if effects is None else effects[row],
                    options=options.map_options,
                )
                for row in range(len(results))
            ]

        # the only copy from the device, and the only time that the host waits for it
        logits, probabilities, scores, targets, maps, checks, tokens = copy_to_host(
            (logits, probabilities, scores, targets, maps, checks, tokens)
        )
        for result, image_logits in zip(results, logits, strict=True):
            if not image_logits.isfinite().all():
                raise ValueError(
                    f"{bundle.name} gives logits that are not finite (NaN or infinite) for "
                    f"{result.item.name}, so there is nothing to explain"
                )
        for row, result in enumerate(results):
            result.probabilities = probabilities[row].numpy()
            result.targets = tuple(targets[row, : self._num_classes_explained].tolist())
            if self._target.name is not None:
                result.output = f"{self._target.name} = {scores[row, 0].item():.4g}"
            if tokens:
                result.tokens = tokens[row]
        for method_maps, method_checks in zip(maps, checks, strict=True):
            checks_by_class = [class_checks.to_list() for class_checks in method_checks]
            self._add_maps(results, method_maps, scores, checks_by_class)

    @property
    def _num_classes_explained(self) -> int | None:
        """None: all of the targets; 0 where what is explained is of no class."""
        return None if self._target.name is None else 0

    def _normalize(self, results: Sequence[ImageResult]) -> Images:
        """The images as the model takes them, on its device."""
        pixels = np.stack([result.pixels for result in results if result.pixels is not None])
        batch = copy_to_device(torch.from_numpy(pixels), self.device)
        return self.bundle.preprocess.normalize(batch)

    @torch.inference_mode(False)
    def _choose_group_size(self, results: Sequence[ImageResult]) -> GroupSize:
        with autocast(self.device, self._precision):
            forward = run_classifier(
                self.bundle.model, self._normalize(results), verify=not self._is_verified
            )
            forward.target = self._target
            group_size = choose_group_size(forward)
        self._is_verified = True
        return group_size

    def _add_maps(
        self,
        results: Sequence[ImageResult],
        maps: Maps,
        scores: Tensor,
        checks_by_class: list[list[SanityCheck]],
    ) -> None:
        """Give each image the map of each class."""
        method = maps.method
        for row, result in enumerate(results):
            for column, values in enumerate(maps.values[row].numpy()):
                map_result = MapResult(
                    method=method,
                    key=f"{result.item.name}.{method.name}",
                    values=values,
                    prefix_mass=float(maps.prefix_mass[row, column]),
                    entropy=float(maps.entropy[row, column]),
                )
                if maps.sinks is not None:
                    map_result.sinks = _list_sinks(
                        maps.sinks[row], values, start_layer=self.options.map_options.start_layer
                    )
                if checks_by_class:
                    map_result.sanity_check = checks_by_class[column][row]
                if method.class_specific:
                    map_result.score = scores[row, column].item()
                    map_result.target_name = self._target.name
                    if map_result.target_name is None:
                        map_result.target = result.targets[column]
                        map_result.target_name = self.bundle.class_names[map_result.target]
                    # files of several classes of one image need the class in their names
                    if self.options.target != "auto":
                        map_result.key += f".{clean_name(map_result.target_name)}"
                result.maps.append(map_result)


def _check_target(options: ExplainOptions, methods: Sequence[Method]) -> None:
    """Refuse a class where no method's maps depend on it."""
    if options.target == "auto" or any(method.class_specific for method in methods):
        return
    names = " and ".join(method.name for method in methods)
    text = f"{names}: the same map for every class, so --class {options.target} changes nothing"
    hint = "leave it out, or choose a method whose maps depend on it, such as libra-removal"
    raise ValueError(f"{text}; {hint}")


def _list_sinks(
    sinks: Bool[Tensor, "layers rows columns"], values: PatchMap, *, start_layer: int
) -> tuple[Sink, ...]:
    """The patches that are sinks of any layer, those that hold most of the map first."""
    patches = sinks.any(dim=0).nonzero().tolist()
    patches.sort(key=lambda patch: -float(values[patch[0], patch[1]]))
    return tuple(
        Sink(row, column, tuple((start_layer + sinks[:, row, column].nonzero()[:, 0]).tolist()))
        for row, column in patches
    )


def _set_scales(results: Sequence[ImageResult], scale: str) -> None:
    """Give each map its colour scale."""
    maps = [map_result for result in results for map_result in result.maps]
    for map_result in maps:
        signed = map_result.method.signed
        # on the fixed scale, maps of different images and batches compare
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
