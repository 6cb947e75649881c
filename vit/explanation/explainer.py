"""The loop behind `vit attention` and `vit.explain`: images in, maps out, a batch at a time."""

import copy
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from vit.bundle import Bundle
from vit.data.images import ImageInputs, list_images
from vit.explanation.capture.layers import find_attention_layers
from vit.explanation.faithfulness.sanity_checks import SanityCheck, check_maps
from vit.explanation.items import ImageItem, clean_name, items_from_images
from vit.explanation.methods.registry import Maps, check_options, compute_maps, find_methods
from vit.explanation.methods.targets import build_target_chooser, starts_with_predicted
from vit.explanation.records import Explanations, ImageResult, MapResult
from vit.explanation.render.overlay import FIXED_END, SCALES, ColourScale, fit_scale
from vit.explanation.render.token_details import measure_tokens
from vit.model.vision_transformer import VisionTransformer
from vit.options import ExplainOptions, MapOptions
from vit.runtime.arguments import check_choice
from vit.runtime.device import autocast, choose_precision, copy_to_device, copy_to_host
from vit.runtime.progress import show_progress
from vit.runtime.threads import BatchThreads

_MAX_KEPT_PIXELS = 100_000_000  # of all images that wait to be explained and drawn


def explain_images(
    bundle: Bundle,
    images: ImageInputs,
    method: str = "rollout",
    *,
    target: int | str = "auto",
    options: MapOptions | None = None,
    batch_size: int = 32,
) -> Explanations:
    """Explain images with one method, without sanity checks.

    Args:
        bundle: the model, with its class names and preprocessing.
        images: paths, folders, PIL images, uint8 arrays [H, W, 3], or one of them.
        method: a name of `vit.explanation.methods.registry.METHODS`.
        target: the classes to explain: "auto" (the predicted one), a class's name or index, "all"
            or "top3".
        options: of the method.
        batch_size: images that are explained together.

    Returns:
        The explanations: `.maps[method]` is [images, rows, columns].

    Raises:
        ValueError: for an unknown method, option or class, and where no image can be read.
    """
    explain_options = ExplainOptions(
        methods=(method,),
        target=target,
        sanity_checks=False,
        batch_size=batch_size,
        map_options=options or MapOptions(),
    )
    return Explainer(bundle, explain_options).explain(items_from_images(list_images(images)))


def choose_explain_batch_size(image_size: tuple[int, int]) -> int:
    """Few tokens keep two cores busy only in larger batches: 64 images of 65 tokens are explained
    1.1 × (float32) to 1.4 × (bfloat16) as fast as 16 on a 2-core Zen 5."""
    return 64 if max(image_size) <= 64 else 16


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
            not have, and for a model whose attention can't be read.
    """

    # copies of the model that are made in inference mode could not be differentiated
    @torch.inference_mode(False)
    def __init__(self, bundle: Bundle, options: ExplainOptions) -> None:
        # whatever can be wrong is said before any image is read
        find_methods(options.methods)
        check_choice(options.scale, SCALES, name="scale")
        layers = find_attention_layers(bundle.model)
        check_options(options.map_options, layers)
        self.bundle = bundle
        self.device = next(bundle.model.parameters()).device
        self._precision = choose_precision(options.precision, self.device)
        self._batch_size = options.batch_size or choose_explain_batch_size(
            bundle.preprocess.image_size
        )
        self.options = replace(
            options,
            batch_size=self._batch_size,
            precision=self._precision,
        )
        self._num_layers = len(layers) if options.map_options.layer == "all" else 1
        self._choose_targets = build_target_chooser(options.target, bundle.class_names)
        self._is_verified = False

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
        # large images are decoded again where they are drawn: two batches of them at once may not
        # fit into memory
        max_pixels = _MAX_KEPT_PIXELS // max(min(2 * self._batch_size, len(items)), 1)

        with ThreadPoolExecutor() as pool, show_progress("explaining", len(items)) as advance:

            def decode_ahead(start: int) -> list[Future[tuple[ImageResult, np.ndarray]]]:
                batch = items[start : start + self._batch_size]
                return [pool.submit(self._decode, item, max_pixels) for item in batch]

            decoding = decode_ahead(0)
            for start in range(0, len(items), self._batch_size):
                images = []
                pixels = []
                # a file that can't be read is named, and the others are explained
                for item, future in zip(items[start:], decoding, strict=False):
                    try:
                        image, image_pixels = future.result()
                    except (ValueError, OSError) as error:
                        unreadable.append((item.path, " ".join(str(error).split())))
                    else:
                        images.append(image)
                        pixels.append(image_pixels)
                num_items = len(decoding)
                decoding = decode_ahead(start + self._batch_size)

                if images:
                    self._explain_batch(images, pixels, token_bytes())
                    for observe in observers:
                        observe(images)
                    # what was observed needs its pixels no more
                    explanations.images += [
                        replace(image, image=None, tokens=None) for image in images
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

    def _decode(self, item: ImageItem, max_pixels: int) -> tuple[ImageResult, np.ndarray]:
        """An image, and its pixels as the model sees them, uint8 [H, W, 3]."""
        photo, sha256 = item.read()
        preprocess = self.bundle.preprocess
        image = ImageResult(
            item=item,
            size=photo.size,
            sha256=sha256,
            geometry=preprocess.geometry(photo.size),
            input_size=preprocess.image_size[::-1],
            image=photo if photo.width * photo.height <= max_pixels else None,
        )
        return image, preprocess.to_uint8(photo)

    def _explain_batch(
        self, images: Sequence[ImageResult], pixels: Sequence[np.ndarray], token_bytes: int
    ) -> None:
        """Each thread explains a part of the batch."""
        part_size = -(-len(images) // self._threads.count)

        def explain_part(start: int) -> None:
            part = slice(start, start + part_size)
            model = self._models[start // part_size]
            self._explain_part(images[part], pixels[part], model, token_bytes)

        starts = range(0, len(images), part_size)
        if len(starts) == 1:
            explain_part(0)
        else:
            list(self._threads.map(explain_part, starts))
        # checking the capture waits for the device: the first batch is enough
        self._is_verified = True
        _set_scales(images, self.options.scale)

    @torch.inference_mode(False)  # each thread has modes of its own
    def _explain_part(
        self,
        images: Sequence[ImageResult],
        pixels: Sequence[np.ndarray],
        model: nn.Module,
        token_bytes: int,
    ) -> None:
        """Add to each image its maps, what the model answered and the details of its tokens."""
        bundle = self.bundle
        options = self.options
        batch = copy_to_device(torch.from_numpy(np.stack(pixels)), self.device)
        with autocast(self.device, self._precision):
            forward, targets, maps = compute_maps(
                model,
                bundle.preprocess.normalize(batch),
                methods=options.methods,
                choose_targets=self._choose_targets,
                options=options.map_options,
                keep_graph=bool(options.sanity_checks),
                block_tokens=token_bytes > 0,
                verify=not self._is_verified,
            )
            # layers and heads of a contact sheet are not explanations, so there is nothing to check
            checked_maps = [method_maps for method_maps in maps if not method_maps.is_grid]
            measured_checks = check_maps(
                forward,
                targets,
                checked_maps if options.sanity_checks else [],
                predicted_first=starts_with_predicted(options.target, bundle.class_names),
            )
        logits = forward.logits.detach()
        probabilities = (logits.float() / bundle.temperature).softmax(dim=1)
        tokens = []
        if token_bytes:
            tokens = [
                measure_tokens(
                    forward,
                    row,
                    targets=targets[row],
                    temperature=bundle.temperature,
                    max_bytes=token_bytes,
                )
                for row in range(len(images))
            ]

        # the only copy from the device, and the only time that the host waits for it
        logits, probabilities, targets, maps, measured_checks, tokens = copy_to_host(
            (logits, probabilities, targets, maps, measured_checks, tokens)
        )
        for row, image in enumerate(images):
            image.probabilities = probabilities[row].numpy()
            image.targets = tuple(targets[row].tolist())
            if tokens:
                image.tokens = tokens[row]

        # checks are in the order of the methods that are checked
        checks = iter(measured_checks)
        for method_maps in maps:
            method_checks = [] if method_maps.is_grid else next(checks, [])
            checks_by_class = [check.to_list() for check in method_checks]
            self._add_maps(images, method_maps, logits, checks_by_class)

    def _add_maps(
        self,
        images: Sequence[ImageResult],
        maps: Maps,
        logits: Tensor,
        checks_by_class: list[list[SanityCheck]],
    ) -> None:
        """Give each image its map of each class, or its layers and heads as one map."""
        method = maps.method
        for row, image in enumerate(images):
            key = f"{image.item.name}.{method.name}"
            values = maps.values[row].numpy()
            prefix_mass = maps.prefix_mass[row]
            entropy = maps.entropy[row]
            if maps.is_grid:  # [layers · heads, rows, columns]
                sheet = values.reshape(self._num_layers, -1, *values.shape[1:])
                means = (float(prefix_mass.mean()), float(entropy.mean()))
                image.maps.append(MapResult(method, key, sheet, *means))
                continue

            for column, class_values in enumerate(values):
                result = MapResult(
                    method, key, class_values, float(prefix_mass[column]), float(entropy[column])
                )
                if checks_by_class:
                    result.sanity_check = checks_by_class[column][row]
                if method.class_specific:
                    result.target = image.targets[column]
                    result.logit = logits[row, result.target].item()
                    # files of several classes of one image need the class in their names
                    if self.options.target != "auto":
                        class_name = self.bundle.class_names[result.target]
                        result.key += f".{clean_name(class_name)}"
                image.maps.append(result)


def _set_scales(images: Sequence[ImageResult], scale: str) -> None:
    """Give each map its colour scale."""
    results = [result for image in images for result in image.maps]
    for result in results:
        signed = result.method.signed
        # on the fixed scale, maps of different images and batches compare; a contact sheet has no
        # uniform map to be a multiple of
        if scale == "fixed" and not result.is_grid:
            low = -FIXED_END if signed else 0.0
            result.scale = ColourScale(
                low, FIXED_END, signed, "× uniform, fixed scale", relative=True
            )
        elif scale == "batch":
            compared = [other.values for other in results if other.method is result.method]
            result.scale = fit_scale(
                compared, signed=signed, label=f"scale of {len(images)} images"
            )
        else:
            result.scale = fit_scale([result.values], signed=signed)
