"""How often is the sanity check of a map wrong, and are the maps that it doesn't support worse?

    python research/sanity_checks.py --models runs/digits runs/photos=/data/photos planted \
        planted-16 --output benchmarks/results

A model is a training directory, tested on its own test split or on the images after =; `planted` is
that of research/planted_evidence.py, `planted-14` and `planted-16` the same on grids of so many
patches a side. Evidence is what `vit explain` takes: single patches, or the groups that the model
reacts to.

Each map is checked where it belongs, on other images and mirrored; smooth noise and a centred
Gaussian are checked too. Where these agree, that is a false alarm. Beside each verdict stands how
good such maps are: their rank correlation with what the model loses without each group of patches,
all of them; their gain, the symmetric relevance gain (insertion minus deletion area, tokens left
out) minus that of another image's map of the same method; and of planted glyphs, how often their
maximum is on it. Checks that are not made, since they don't tell good maps from bad ones, are
measured in the same way with --seeds 5.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import planted_evidence
import torch
from conditions import describe_conditions, find_result, write_result
from torch import Tensor, nn

from vit.analysis.faithfulness.baselines import centre_maps
from vit.analysis.faithfulness.map_metrics import find_order, to_markdown
from vit.analysis.faithfulness.measure import select_correct_images
from vit.bundle import open_model
from vit.data.open import open_for_model
from vit.explanation.capture.forward import Grid, run_forward
from vit.explanation.checks.sanity_checks import (
    RELIABILITY_IMAGES,
    VERDICTS,
    Evidence,
    check_map,
    choose_group_size,
    occlusion_reference,
    randomise_weights,
    rank_correlation,
)
from vit.explanation.checks.token_ablation import (
    area_under,
    build_probability,
    build_removal,
    deletion_curve,
    leave_one_out,
    tile_patches,
)
from vit.explanation.methods.maps import Maps, compute_maps
from vit.explanation.methods.registry import list_methods
from vit.explanation.targets import CLASS

NAME = "sanity-checks"
NAMES = [name for name in list_methods() if name != "raw"]
FRACTIONS = (0.1, 0.3, 0.5, 0.7, 0.9)
OTHERS = 8  # images that each map is checked on beside its own
BATCH, FEWEST = 32, 5  # images at a time; maps whose mean quality is compared
ALARMS, BASELINES = (
    ("other images", "images of other classes", "mirrored"),
    ("smooth noise", "centred Gaussian"),
)


class Measured:
    """A model, images that it classifies correctly, and what the checks compare."""

    def __init__(self, name: str, count: int) -> None:
        self.glyphs: Tensor | None = None
        self.glyph_side = 1
        if name.partition("-")[0] == "planted":
            side = int(name.partition("-")[2] or planted_evidence.GRID)
            if side != planted_evidence.GRID:
                self.glyph_side = planted_evidence.LARGE_GLYPH
            self.model, self.images, self.classes, glyphs = planted_evidence.train(grid=side)
            chosen = torch.where(glyphs >= 0)[0][:count]
            self.images, self.classes, self.glyphs = (
                self.images[chosen],
                self.classes[chosen],
                glyphs[chosen],
            )
        else:
            run, _, data = name.partition("=")
            bundle = open_model(run, device="cpu")
            self.model = bundle.model
            splits = open_for_model(data or None, trained_on=bundle.config["data"])
            source = splits.split(None if data else "test")
            self.images, self.classes, _ = select_correct_images(bundle, source, count=count)
        forward = run_forward(self.model, self.images[:RELIABILITY_IMAGES])
        self.grid: Grid = forward.grid
        # the first images decide, as in `vit explain`
        self.group_size = choose_group_size(forward)
        self.groups = tile_patches(self.grid, self.group_size.side or 1)
        self.pool_weights, self.layers = (
            forward.pool_weights[0, forward.num_prefix_tokens :],
            len(forward.record.layers),
        )
        self.maps, self.prefix_mass = self.explain(self.model)
        self.leave_one_out = self.in_batches(self._leave_one_out, self.images, self.classes)
        share = self.groups / self.groups.sum(dim=1, keepdim=True)  # [m, P]
        self.maps["leave-one-out"] = (self.leave_one_out @ share).unflatten(1, self.grid)
        self.randomised: list[dict[str, Tensor]] = []
        self.evidence = {circular: self._find_evidence(circular) for circular in (False, True)}

    def in_batches(self, compute: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        return torch.cat(
            [compute(*batch) for batch in zip(*(t.split(BATCH) for t in tensors), strict=True)]
        )

    def explain(self, model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Maps [n, rows, columns] and prefix mass [n] by method."""
        parts: list[list[Maps]] = []
        for images, classes in zip(
            self.images.split(BATCH), self.classes.split(BATCH), strict=True
        ):
            targets = classes[:, None]
            parts.append(
                compute_maps(
                    model,
                    images,
                    methods=NAMES,
                    target=replace(CLASS, choose=lambda _, t=targets: t),
                )[2]
            )
        values = [
            torch.cat([maps.values[:, 0] for maps in of_method])
            for of_method in zip(*parts, strict=True)
        ]
        mass = [
            torch.cat([maps.prefix_mass[:, 0] for maps in of_method])
            for of_method in zip(*parts, strict=True)
        ]
        return dict(zip(NAMES, values, strict=True)), dict(zip(NAMES, mass, strict=True))

    def measure_gain(self, maps: Tensor) -> Tensor:
        """Symmetric relevance gain of each map on its image."""

        def compute(images: Tensor, classes: Tensor, maps: Tensor) -> Tensor:
            predict, order = (
                build_probability(build_removal(self.model, images, grid=self.grid), classes),
                find_order(maps),
            )
            areas = [
                area_under(deletion_curve(predict, each, fractions=FRACTIONS), fractions=FRACTIONS)
                for each in (order.flip(1), order)
            ]
            return areas[0] - areas[1]

        return self.in_batches(compute, self.images, self.classes, maps)

    def _leave_one_out(self, images: Tensor, classes: Tensor) -> Tensor:
        predict = build_probability(build_removal(self.model, images, grid=self.grid), classes)
        return leave_one_out(predict, batch=len(images), groups=self.groups, device=images.device)

    def correlate(self, maps: Tensor) -> Tensor:
        """Rank correlation of each map, summed over the groups, with what these change."""
        sums = maps.flatten(1) @ self.groups.T.to(maps.dtype)
        return rank_correlation(sums[:, None], self.leave_one_out[:, None])

    def hits_glyph(self, maps: Tensor) -> Tensor:
        """Whether the maximum of each map is on the glyph."""
        assert self.glyphs is not None
        columns = self.grid[1]
        places = maps.flatten(1).argmax(dim=1)
        down = places // columns - self.glyphs // columns
        across = places % columns - self.glyphs % columns
        inside = [(offset >= 0) & (offset < self.glyph_side) for offset in (down, across)]
        return (inside[0] & inside[1]).float()

    def _find_evidence(self, circular: bool) -> Evidence:
        parts = []
        for images, classes in zip(
            self.images.split(BATCH), self.classes.split(BATCH), strict=True
        ):
            forward = run_forward(self.model, images, gradients=True)
            parts.append(
                occlusion_reference(forward, classes, circular=circular, size=self.group_size)
            )
        drops = torch.cat([part.drops for part in parts])
        return Evidence(parts[0].name, drops, parts[0].groups, self.group_size)


def check_method(measured: Measured, name: str) -> dict[str, Any]:
    """Verdicts of a method's maps where they belong and elsewhere, and how good the maps of each
    verdict are."""
    maps, evidence = measured.maps[name], measured.evidence["removal" in name]
    checks = check_map(maps, evidence).to_list()
    elsewhere = [maps.roll(shift, 0) for shift in range(1, OTHERS + 1)]
    other_class = [
        measured.classes.roll(shift) != measured.classes for shift in range(1, OTHERS + 1)
    ]
    mirrored = [maps.flip(sides) for sides in ((1,), (2,), (1, 2))]
    quality = {
        "leave_one_out_correlation": measured.correlate(maps),
        "gain": measured.measure_gain(maps) - measured.measure_gain(maps.roll(1, 0)),
    }
    if measured.glyphs is not None:
        quality["on_glyph"] = measured.hits_glyph(maps)
    return {
        "evidence": evidence.name,
        "mean": {what: float(values.mean()) for what, values in quality.items()},
        "false_alarms": {
            kind: count_agreeing(several, evidence, chosen)
            for kind, several, chosen in zip(
                ALARMS, (elsewhere, elsewhere, mirrored), (None, other_class, None), strict=True
            )
        },
        "verdicts": {
            verdict: summarise(
                torch.tensor([check.verdict == verdict for check in checks]), quality
            )
            for verdict in VERDICTS
        },
        "checks not made": {
            check: {"warned": summarise(warned, quality), "not warned": summarise(~warned, quality)}
            for check, warned in find_warnings(measured, name).items()
        },
    }


def count_agreeing(
    several: Sequence[Tensor], evidence: Evidence, chosen: Sequence[Tensor] | None = None
) -> float | None:
    """The fraction of maps that are supported, of those `chosen`; None where there are none."""
    supported = torch.tensor(
        [
            [check.verdict == "agrees" for check in check_map(maps, evidence).to_list()]
            for maps in several
        ]
    )
    supported = supported if chosen is None else supported[torch.stack(list(chosen))]
    return float(supported.float().mean()) if supported.numel() else None


def summarise(chosen: Tensor, quality: dict[str, Tensor]) -> dict[str, float | None]:
    """The fraction of the maps that are `chosen`, and their mean quality."""
    means = {
        what: float(values[chosen].mean()) if chosen.any() else None
        for what, values in quality.items()
    }
    return {"fraction": float(chosen.float().mean()), **means}


def find_warnings(measured: Measured, name: str) -> dict[str, Tensor]:
    """What three other checks would warn of: relevance in prefix tokens (more than half); a nearly
    uniform map (98 %), without what the method's identity adds; a map nearer to those of randomised
    weights for its own image than to theirs for 95 % of the others."""
    if name not in measured.prefix_mass or not measured.randomised:
        return {}
    maps = measured.maps[name].flatten(1)
    identity = {"gae": 1.0, "libra-gae": 1.0}.get(name, 0.0)
    identity = 0.5**measured.layers if "rollout" in name else identity
    added = (maps - identity * measured.pool_weights).abs()
    added = added / added.sum(dim=1, keepdim=True).clamp_min(1e-30)
    entropy = torch.special.entr(added).sum(dim=1)
    similar = torch.stack(
        [correlate_pairs(maps, each[name].flatten(1)) for each in measured.randomised]
    ).mean(dim=0)
    own = similar.diagonal()[:, None]
    return {
        "prefix mass": measured.prefix_mass[name] > 0.5,
        "nearly uniform": entropy.exp() > 0.98 * maps.shape[1],
        "randomised weights": (similar >= own).float().mean(dim=1) <= 0.05,
    }


def correlate_pairs(first: Tensor, second: Tensor) -> Tensor:
    """Rank correlation [n, n] of every map with every other."""
    columns = [
        rank_correlation(first[:, None], second[index].expand_as(first)[:, None])
        for index in range(len(second))
    ]
    return torch.stack(columns, dim=1)


def measure_model(name: str, count: int, seeds: int) -> dict[str, Any]:
    """All methods and baselines on one model; `seeds` of randomised weights."""
    measured = Measured(name, count)
    measured.randomised = [
        measured.explain(randomise_weights(measured.model, seed=seed))[0] for seed in range(seeds)
    ]
    rows, columns = measured.grid
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(len(measured.images), rows + 2, columns + 2, generator=generator)
    noise = nn.functional.avg_pool2d(noise, 3, stride=1)
    evidence = measured.evidence[False]
    # what the check sees of what all groups do
    compared = evidence.drops
    if evidence.groups.shape == measured.groups.shape:
        agreement = rank_correlation(compared[:, None], measured.leave_one_out[:, None])
        correlation = float(agreement.mean())
    else:
        correlation = None
    return {
        "images": len(measured.images),
        "grid": [rows, columns],
        "evidence": evidence.name,
        "groups": str(measured.group_size),
        "reliability": measured.group_size.reliability,
        "num_groups": len(evidence.groups),
        "evidence_correlation": correlation,
        "false_alarms": {
            kind: count_agreeing([maps], evidence)
            for kind, maps in zip(
                BASELINES, (noise, centre_maps(len(noise), measured.grid)), strict=True
            )
        },
        "methods": {method: check_method(measured, method) for method in measured.maps},
    }


def show_false_alarms(models: dict[str, Any]) -> str:
    """How often each model's maps agree where they don't belong: the mean and the highest of its
    methods."""

    def describe(rates: list[float | None]) -> str:
        known = [rate for rate in rates if rate is not None]
        return f"{100 * sum(known) / len(known):.1f} % ({100 * max(known):.1f} %)" if known else "–"

    rows = []
    for name, model in models.items():
        kinds = [
            [method["false_alarms"][kind] for method in model["methods"].values()]
            for kind in ALARMS
        ]
        baselines = [f"{100 * model['false_alarms'][kind]:.1f} %" for kind in BASELINES]
        grid = "{} × {}".format(*model["grid"])
        left_out = f"{model['groups']} (ρ {model['reliability']:.2f})"
        rows.append(
            [
                name,
                grid,
                str(model["images"]),
                left_out,
                model["evidence"],
                *map(describe, kinds),
                *baselines,
            ]
        )
    return to_markdown(
        ["model", "patches", "images", "left out", "evidence", *ALARMS, *BASELINES], rows
    )


def show_verdicts(models: dict[str, Any], quality: str) -> str:
    """Of each method: the fraction of its maps with each verdict, and how good those are."""

    def describe(method: dict[str, Any]) -> str:
        found = [method["verdicts"][verdict] for verdict in VERDICTS[:3]]
        means = " / ".join(
            "–" if each[quality] is None else f"{each[quality]:.2f}" for each in found
        )
        fractions = " / ".join(f"{100 * each['fraction']:.0f}" for each in found)
        return f"{fractions} %: {means}"

    methods = next(iter(models.values()))["methods"]
    rows = [
        [name, *(describe(model["methods"][name]) for model in models.values())] for name in methods
    ]
    return to_markdown(["method", *models], rows)


def show_predictions(models: dict[str, Any]) -> str:
    """What a check says of quality: the mean over methods of the difference between maps that fail
    and the others."""
    rows = []
    for name, model in models.items():
        groups: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {
            "does not agree, or else agrees": []
        }
        for method in model["methods"].values():
            groups["does not agree, or else agrees"].append(
                (method["verdicts"]["does not agree"], method["verdicts"]["agrees"])
            )
            for check, found in method["checks not made"].items():
                groups.setdefault(check, []).append((found["warned"], found["not warned"]))
        for check, pairs in groups.items():
            both = [
                pair
                for pair in pairs
                if all(each["fraction"] * model["images"] >= FEWEST for each in pair)
            ]
            cells = []
            for what in ("leave_one_out_correlation", "gain", "on_glyph"):
                differences = [
                    failed[what] - passed[what] for failed, passed in both if what in failed
                ]
                cells.append(f"{sum(differences) / len(differences):+.2f}" if differences else "–")
            fails = f"{100 * sum(failed['fraction'] for failed, _ in pairs) / len(pairs):.0f} %"
            rows.append([name, check, fails, f"{len(both)} of {len(pairs)}", *cells])
    return to_markdown(
        ["model", "check", "fails", "methods", "ρ leave-one-out", "gain", "on the glyph"], rows
    )


def show(models: dict[str, Any]) -> str:
    """The tables of research/record.md."""
    tables = [
        show_false_alarms(models),
        show_verdicts(models, "leave_one_out_correlation"),
        show_verdicts(models, "gain"),
        show_predictions(models),
    ]
    return "\n\n".join(tables)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["planted"], help="run directories; planted")
    parser.add_argument(
        "--images", type=int, default=128, help="of each model, classified correctly"
    )
    parser.add_argument("--seeds", type=int, default=0, help="of randomised weights")
    parser.add_argument("--output", type=Path, help=f"folder for {NAME}-<machine>.json")
    options = parser.parse_args()
    machine = describe_conditions("cpu")
    for model in options.models:
        result = measure_model(model, options.images, options.seeds)
        name = Path(model.partition("=")[0]).name
        print(show({name: result}), flush=True)
        if options.output:
            # models that were measured before stay
            path = find_result(options.output, NAME, machine)
            before = json.loads(path.read_text())["models"] if path.exists() else {}
            models = before | {name: {**result, "machine": machine}}
            write_result(options.output, NAME, {"machine": machine, "models": models})
            path.with_suffix(".md").write_text(show(models) + "\n")


if __name__ == "__main__":
    main()
