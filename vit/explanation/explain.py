"""Images in, explained images out, a batch at a time: threads decode ahead while the model works."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float, Int
from PIL import Image
from torch import Tensor

from vit.data.images import Geometry
from vit.explanation.capture.readout import Forward
from vit.explanation.faithfulness.sanity_checks import MapJudge, Trust
from vit.explanation.items import ImageItem, clean_name
from vit.explanation.methods.table import (
    Explainable,
    MapOptions,
    Maps,
    Method,
    explain_forward,
    find_methods,
    run_methods_forward,
)
from vit.explanation.methods.targets import build_target_chooser
from vit.explanation.render.overlay import FIXED_SHARES, SCALES, ColourScale, find_range
from vit.explanation.render.patch_attention import PatchRows, collect_rows

Decoded = tuple[ImageItem, Image.Image, str]


@dataclass(frozen=True)
class Settings:
    """How images are explained."""

    methods: tuple[str, ...] = ("rollout",)
    maps: MapOptions = field(default_factory=MapOptions)
    classes: str = "auto"  # see `build_target_chooser`
    scale: str = "image"  # of the colours: image, batch or fixed
    trust: bool = True  # report with every map
    batch_size: int = 16
    precision: str = "float32"

    def __post_init__(self) -> None:
        find_methods(self.methods)
        if self.scale not in SCALES:
            raise ValueError(f"unknown scale {self.scale!r}; known: {', '.join(SCALES)}")


def choose_batch_size(image_size: tuple[int, int]) -> int:
    """Few tokens keep two cores busy only in larger batches: 64 images of 65 tokens are explained 1.1 × (float32) to
    1.4 × (bfloat16) as fast as 16 on a 2-core Zen 5."""
    return 64 if max(image_size) <= 64 else 16


@dataclass
class ExplainedMap:
    """One map of one image; `values` [rows, columns], or [layers, heads, rows, columns] of a sheet."""

    method: Method
    target: int | None  # the class it is about; None for a method that knows no class
    logit: float | None  # of that class: some methods' maps grow with it
    key: str  # its name in the arrays, and of its overlay without the suffix
    values: Float[np.ndarray, "*shape"]
    prefix_mass: float  # means, of a sheet
    entropy: float
    trust: Trust | None
    scale: ColourScale | None = None


@dataclass
class ExplainedImage:
    """An image with all that was found about it."""

    item: ImageItem
    image: Image.Image
    sha256: str
    geometry: Geometry
    grid: tuple[int, int]
    probabilities: Float[np.ndarray, " C"]
    maps: list[ExplainedMap]
    rows: list[PatchRows]  # only where asked for

    @property
    def predicted(self) -> int:
        return int(self.probabilities.argmax())


def explain_items(
    bundle: Explainable,
    items: Sequence[ImageItem],
    settings: Settings,
    *,
    pool: Executor,
    on_unreadable: Callable[[ImageItem, str], None],
    row_budget: int = 0,
) -> Iterator[list[ExplainedImage]]:
    """Explain `items` batch by batch. `row_budget`: bytes an image for what each patch attends to; 0 for
    none."""
    judge = MapJudge(bundle.model) if settings.trust else None
    size = settings.batch_size
    batches = [items[start : start + size] for start in range(0, len(items), size)]
    coming = _submit_reads(pool, batches[0]) if batches else []
    for number, batch in enumerate(batches):
        decoded = list(_collect(batch, coming, on_unreadable))
        coming = _submit_reads(pool, batches[number + 1]) if number + 1 < len(batches) else []
        yield _explain_batch(bundle, decoded, settings, judge, row_budget) if decoded else []


def _explain_batch(
    bundle: Explainable,
    decoded: Sequence[Decoded],
    settings: Settings,
    judge: MapJudge | None,
    row_budget: int,
) -> list[ExplainedImage]:
    device = next(bundle.model.parameters()).device
    images = bundle.preprocess([image for _, image, _ in decoded]).to(device)
    methods = find_methods(settings.methods)
    with torch.autocast(
        device.type, getattr(torch, settings.precision), enabled=settings.precision != "float32"
    ):
        forward = run_methods_forward(bundle.model, images, methods)
        choose = build_target_chooser(settings.classes, bundle.class_names)
        targets, maps = explain_forward(forward, methods, choose_targets=choose, options=settings.maps)
        logits = forward.logits.detach().float()
        trust = _judge(judge, images, logits, targets, maps, settings)
    explained = []
    for row, (item, image, sha256) in enumerate(decoded):
        explained.append(
            ExplainedImage(
                item=item,
                image=image,
                sha256=sha256,
                geometry=bundle.preprocess.geometry(image.size),
                grid=forward.grid,
                probabilities=_probabilities(bundle, logits[row]),
                maps=[
                    found
                    for of_method, reports in zip(maps, trust, strict=True)
                    for found in _split_maps(
                        of_method,
                        row,
                        item.name,
                        forward,
                        targets[row],
                        logits[row],
                        reports,
                        bundle,
                        settings,
                    )
                ],
                rows=collect_rows(forward, row, budget=row_budget) if row_budget else [],
            )
        )
    _set_scales(explained, settings.scale)
    return explained


def _probabilities(bundle: Explainable, logits: Float[Tensor, " C"]) -> Float[np.ndarray, " C"]:
    temperature = getattr(bundle, "temperature", 1.0)
    probabilities: np.ndarray = (logits / temperature).softmax(dim=0).cpu().numpy()
    return probabilities


def _judge(
    judge: MapJudge | None,
    images: Tensor,
    logits: Tensor,
    targets: Tensor,
    maps: Sequence[Maps],
    settings: Settings,
) -> list[list[list[Trust]] | None]:
    """Reports by method; None for a sheet, whose pictures are no explanation of a class."""
    judged = [of_method for of_method in maps if not _is_sheet(of_method)]
    if judge is None or not judged:
        return [None] * len(maps)
    reports = iter(judge.judge(images, logits, targets, judged, settings.maps))
    return [None if _is_sheet(of_method) else next(reports) for of_method in maps]


def _is_sheet(maps: Maps) -> bool:
    return not maps.method.class_specific and maps.values.shape[1] > 1


def _split_maps(
    maps: Maps,
    row: int,
    name: str,
    forward: Forward,
    targets: Int[Tensor, " T"],
    logits: Float[Tensor, " C"],
    reports: list[list[Trust]] | None,
    bundle: Explainable,
    settings: Settings,
) -> Iterator[ExplainedMap]:
    """The maps of one image: one for each class, or a sheet as one."""
    method, values = maps.method, maps.values[row].cpu().numpy()
    key = f"{name}.{method.name}"
    if _is_sheet(maps):
        layers = len(forward.record.layers) if settings.maps.layer is None else 1
        sheet = values.reshape(layers, -1, *forward.grid)
        prefix_mass, entropy = float(maps.prefix_mass[row].mean()), float(maps.entropy[row].mean())
        yield ExplainedMap(method, None, None, key, sheet, prefix_mass, entropy, None)
        return
    for column in range(len(values)):
        target = int(targets[column]) if method.class_specific else None
        if target is not None and settings.classes != "auto":
            key = f"{name}.{method.name}.{clean_name(bundle.class_names[target])}"
        yield ExplainedMap(
            method=method,
            target=target,
            logit=None if target is None else float(logits[target]),
            key=key,
            values=values[column],
            prefix_mass=float(maps.prefix_mass[row, column]),
            entropy=float(maps.entropy[row, column]),
            trust=None if reports is None else reports[row][column],
        )


def _set_scales(explained: Sequence[ExplainedImage], scale: str) -> None:
    """Give each map its colour scale."""
    everything = [found for of_image in explained for found in of_image.maps]
    for found in everything:
        signed = found.method.signed
        if scale == "fixed" and found.values.ndim == 2:
            low = -FIXED_SHARES if signed else 0.0
            found.scale = ColourScale(low, FIXED_SHARES, signed, "× even share, fixed scale")
            continue
        together = (
            [other for other in everything if other.method is found.method] if scale == "batch" else [found]
        )
        low, high = find_range([other.values for other in together], signed=signed)
        label = f"scale of {len(explained)} images" if scale == "batch" else "scale of this image"
        found.scale = ColourScale(low, high, signed, label)


def _submit_reads(pool: Executor, batch: Sequence[ImageItem]) -> list[Future[tuple[Image.Image, str]]]:
    return [pool.submit(item.read) for item in batch]


def _collect(
    batch: Sequence[ImageItem],
    futures: Sequence[Future[tuple[Image.Image, str]]],
    on_unreadable: Callable[[ImageItem, str], None],
) -> Iterator[Decoded]:
    for item, future in zip(batch, futures, strict=True):
        try:
            image, sha256 = future.result()
        except (ValueError, OSError) as error:
            on_unreadable(item, " ".join(str(error).split()))
        else:
            yield item, image, sha256
