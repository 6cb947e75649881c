"""Every augmentation, and a loader of flat options, for tests of loaders.

In a file of its own: what imports the pretend device makes it torch's accelerator for the rest of the
process, and CUDA's backward passes then fail.
"""

from typing import Any

import torch

from vit.data.augment import Augmentation
from vit.data.dataset import ImageDataset
from vit.data.loader import TrainLoader
from vit.data.preprocess import Preprocess
from vit.runtime.processes import Process

PREPROCESS = Preprocess((16, 20), crop_pct=0.8)
AUGMENTS = {
    "none": Augmentation(),
    "crop and flip": Augmentation(crop_padding=2, flip="random"),
    "cutout": Augmentation(flip="alternating", cutout=4),
    "resized crop": Augmentation(resized_crop_scale=(0.3, 1.0), flip="random"),
    "jitter": Augmentation(color_jitter=0.3),
    "mixup": Augmentation(mixup=0.8),
    "cutmix": Augmentation(cutmix=1.0),
    "all": Augmentation(
        crop_padding=2,
        flip="random",
        cutout=4,
        color_jitter=0.2,
        mixup=0.8,
        cutmix=1.0,
    ),
}


def build_loader(dataset: ImageDataset, **options: Any) -> TrainLoader:
    """A loader of this process, or of another one."""
    process = Process(
        **{name: options.pop(name) for name in ("rank", "world_size") if name in options}
    )
    options["device"] = torch.device(options["device"])
    augmentation = options.pop("augment", Augmentation())
    return TrainLoader(dataset, process=process, augmentation=augmentation, **options)
