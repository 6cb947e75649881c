"""Every augmentation, for tests of loaders.

In a file of its own: what imports the pretend device makes it torch's accelerator for the rest of the
process, and CUDA's backward passes then fail.
"""

from vit.config import AugmentConfig
from vit.data.images import Preprocess

PREPROCESS = Preprocess((16, 20), crop_pct=0.8)
AUGMENTS = {
    "none": AugmentConfig(),
    "crop and flip": AugmentConfig(crop_padding=2, flip="random"),
    "cutout": AugmentConfig(flip="alternating", cutout=4),
    "resized crop": AugmentConfig(resized_crop_scale=(0.3, 1.0), flip="random"),
    "jitter and erasing": AugmentConfig(color_jitter=0.3, re_prob=0.4),
    "RandAugment": AugmentConfig(rand_augment=(2, 9.0)),
    "mixup": AugmentConfig(mixup=0.8),
    "cutmix": AugmentConfig(cutmix=1.0),
    "all": AugmentConfig(
        crop_padding=2,
        flip="random",
        cutout=4,
        color_jitter=0.2,
        re_prob=0.3,
        mixup=0.8,
        cutmix=1.0,
    ),
}
