"""Top-1 accuracy on corrupted, shifted and rotated images."""

from collections.abc import Callable, Sequence
from functools import partial

from vit.evaluation.corruptions import CORRUPTIONS, ROTATIONS, SEVERITIES, SHIFTS, corrupt_batch, rotate, shift
from vit.evaluation.evaluated_images import Images
from vit.evaluation.predictor import Pixels, Predictor
from vit.runtime.processes import current_process
from vit.runtime.progress import show_progress

Sweep = list[tuple[float, float]]  # (amount, top-1)


def measure_corruptions(predictor: Predictor, images: Images) -> dict[str, list[float]]:
    """Top-1 at severities 1 to 5 of each of the fifteen corruptions: 75 passes over the images."""

    def change(name: str, severity: int, start: int, stop: int) -> Pixels:
        digests = images.dataset.digests[start:stop].tolist()
        return corrupt_batch(images.read(start, stop), name=name, severity=severity, digests=digests)

    changes = [partial(change, name, severity) for name in CORRUPTIONS for severity in SEVERITIES]
    top1 = iter(_measure_top1(predictor, images, changes, title="corruptions"))
    return {name: [next(top1) for _ in SEVERITIES] for name in CORRUPTIONS}


def measure_shifts(predictor: Predictor, images: Images) -> dict[str, Sweep]:
    """Top-1 of images moved right and down by fractions of their side."""
    changes = [partial(_change, images, shift, axis=axis, fraction=x) for axis in (1, 0) for x in SHIFTS]
    top1 = iter(_measure_top1(predictor, images, changes, title="shifts"))
    return {name: [(fraction, next(top1)) for fraction in SHIFTS] for name in ("shift_right", "shift_down")}


def measure_rotations(predictor: Predictor, images: Images) -> dict[str, Sweep]:
    """Top-1 of images turned anticlockwise by degrees."""
    changes = [partial(_change, images, rotate, degrees=degrees) for degrees in ROTATIONS]
    return {"rotate": list(zip(ROTATIONS, _measure_top1(predictor, images, changes, title="rotations"), strict=True))}


def _change(images: Images, change: Callable[..., Pixels], start: int, stop: int, **how: float) -> Pixels:
    return change(images.read(start, stop), **how)


def _measure_top1(
    predictor: Predictor, images: Images, changes: Sequence[Callable[[int, int], Pixels]], *, title: str
) -> list[float]:
    """Top-1 of the images as each of `changes` reads them."""
    with show_progress(title, len(changes) * len(images), shown=current_process().is_main) as advance:
        logits = (predictor.predict(read, count=len(images), on_progress=advance) for read in changes)
        return [float((found.argmax(axis=1) == images.labels).mean()) for found in logits]
