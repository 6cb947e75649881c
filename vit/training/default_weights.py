"""The weights that photos start from where the user names none."""

import subprocess
import sys
from typing import Any

from vit.runtime.arguments import as_pair, shorten
from vit.runtime.hub import WAIT, WEIGHTS, has_weights, is_reachable
from vit.runtime.progress import show_progress

# The best small vision transformer with a permissive licence: ViT-S/14 of DINOv2 (Oquab et al.
# 2023, arXiv 2304.07193).
_NAME = "timm:vit_small_patch14_dinov2.lvd142m"
_FACTS = "Apache-2.0, 88 MB"
_PATCH_SIZE = 14
# At its own size, 518 px, an image takes eight times as long.
_IMAGE_SIZE = 224
# Time for the download.
_SECONDS: float = 60
# A process of its own ends when its time is over, whatever the library waits for.
_DOWNLOAD = "import sys, huggingface_hub as hub; hub.hf_hub_download(*sys.argv[1:])"


def choose_weights(image_size: Any) -> tuple[dict[str, Any], str]:
    """Choose weights for photos: those of timm or, without a network, random ones. `image_size` is
    the user's, or None. Returns the keys of the configuration for them, none for random weights,
    and a description for the user."""
    sides = as_pair(image_size or _IMAGE_SIZE, name="data.image_size")
    if any(side % _PATCH_SIZE for side in sides):
        return {}, f"random: {_NAME} needs a data.image_size that {_PATCH_SIZE} divides"
    repository = _NAME.replace(":", "/")
    try:
        if not has_weights(repository):
            with show_progress(f"downloading {repository}, {_FACTS}"):
                _download(repository)
    except OSError as error:
        return {}, f"random: {_NAME} can't be downloaded ({error})"
    keys = {"model.init": _NAME, "data.image_size": _IMAGE_SIZE}
    return keys, f"{_NAME}, {_FACTS}; --init none trains from scratch"


def _download(repository: str) -> None:
    """Download the weights of a repository of the hub. Raises OSError, whose sentence says why, if
    that isn't done in time."""
    from huggingface_hub import constants  # takes a second to import

    if constants.HF_HUB_OFFLINE:
        raise OSError("HF_HUB_OFFLINE is set")
    if not is_reachable():
        raise OSError(f"{constants.ENDPOINT} does not answer within {WAIT} s")
    command = [sys.executable, "-c", _DOWNLOAD, repository, WEIGHTS]
    try:
        subprocess.run(command, timeout=_SECONDS, check=True, capture_output=True, text=True)
    except subprocess.TimeoutExpired:
        raise OSError(
            f"the download took over {_SECONDS} s; hf download {repository} finishes it"
        ) from None
    except subprocess.CalledProcessError as error:
        raise OSError(shorten(error.stderr.strip().rpartition("\n")[2])) from error
