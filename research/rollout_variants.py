"""Does another rollout show more of the object than the published one?

    python research/rollout_variants.py runs/photos=/data/photos/val planted --images 16 --size 4 \
        --output benchmarks/results

Each model is a training directory, then = and a folder of images in one folder a class; `planted` is
the model of research/planted_evidence.py. A map's values, summed over groups of patches, are
compared with what the model loses without each group, its tokens left out or painted over with the
mean colour: Spearman's correlation, the mean over the images with its 95 % interval. What is lost
is the probability of the class, and the cosine of the features with those of the whole image: a
rollout knows no class, and says where the features come from. A Gaussian in the middle stands
beside. The attention sinks of each layer are counted.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import planted_evidence
import torch
from conditions import describe_conditions, find_result, write_result
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from vit.analysis.faithfulness.baselines import centre_maps
from vit.analysis.faithfulness.map_metrics import estimate, to_markdown
from vit.analysis.faithfulness.result import format_estimate
from vit.bundle import Bundle, open_model
from vit.explanation.capture.forward import Forward, run_forward
from vit.explanation.checks.sanity_checks import rank_correlation
from vit.explanation.checks.token_ablation import (
    Fill,
    build_probability,
    build_removal,
    leave_one_out,
    tile_patches,
)
from vit.explanation.methods import sinks
from vit.explanation.targets import CLASS, Target
from vit.model.logits import at_least_float32

NAME = "rollout-variants"
BATCH = 8
FILLS: tuple[Fill, ...] = ("auto", "mean")


def read_images(bundle: Bundle, folder: Path, count: int) -> tuple[Tensor, Tensor]:
    """Images that are classified correctly, from each class in turn, and their classes."""
    # folders in their order are the classes, whose names may be others (Imagenette)
    files = [sorted(path.iterdir()) for path in sorted(folder.iterdir()) if path.is_dir()]
    assert len(files) == len(bundle.class_names)
    images, classes = [], []
    for number in range(min(map(len, files))):
        for label, paths in enumerate(files):
            with Image.open(paths[number]) as photo:
                pixels = torch.from_numpy(bundle.preprocess.to_uint8(photo.convert("RGB")))
            image = bundle.preprocess.normalize(pixels[None])
            with torch.no_grad():
                predicted = int(bundle.model(image).argmax())
            if predicted == label:
                images.append(image)
                classes.append(predicted)
            if len(images) == count:
                return torch.cat(images), torch.tensor(classes)
    raise SystemExit(f"fewer than {count} images of {folder} are classified correctly")


def mix(forward: Forward) -> tuple[list[Tensor], list[Tensor]]:
    """Each layer's mean attention, plain and weighted by what it moves; rows sum to one."""
    plain, weighted = [], []
    for layer in forward.record.layers:
        attention = layer.attention()
        moved = (attention * layer.value_norms()[:, :, None]).mean(dim=1)
        plain.append(attention.mean(dim=1))
        weighted.append(moved / moved.sum(dim=-1, keepdim=True))
    return plain, weighted


def roll_up(forward: Forward, layers: list[Tensor], without: Tensor | None = None) -> Tensor:
    """The rollout of these matrices [B, N, N], on the grid; without what some tokens [B, N] draw,
    which the others get."""
    row = at_least_float32(forward.pool_weights)[:, None]
    for layer in reversed(layers):
        matrix = layer
        if without is not None:
            matrix = matrix.masked_fill(without[:, None], 0.0)
            matrix = matrix / matrix.sum(dim=-1, keepdim=True)
        row = (row + row @ matrix) / 2
    return torch.unflatten(row[:, 0, forward.num_prefix_tokens :], 1, forward.grid)


@torch.no_grad()
def make_variants(model: nn.Module, images: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Maps by name, and the sinks of each layer [B, layers, P]."""
    forward = run_forward(model, images, verify=False)
    found = sinks.find_sinks(forward).flatten(2)
    drawing = F.pad(found.any(dim=1), (forward.num_prefix_tokens, 0))
    plain, weighted = mix(forward)
    half = len(plain) // 2
    maps = {
        "rollout": roll_up(forward, plain),
        "rollout, sinks removed": roll_up(forward, plain, drawing),
        "value-weighted": roll_up(forward, weighted),
        "value-weighted, sinks removed": roll_up(forward, weighted, drawing),
        "rollout, upper half of the layers": roll_up(forward, plain[half:]),
        "the same, sinks removed": roll_up(forward, plain[half:], drawing),
        "centre": centre_maps(len(images), forward.grid),
    }
    return maps, found


def measure_losses(
    model: nn.Module, images: Tensor, classes: Tensor, groups: Tensor, grid: tuple[int, int]
) -> Iterator[tuple[str, Tensor]]:
    """What each image loses without each group, by what is measured and how it is removed."""
    head = model.head
    with torch.no_grad():
        model.head = nn.Identity()
        features = model(images)
        model.head = head

    def compare(outputs: Tensor, rows: Tensor) -> Tensor:
        return F.cosine_similarity(outputs, features[rows], dim=1)

    rows = torch.arange(len(images))
    kinds = (
        ("class", head, CLASS, classes),
        ("features", nn.Identity(), Target(compare, compare), rows),
    )
    for kind, last, target, of_image in kinds:
        model.head = last
        for fill in FILLS:
            predict = build_probability(
                build_removal(model, images, grid=grid, fill=fill, batch_size=BATCH),
                of_image,
                target=target,
            )
            losses = leave_one_out(predict, batch=len(images), groups=groups, device=images.device)
            yield f"{kind}, {'left out' if fill == 'auto' else 'painted'}", losses
    model.head = head


def measure(model_name: str, *, count: int, size: int) -> dict[str, Any]:
    """Correlations of a model's maps, by evidence."""
    path, _, folder = model_name.partition("=")
    if path == "planted":
        model, images, classes, glyphs = planted_evidence.train()
        chosen = torch.where(glyphs >= 0)[0][:count]
        images, classes = images[chosen], classes[chosen]
    else:
        bundle = open_model(path, device="cpu")
        model = bundle.model.eval()
        images, classes = read_images(bundle, Path(folder), count)

    correlations: dict[str, dict[str, list[Tensor]]] = {}
    num_sinks, fractions = [], []
    for start in range(0, len(images), BATCH):
        batch = slice(start, start + BATCH)
        maps, found = make_variants(model, images[batch])
        num_sinks.append(found.sum(dim=(0, 2)))
        share = maps["rollout"].flatten(1)
        fractions.append((share * found.any(dim=1)).sum(dim=1) / share.sum(dim=1))
        grid = maps["rollout"].shape[1:]
        groups = tile_patches((grid[0], grid[1]), size)
        losses = measure_losses(model, images[batch], classes[batch], groups, (grid[0], grid[1]))
        for evidence, loss in losses:
            for name, values in maps.items():
                grouped = values.flatten(1) @ groups.float().T / groups.sum(dim=1)
                correlation = rank_correlation(grouped[:, None], loss[:, None])
                correlations.setdefault(evidence, {}).setdefault(name, []).append(correlation)
    return {
        "images": len(images),
        "grid": list(grid),
        "group": size,
        "sinks_by_layer": torch.stack(num_sinks).sum(dim=0).tolist(),
        "sink_fractions": [round(value, 4) for value in torch.cat(fractions).tolist()],
        "correlation": {
            evidence: {
                name: vars(mean)
                for name, mean in estimate(
                    {name: torch.cat(parts).numpy() for name, parts in by_map.items()}
                ).items()
            }
            for evidence, by_map in correlations.items()
        },
    }


def build_table(result: dict[str, Any]) -> str:
    """A row for each map, a column for each evidence."""
    by_evidence = result["correlation"]
    names = next(iter(by_evidence.values()))
    rows = [[name, *(format_estimate(by[name]) for by in by_evidence.values())] for name in names]
    return to_markdown(["map", *by_evidence], rows)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", help="training directory=folder of images; planted")
    parser.add_argument("--images", type=int, default=16, help="classified correctly")
    parser.add_argument("--size", type=int, default=4, help="patches a side of a group")
    parser.add_argument("--output", type=Path, help=f"folder for {NAME}-<machine>.json")
    options = parser.parse_args()
    machine = describe_conditions("cpu")
    for model in options.models:
        result = measure(model, count=options.images, size=options.size)
        name = Path(model.partition("=")[0]).name
        print(name, result["sinks_by_layer"], build_table(result), sep="\n", flush=True)
        if options.output:
            path = find_result(options.output, NAME, machine)
            before = json.loads(path.read_text())["models"] if path.exists() else {}
            models = before | {name: {**result, "machine": machine}}
            write_result(options.output, NAME, {"machine": machine, "models": models})


if __name__ == "__main__":
    main()
