"""Which method measured best for a model: kept beside its file by `vit faithfulness`, read by `vit
explain`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from vit.bundle import MODEL_FILE, Bundle
from vit.explanation.capture.layers import has_attention
from vit.explanation.methods.registry import METHODS_WITHOUT_ATTENTION, compute_maps
from vit.model.vision_transformer import VisionTransformer
from vit.runtime.documents import read_json

# stands for the method in the file
BEST = "best"
# stands for what is shown where nobody asks for a method
AUTO = "auto"
MAX_IMAGES_OF_TWO_METHODS = 64


@dataclass(frozen=True)
class BestMethod:
    """What was measured of a model file."""

    method: str
    # with tokens dropped: those whose interval of the difference to the best includes 0
    among_the_best: tuple[str, ...]
    # symmetric relevance gain of the method: mean, low, high
    gain: Mapping[str, float]
    num_images: int

    def __str__(self) -> str:
        gain = "{mean:.2f}, 95 % interval {low:.2f} to {high:.2f}".format_map(self.gain)
        text = f"most faithful to this model on {self.num_images} images: {self.method}"
        text += f" (gain {gain})"
        others = [name for name in self.among_the_best if name != self.method]
        if others:
            text += f"; not told apart from it: {', '.join(others)}"
        return text


def find_record(bundle: Bundle) -> Path | None:
    """The file beside the model file, there or not; None for a model that isn't a file."""
    path = Path(bundle.name)
    path = path / MODEL_FILE if path.is_dir() else path
    return path.with_suffix(".faithfulness.json") if path.is_file() else None


def read_best_method(bundle: Bundle) -> BestMethod:
    """Read what `vit faithfulness` wrote.

    Raises:
        ValueError: nothing was measured of this model file, or the record is damaged.
    """
    path = find_record(bundle)
    hint = f"run vit faithfulness {bundle.name}"
    if path is None:
        raise ValueError(
            f"{bundle.name} is not a model file, beside which a best method is kept; name a method"
            " instead"
        )
    if not path.is_file():
        raise ValueError(f"no best method is known of {bundle.name}; {hint} first")
    try:
        content = read_json(path)
        name = content["best_method"]
        gain = content["gains"]["srg"][name]
        best = BestMethod(
            method=name,
            among_the_best=tuple(content["best"]["srg"]),
            gain={key: float(gain[key]) for key in ("mean", "low", "high")},
            num_images=content["num_images"],
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged; {hint} again") from error
    if content.get("model_sha256") != bundle.sha256:
        raise ValueError(f"{path} was measured of other weights; {hint} again")
    return best


def describe_best_method(bundle: Bundle) -> str:
    """A line about the best method, or why it can't be told; empty where nothing was ever
    measured."""
    path = find_record(bundle)
    if path is None or not path.is_file():
        return ""
    try:
        return f"{read_best_method(bundle)}; --method best takes it"
    except (ValueError, OSError) as error:
        return str(error)


def replace_best(methods: Sequence[str], bundle: Bundle) -> tuple[str, ...]:
    """`methods` with the one measured best in place of "best", each once."""
    names = [read_best_method(bundle).method if name == BEST else name for name in methods]
    return tuple(dict.fromkeys(names))


def choose_methods(methods: Sequence[str], bundle: Bundle, *, num_images: int) -> tuple[str, ...]:
    """`methods` as `replace_best`, with what a person sees first in place of "auto": rollout, which
    people ask for, and of a few images also a map of the class; of a model without attention all
    that can be made."""
    if AUTO not in methods:
        return replace_best(methods, bundle)
    chosen = ["rollout"]
    if not has_attention(bundle.model):
        chosen = list(METHODS_WITHOUT_ATTENTION)
    elif num_images <= MAX_IMAGES_OF_TWO_METHODS:
        try:
            chosen.append(read_best_method(bundle).method)
        except (ValueError, OSError):
            # nothing was measured of this model
            if _has_removal_maps(bundle):
                chosen.append("libra-removal")
    names = [name for method in methods for name in (chosen if method == AUTO else [method])]
    return replace_best(names, bundle)


def _has_removal_maps(bundle: Bundle) -> bool:
    """Whether the pooling of the model has gates, which is known of our own; others are asked with
    a black image."""
    if isinstance(bundle.model, VisionTransformer):
        return True
    device = next(bundle.model.parameters()).device
    image = torch.zeros(1, 3, *bundle.preprocess.image_size, device=device)
    try:
        compute_maps(bundle.model, image, methods=["libra-removal"])
    except ValueError:
        return False
    return True
