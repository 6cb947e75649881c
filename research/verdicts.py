"""How often does the patch-removal test confirm maps that tell nothing, and maps that are right; and
has a photo the same verdict alone, in a folder and after `--resume`?

    PYTHONPATH=.:benchmarks:research:tests/explanation python research/verdicts.py \
        imagenette=PHOTOS planted-14 --output benchmarks/results

A model is one of `vit explain` with a folder of photos, or `planted-14`: that of
tests/explanation/planted_evidence.py on 14 × 14 patches. Maps that tell nothing are drawn at random,
belong to other images, or are mirrored. Maps that are right are the loss without each patch, or
without the 3 × 3 patches around it.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import planted_evidence
import torch
from conditions import describe_conditions, write_result
from scipy.ndimage import gaussian_filter
from torch import Tensor

import vit
from vit.bundle import open_model
from vit.explanation.capture.forward import Grid
from vit.explanation.checks.sanity_checks import (
    CONFIRMED,
    Evidence,
    check_map,
    check_maps,
    measure_evidence,
)
from vit.explanation.checks.token_ablation import build_probability, build_removal, leave_one_out
from vit.explanation.methods.maps import compute_maps

METHODS = ("rollout", "gae", "libra-fullgrad", "removal-gradient", "libra-removal")
BATCH = 16


def draw(kind: str, grid: Grid, random: np.random.Generator) -> np.ndarray:
    """Draw a map that doesn't depend on the image."""
    y, x = np.meshgrid(*(np.linspace(-1, 1, side) for side in grid), indexing="ij")
    noise = random.standard_normal(grid)
    if kind.startswith("noise"):
        return gaussian_filter(noise, float(kind.split()[-1]) * grid[0] / 8)
    if kind == "blob":
        down, across = random.uniform(-1, 1, 2)
        return np.exp(-4 * ((y - down) ** 2 + (x - across) ** 2)) + 1e-3 * noise
    if kind == "centre":
        high, wide = random.uniform(0.5, 2, 2)
        return np.exp(-2 * (high * y**2 + wide * x**2)) + 1e-3 * noise
    if kind == "ring":
        radius = random.uniform(0.4, 0.9)
        return np.exp(-20 * (np.hypot(y, x) - radius) ** 2) + 1e-3 * noise
    assert kind == "ramp"
    down, across = random.standard_normal(2)
    return down * y + across * x + 1e-3 * noise


KINDS = ("noise 0", "noise 1", "noise 2", "blob", "centre", "ring", "ramp")


def confirmed(maps: Tensor, evidence: Evidence) -> int:
    return sum(check.verdict == CONFIRMED for check in check_map(maps, evidence).to_list())


def remove_windows(model, images: Tensor, classes: Tensor, grid: Grid, reach: int) -> Tensor:
    """Compute the loss without the patches up to `reach` from each patch, as maps."""
    places = torch.stack(torch.meshgrid(*map(torch.arange, grid), indexing="ij"), -1).flatten(0, 1)
    near = (places[:, None] - places).abs().amax(dim=-1) <= reach
    predict = build_probability(build_removal(model, images, grid=grid), classes)
    drops = leave_one_out(predict, batch=len(images), groups=near, device=images.device)
    return drops.unflatten(1, grid)


def measure_rates(model, images: Tensor, *, draws: int) -> dict[str, dict[str, float]]:
    """Measure the percentage of maps that are confirmed."""
    found: dict[str, list[Tensor]] = {name: [] for name in METHODS}
    right: dict[str, list[Tensor]] = {}
    drops, own = [], dict.fromkeys(METHODS, 0)
    for batch in images.split(BATCH):
        forward, targets, maps = compute_maps(model, batch, methods=METHODS)
        for name, method_maps, checks in zip(
            METHODS, maps, check_maps(forward, targets, maps, predicted_first=True), strict=True
        ):
            found[name].append(method_maps.values[:, 0])
            own[name] += sum(check.verdict == CONFIRMED for check in checks[0].to_list())
        (evidence,) = measure_evidence(forward, targets)
        drops.append(evidence.drops)
        # each patch alone takes a pass: small grids only
        for side in (1, 3) if len(forward.grid) and forward.grid[0] <= 8 else ():
            right.setdefault(f"loss without {side} × {side} patches around each", []).append(
                remove_windows(model, batch, targets[:, 0], forward.grid, side // 2)
            )
    evidence = Evidence(torch.cat(drops), evidence.groups)
    count, grid = len(images), forward.grid

    random = np.random.default_rng(0)
    nothing = {}
    for kind in KINDS:
        total = 0
        for _ in range(draws):
            several = np.stack([draw(kind, grid, random) for _ in range(count)])
            total += confirmed(torch.from_numpy(several).float(), evidence)
        nothing[kind] = 100 * total / draws / count
    for name, parts in found.items():
        maps = torch.cat(parts)
        others = sum(confirmed(maps.roll(shift, 0), evidence) for shift in range(1, draws + 1))
        nothing[f"{name} of other images"] = 100 * others / draws / count
        nothing[f"{name}, mirrored"] = 100 * confirmed(maps.flip(2), evidence) / count
    rates = {
        name: 100 * confirmed(torch.cat(parts), evidence) / count for name, parts in right.items()
    }
    rates |= {name: 100 * number / count for name, number in own.items()}
    tiles = evidence.groups.members[evidence.drops.argmax(dim=1)]
    largest = {name: torch.cat(parts).flatten(1).argmax(dim=1) for name, parts in found.items()}
    hits = {
        name: 100 * tiles[torch.arange(count), patches].float().mean().item()
        for name, patches in largest.items()
    }
    return {
        "groups": str(evidence.groups),
        "num_groups": len(evidence.groups.members),
        "images": count,
        "draws": draws,
        "tell nothing": nothing,
        "right": rates,
        "largest value in the tile of the largest loss": hits,
    }


def compare_neighbours(name: str, photos: list[Path]) -> dict[str, object]:
    """Count the verdicts that differ alone, in the folder and after an interruption."""
    options = {"methods": METHODS, "sanity_checks": True}

    def find_verdicts(explanations) -> list[tuple[str, ...]]:
        checks = [explanations.sanity_checks[method] for method in METHODS]
        return [tuple(str(image[0]) for image in images) for images in zip(*checks, strict=True)]

    together = find_verdicts(vit.explain(name, photos, **options))
    alone = [find_verdicts(vit.explain(name, [photo], **options))[0] for photo in photos]
    with tempfile.TemporaryDirectory() as folder:
        # the last photos alone, as if the export had begun with others
        half = len(photos) // 2
        vit.explain(name, photos[:half], output=folder, formats="npz", **options)
        resumed = find_verdicts(
            vit.explain(name, photos, output=folder, formats="npz", resume=True, **options)
        )
    differ = sum(
        a != b for pair in zip(together, alone, strict=True) for a, b in zip(*pair, strict=True)
    )
    differ_resumed = sum(
        a != b
        for pair in zip(together[half:], resumed, strict=True)
        for a, b in zip(*pair, strict=True)
    )
    return {
        "photos": len(photos),
        "verdicts": len(photos) * len(METHODS),
        "differ alone": differ,
        "differ after resume": differ_resumed,
    }


def to_table(models: dict[str, dict]) -> str:
    """Format the rates, one column for each model."""
    lines = [f"| % confirmed | {' | '.join(models)} |", "|---|" + "---|" * len(models)]
    first = ("groups", "images", "draws")
    lines += [f"| {key} | {' | '.join(str(m[key]) for m in models.values())} |" for key in first]
    for part in ("tell nothing", "right"):
        for kind in dict.fromkeys(kind for model in models.values() for kind in model[part]):
            cells = [f"{m[part][kind]:.1f}" if kind in m[part] else "" for m in models.values()]
            lines.append(f"| {kind} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--images", type=int, default=48)
    parser.add_argument("--draws", type=int, default=4)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    models, neighbours = {}, {}
    for model in options.models:
        name, _, folder = model.partition("=")
        if folder:
            files = sorted(Path(folder).rglob("*.jp*g"))
            photos = files[:: max(len(files) // options.images, 1)][: options.images]
            bundle = open_model(name, device="cpu")
            from PIL import Image

            pixels = np.stack(
                [bundle.preprocess.to_uint8(Image.open(photo).convert("RGB")) for photo in photos]
            )
            images = bundle.preprocess.normalize(torch.from_numpy(pixels))
            network = bundle.model
            neighbours[name] = compare_neighbours(name, photos)
            print(neighbours[name], flush=True)
        else:
            network, images, _, glyphs = planted_evidence.train(grid=int(name.partition("-")[2]))
            images = images[glyphs >= 0][: options.images]
        models[name] = measure_rates(network, images, draws=options.draws)
        print(to_table(models), flush=True)
    if options.output:
        content = {
            "machine": describe_conditions("cpu"),
            "models": models,
            "neighbours": neighbours,
            "table": to_table(models),
        }
        write_result(options.output, "verdicts", content)


if __name__ == "__main__":
    main()
