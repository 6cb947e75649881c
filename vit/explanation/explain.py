"""Images in, explained images out, a batch at a time: threads decode ahead while the model works."""

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from vit.bundle import Bundle
from vit.data.images import keep_pixels
from vit.data.inputs import ImageInputs
from vit.explanation.capture.capture import find_attention_layers
from vit.explanation.capture.readout import Forward
from vit.explanation.explanations import Explanation, Explanations
from vit.explanation.faithfulness.sanity_checks import SanityCheck, judge_maps, measure_maps
from vit.explanation.items import ImageItem, clean_name, items_from_images
from vit.explanation.methods.table import MapOptions, Maps, check_options, compute_maps
from vit.explanation.methods.targets import asks_for_predicted, build_target_chooser
from vit.explanation.render.explained import ExplainedImage, ExplainedMap, Settings
from vit.explanation.render.overlay import FIXED_END, ColourScale, find_range
from vit.explanation.render.token_details import MeasuredTokens, measure_tokens
from vit.model.vision_transformer import VisionTransformer
from vit.runtime.device import autocast, choose_precision, copy_to_device, copy_to_host
from vit.runtime.progress import show_progress
from vit.runtime.threads import BatchThreads


class _Decoded(NamedTuple):
    item: ImageItem
    pixels: np.ndarray  # [H, W, 3], as the model sees them
    size: tuple[int, int]  # of the image
    image: Image.Image | None
    sha256: str


def fit_settings(bundle: Bundle, settings: Settings) -> Settings:
    """`settings` with the batch size and precision that fit the model. Raises ValueError for a class, layer or option
    that the model does not have."""
    build_target_chooser(settings.target, bundle.class_names)
    check_options(settings.options, find_attention_layers(bundle.model))
    size = settings.batch_size or choose_batch_size(bundle.preprocess.image_size)
    precision = choose_precision(settings.precision, next(bundle.model.parameters()).device)
    return replace(settings, batch_size=size, precision=precision)


def explain_items(bundle: Bundle, items: Sequence[ImageItem], settings: Settings) -> Explanations:
    """Explain images one batch after another. Raises ValueError where none can be read; warns of those that cannot."""
    found = collect_explanations(bundle, items, settings)
    if not items:
        raise ValueError("there are no images to explain")
    if not found.images:
        raise ValueError(f"none of the {len(items)} images could be read: {found.unreadable[0][1]}")
    if found.unreadable:
        reason = found.unreadable[0][1]
        warnings.warn(f"{len(found.unreadable)} images are left out; the first: {reason}", stacklevel=2)
    return found


@torch.inference_mode(False)  # copies of the model made in it could not be differentiated
def collect_explanations(
    bundle: Bundle,
    items: Sequence[ImageItem],
    settings: Settings,
    *,
    observers: Sequence[Callable[[list[ExplainedImage]], object]] = (),
    on_unreadable: Callable[[str, str], object] = lambda path, reason: None,
    token_bytes: int = 0,
) -> Explanations:
    """Explain `items` and call `observers` with each batch. Pixels and the details of tokens (of at most
    `token_bytes` an image) go to the observers alone: of many images they don't fit into memory."""
    found, size = Explanations(bundle, settings, [], []), settings.batch_size
    explainer = _Explainer(bundle, settings, token_bytes)
    batches = [items[start : start + size] for start in range(0, len(items), size)]

    def read(item: ImageItem) -> _Decoded:
        with item.open() as (image, sha256):
            # of images that are many and large the pixels are given back, and decoded again where they are drawn
            return _Decoded(item, bundle.preprocess.to_uint8(image), image.size, keep_pixels(image), sha256)

    def decode(batch: Sequence[ImageItem], reads: Sequence[Future[_Decoded]]) -> Iterator[_Decoded]:
        for item, reading in zip(batch, reads, strict=True):
            try:
                yield reading.result()
            except (ValueError, OSError) as error:
                found.unreadable.append((item.path, " ".join(str(error).split())))
                on_unreadable(*found.unreadable[-1])

    with ThreadPoolExecutor() as pool, show_progress("explaining", len(items)) as advance:
        coming = [pool.submit(read, item) for item in items[:size]]
        for batch, following in zip(batches, [*batches[1:], []], strict=False):
            decoded = list(decode(batch, coming))
            coming = [pool.submit(read, item) for item in following]
            explained = explainer(decoded) if decoded else []
            for observe in observers:
                observe(explained)
            found.images += [replace(of_image, image=None, tokens=None) for of_image in explained]
            advance(len(batch))
    return found


def explain_images(
    bundle: Bundle,
    images: ImageInputs,
    method: str = "rollout",
    *,
    target: int | str = "auto",
    options: MapOptions | None = None,
    batch_size: int = 32,
) -> Explanation:
    """Explain images of any kind (`vit.data.inputs`) with one method: with tensors as the result."""
    options = options or MapOptions()
    settings = Settings((method,), options, target, sanity_checks=False, batch_size=batch_size)
    found = explain_items(bundle, items_from_images(images), fit_settings(bundle, settings))
    mass, entropy = (
        torch.tensor([[getattr(m, name) for m in of_image.maps] for of_image in found.images])
        for name in ("prefix_mass", "entropy")
    )
    if mass.shape[1] == 1:
        mass, entropy = mass[:, 0], entropy[:, 0]
    return Explanation(method, found.maps[method], found.targets, found.probabilities, mass, entropy)


def choose_batch_size(image_size: tuple[int, int]) -> int:
    """Few tokens keep two cores busy only in larger batches: 64 images of 65 tokens are explained 1.1 × (float32) to
    1.4 × (bfloat16) as fast as 16 on a 2-core Zen 5."""
    return 64 if max(image_size) <= 64 else 16


class _Explainer:
    """From decoded images to explained ones. On a CPU each of several threads explains a part of the batch, with a copy
    of the model of its own: what hooks record is of one pass."""

    def __init__(self, bundle: Bundle, settings: Settings, token_bytes: int) -> None:
        self.bundle, self.settings, self.token_bytes = bundle, settings, token_bytes
        self.device = next(bundle.model.parameters()).device
        self.choose_targets = build_target_chooser(settings.target, bundle.class_names)
        self.predicted_first = asks_for_predicted(settings.target, bundle.class_names)
        self.is_first = True
        self.num_layers = len(find_attention_layers(bundle.model))
        divides = self.device.type == "cpu" and isinstance(bundle.model, VisionTransformer)
        self.threads = BatchThreads(None if divides else 1)
        self.models = [bundle.model, *(_share_weights(bundle.model) for _ in range(self.threads.count - 1))]

    def __call__(self, decoded: Sequence[_Decoded]) -> list[ExplainedImage]:
        size = -(-len(decoded) // self.threads.count)
        parts = [decoded[start : start + size] for start in range(0, len(decoded), size)]
        if len(parts) == 1:
            explained = self._explain(decoded, self.bundle.model)
        else:
            of_parts = self.threads.map(lambda both: self._explain(*both), list(zip(parts, self.models, strict=False)))
            explained = [of_image for of_part in of_parts for of_image in of_part]
        self.is_first = False
        _set_scales(explained, self.settings.scale)
        return explained

    @torch.inference_mode(False)  # each thread has modes of its own
    def _explain(self, decoded: Sequence[_Decoded], model: nn.Module) -> list[ExplainedImage]:
        bundle, settings = self.bundle, self.settings
        pixels = {"pixels": torch.from_numpy(np.stack([each.pixels for each in decoded]))}
        images = bundle.preprocess.normalize(copy_to_device(pixels, self.device)["pixels"])
        with autocast(self.device, choose_precision(settings.precision, self.device)):
            forward, targets, maps = compute_maps(
                model,
                images,
                methods=settings.methods,
                choose_targets=self.choose_targets,
                options=settings.options,
                keep_graph=settings.sanity_checks,
                block_tokens=self.token_bytes > 0,
                verify=self.is_first,
            )
            logits = forward.logits.detach()
            checked = [of_method for of_method in maps if not of_method.is_sheet] if settings.sanity_checks else []
            measured = measure_maps(forward, targets, checked, predicted_first=self.predicted_first)
        probabilities = (logits.float() / bundle.temperature).softmax(dim=1)
        tokens = self._measure_tokens(forward, targets)
        found = [(of_method.values, of_method.prefix_mass, of_method.entropy) for of_method in maps]
        of_images, found, measured, tokens = copy_to_host(((logits, probabilities, targets), found, measured, tokens))
        explained = [
            ExplainedImage(
                item=each.item,
                size=each.size,
                sha256=each.sha256,
                geometry=bundle.preprocess.geometry(each.size),
                input_size=bundle.preprocess.image_size[::-1],
                grid=forward.grid,
                probabilities=of_images[1][row].numpy(),
                targets=tuple(of_images[2][row].tolist()),
                maps=[],
                tokens=tokens[row].finish() if tokens else None,
                image=each.image,
            )
            for row, each in enumerate(decoded)
        ]
        checks = iter(judge_maps(measured))
        for of_method, tensors in zip(maps, found, strict=True):
            on_host = Maps(of_method.method, *tensors)
            self._add_maps(explained, on_host, of_images[0], None if on_host.is_sheet else next(checks, None))
        return explained

    def _measure_tokens(self, forward: Forward, targets: Tensor) -> list[MeasuredTokens]:
        options: dict[str, Any] = {"temperature": self.bundle.temperature, "budget": self.token_bytes}
        rows = enumerate(targets) if self.token_bytes else ()
        return [measure_tokens(forward, row, targets=classes, **options) for row, classes in rows]

    def _add_maps(
        self, explained: Sequence[ExplainedImage], maps: Maps, logits: Tensor, checks: list[list[SanityCheck]] | None
    ) -> None:
        """Give each image its map of each class, or all layers and heads as one map; all is on the host."""
        method, single = maps.method, self.settings.options.layer is not None
        for row, of_image in enumerate(explained):
            values, mass, entropy = maps.values[row].numpy(), maps.prefix_mass[row], maps.entropy[row]
            key = f"{of_image.item.name}.{method.name}"
            if maps.is_sheet:
                sheet = values.reshape(1 if single else self.num_layers, -1, *of_image.grid)
                of_image.maps.append(ExplainedMap(method, key, sheet, float(mass.mean()), float(entropy.mean())))
                continue
            for column, of_class in enumerate(values):
                found = ExplainedMap(method, key, of_class, float(mass[column]), float(entropy[column]))
                found.sanity_check = None if checks is None else checks[row][column]
                if method.class_specific:
                    found.target = of_image.targets[column]
                    found.logit = logits[row, found.target].item()
                    if self.settings.target != "auto":
                        found.key += f".{clean_name(self.bundle.class_names[found.target])}"
                of_image.maps.append(found)


def _share_weights(model: nn.Module) -> nn.Module:
    """A copy of the model whose parameters lie in the same memory."""
    shared = {id(p): nn.Parameter(p.detach(), requires_grad=p.requires_grad) for p in model.parameters()}
    return copy.deepcopy(model, dict(shared))


def _set_scales(explained: Sequence[ExplainedImage], scale: str) -> None:
    """Give each map its colour scale."""
    everything = [found for of_image in explained for found in of_image.maps]
    for found in everything:
        signed = found.method.signed
        if scale == "fixed" and found.values.ndim == 2:
            low, label = -FIXED_END if signed else 0.0, "× uniform, fixed scale"
            found.scale = ColourScale(low, FIXED_END, signed, label, relative=True)
            continue
        together = [m for m in everything if m.method is found.method] if scale == "batch" else [found]
        low, high = find_range([other.values for other in together], signed=signed)
        label = f"scale of {len(explained)} images" if scale == "batch" else "scale of this image"
        found.scale = ColourScale(low, high, signed, label)
