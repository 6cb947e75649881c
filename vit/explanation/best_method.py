"""The map method that measured best for a model. `vit faithfulness` writes it next to the model
file, and `vit explain` reads it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from vit.bundle import MODEL_FILE, Bundle
from vit.explanation.capture.forward import open_reader
from vit.explanation.capture.reader import read_bundle
from vit.explanation.methods.maps import compute_maps
from vit.explanation.methods.registry import list_methods
from vit.runtime.documents import read_json

# name for the method in the file
BEST = "best"
# name for the methods of the default
AUTO = "auto"
# Images for which "auto" takes two methods and tests every map; for more, that takes too long.
MAX_CHECKED_IMAGES = 64


@dataclass(frozen=True)
class BestMethod:
    """The method that measured best for a model file.

    Attributes:
        method: Name of the method.
        among_the_best: Methods whose difference from the highest gain has an interval that
            includes 0.
        gain: Symmetric relevance gain of the method, the mean with tokens dropped and with the mean
            fill: mean, low and high end of the interval.
        num_images: Number of images.
    """

    method: str
    among_the_best: tuple[str, ...]
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
    """Return the path of the file next to the model file; None if the model isn't a file."""
    path = Path(bundle.name)
    path = path / MODEL_FILE if path.is_dir() else path
    return path.with_suffix(".faithfulness.json") if path.is_file() else None


def read_best_method(bundle: Bundle) -> BestMethod:
    """Read what `vit faithfulness` wrote.

    Raises:
        ValueError: The model file was not measured, or the record is damaged.
    """
    path = find_record(bundle)
    hint = f"run vit faithfulness {bundle.name}"
    if path is None:
        raise ValueError(
            f"{bundle.name} is not a model file, so no best method is known for it; name a method"
        )
    if not path.is_file():
        raise ValueError(f"no best method is known for {bundle.name}; {hint} first")
    try:
        content = read_json(path)
        name = content["best_method"]
        # earlier files were chosen by the gain with dropped tokens
        metric = "srg_both" if "srg_both" in content["gains"] else "srg"
        gain = content["gains"][metric][name]
        best = BestMethod(
            method=name,
            among_the_best=tuple(content["best"][metric]),
            gain={key: float(gain[key]) for key in ("mean", "low", "high")},
            num_images=content["num_images"],
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged; {hint} again") from error
    # a file of this name may have been replaced by another model
    if content.get("model_sha256") != bundle.sha256:
        raise ValueError(f"{path} was measured with other weights; {hint} again")
    return best


def describe_best_method(bundle: Bundle) -> str:
    """Return a line about the best method, or the reason why its file can't be used; empty if there
    is no file."""
    path = find_record(bundle)
    if path is None or not path.is_file():
        return ""
    try:
        return f"{read_best_method(bundle)}; --method best takes it"
    except (ValueError, OSError) as error:
        return str(error)


def replace_best(methods: Sequence[str], bundle: Bundle) -> tuple[str, ...]:
    """Return `methods` with the one that measured best instead of "best", each once."""
    names = [read_best_method(bundle).method if name == BEST else name for name in methods]
    # the best method may also be named itself
    return tuple(dict.fromkeys(names))


def choose_methods(methods: Sequence[str], bundle: Bundle, *, num_images: int) -> tuple[str, ...]:
    """Return `methods` with other methods instead of "auto" and "best".

    "auto" is a map of the class and rollout, or rollout alone for many images; for a model without
    readable attention it is the first two methods that it has.
    """
    if AUTO not in methods:
        return replace_best(methods, bundle)
    reader = open_reader(bundle)
    chosen = ["rollout"]
    if not reader.has_attention:
        chosen = list_methods(reader)[:2]
    elif num_images <= MAX_CHECKED_IMAGES:
        try:
            chosen.insert(0, read_best_method(bundle).method)
        except (ValueError, OSError):
            # the model was not measured
            if _has_removal_maps(bundle):
                chosen.insert(0, "libra-removal")
    names: list[str] = []
    for method in methods:
        names += chosen if method == AUTO else [method]
    return replace_best(names, bundle)


def _has_removal_maps(bundle: Bundle) -> bool:
    """Return whether the pooling of the model has gates. This project's has; other models are tried
    with a black image."""
    reader = read_bundle(bundle)
    if reader.is_ours:
        return True
    image = torch.zeros(1, 3, *bundle.preprocess.image_size, device=bundle.device)
    try:
        compute_maps(reader, image, methods=["removal-gradient"])
    except ValueError:
        return False
    return True
