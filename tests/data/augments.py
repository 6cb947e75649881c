"""Every augmentation, and a loader of flat options, for tests of loaders.

In a file of its own: what imports the pretend device makes it torch's accelerator for the rest of the
process, and CUDA's backward passes then fail.
"""

from typing import Any

from vit.data.augment import Augmentation, Mixing
from vit.data.crop import Crop
from vit.data.dataset import ImageDataset
from vit.data.loader import BatchOrder, TrainLoader
from vit.data.preprocess import Preprocess
from vit.data.workers import Decoding
from vit.runtime.processes import Process

PREPROCESS = Preprocess((16, 20), crop_pct=0.8)
AUGMENTS = {
    "none": Augmentation(),
    "crop and flip": Augmentation(crop=Crop(padding=2, flip="random")),
    "cutout": Augmentation(crop=Crop(flip="alternating"), cutout=4),
    "resized crop": Augmentation(crop=Crop(scale=(0.3, 1.0), flip="random")),
    "jitter": Augmentation(color_jitter=0.3),
    "mixup": Augmentation(mixing=Mixing(mixup=0.8)),
    "cutmix": Augmentation(mixing=Mixing(cutmix=1.0)),
    "all": Augmentation(
        crop=Crop(padding=2, flip="random"),
        cutout=4,
        color_jitter=0.2,
        mixing=Mixing(mixup=0.8, cutmix=1.0),
    ),
}


def build_loader(dataset: ImageDataset, **options: Any) -> TrainLoader:
    """A loader from the options of its parts."""

    def take(*names: str) -> dict[str, Any]:
        return {name: options.pop(name) for name in names if name in options}

    process = Process(**take("rank", "world_size"))
    order = BatchOrder(**take("batch_size", "seed"), process=process)
    decoding = Decoding(**take("transform", "workers", "max_unreadable_fraction"))
    augmentation = options.pop("augment", Augmentation())
    return TrainLoader(
        dataset, order=order, decoding=decoding, augmentation=augmentation, **options
    )
