"""Measure every method beside baselines on the same images: the work behind `vit faithfulness`."""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from vit.analysis.faithfulness.baselines import RANDOM_MAPS, baseline_maps
from vit.analysis.faithfulness.map_metrics import PerImage, find_order
from vit.bundle import Bundle
from vit.explanation.capture.forward import Grid, PatchMaps
from vit.explanation.capture.tokens import can_drop_tokens
from vit.explanation.checks.sanity_checks import randomise_weights, rank_correlation
from vit.explanation.checks.token_ablation import (
    FRACTIONS,
    Fill,
    Predict,
    area_under,
    build_predictor,
    deletion_curve,
    leave_one_out,
    tile_patches,
)
from vit.explanation.methods.registry import compute_maps
from vit.explanation.targets import CLASS, Target
from vit.model.logits import compute_logits
from vit.runtime.device import Precision, choose_precision, copy_to_host
from vit.runtime.tensors import Images

# occlusion of each patch: a reference to compare with, not an upper bound
LEAVE_ONE_OUT = "leave-one-out"
# what methods are measured beside
BASELINES = ("random", "centre", "edges", LEAVE_ONE_OUT)
# ways to paint patches over, beside leaving their tokens out, and the metric of each; no method
# contains the second
PAINTED: dict[Fill, str] = {"mean": "srg_mean", "blur": "srg_blur"}
# on grids of at least so many patches a side, leave-one-out leaves out groups: what a single patch
# changes there is next to nothing, and each would take a forward pass
LARGE_GRID = 14
GROUP_SIDE = 2
# in a limited time
LARGER_GROUP_SIDE = 4
MIN_IMAGES = 8
# fractions of the patches, of insertion curves
KEPT = tuple((step + 1) / 10 for step in range(10))


@dataclass
class Measurement:
    """Numbers of each image by metric and map, and how long the maps took."""

    values: dict[str, dict[str, PerImage]] = field(default_factory=lambda: defaultdict(dict))
    # an image, forward pass included, by method
    milliseconds: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass
class Benchmark:
    """Methods and baselines for one class of each image; `measure` does the work.

    Args:
        bundle: the model, on its device.
        images: as the model takes them, [n, 3, H, W].
        classes: of each image the class that is explained.
        methods: names in `METHODS`.
        target: what is explained and measured of the class.
        batch_size: images at a time.
        filled: how many of the images, the first ones, have patches painted over.
        few: how many are explained with randomised weights.
        seed: of the random maps.
        advance: is called with the forward passes done and what they were for.
    """

    bundle: Bundle
    images: Images
    classes: Int[Tensor, " n"]
    methods: Sequence[str]
    target: Target = CLASS
    batch_size: int = 64
    filled: int = 64
    few: int = 16
    seed: int = 0
    advance: Callable[[float, str], object] = lambda forwards, task: None

    def __post_init__(self) -> None:
        self.model = self.bundle.model
        self.device = next(self.model.parameters()).device
        self.images = self.images.to(self.device)
        self.classes = self.classes.to(self.device)
        self.grid: Grid = (0, 0)
        self.result = Measurement()
        # of forward passes without patches: means of areas differ by less than 0.002 by it
        self.precision = choose_precision("auto", self.device)
        # of the curves' fractions, every so many are measured
        self.curve_step = 1
        # images whose maps the plan times
        self.num_timed = self.few // 2
        # of the maps of one image by all methods, in forward passes
        self._cost = 0.0
        # of what leave-one-out leaves out together
        self.group_side = 1

    @property
    def plan(self) -> tuple[float, float]:
        """What `measure` will take, from the first images: forward passes of an image, and
        seconds."""
        forward_seconds = self._forward_seconds
        forwards = self._count_forwards()
        return forwards, forwards * forward_seconds

    def fit(self, seconds: float) -> None:
        """Measure what takes about so long: larger groups, curves of half as many points, fewer
        images, at least `MIN_IMAGES`, and half of those with patches painted over and with
        randomised weights. A note says what is left out."""
        started = time.perf_counter()
        asked = len(self.images)
        # the plan itself must not take the time
        self.num_timed = 1
        forward_seconds = self._forward_seconds
        seconds_left = seconds - (time.perf_counter() - started)

        def takes_longer() -> bool:
            return self._count_forwards() * forward_seconds > seconds_left

        if takes_longer() and self.group_side > 1:
            self.group_side = LARGER_GROUP_SIDE
        if takes_longer():
            self.curve_step = 2
            self.result.notes.append("deletion and insertion curves have half of their points")
        while takes_longer() and len(self.images) > MIN_IMAGES:
            count = max(int(0.9 * len(self.images)), MIN_IMAGES)
            self.images = self.images[:count]
            self.classes = self.classes[:count]
            self.filled = min(self.filled, count)
        if takes_longer():
            self.filled = self.few = MIN_IMAGES // 2
            self.result.notes.append(
                f"patches are painted over in {self.filled} images, and as many are explained with"
                " randomised weights"
            )
        if len(self.images) < asked:
            self.result.notes.append(
                f"{len(self.images)} of {asked} images fit into {seconds / 60:g} minutes"
            )
        if takes_longer():
            minutes = self._count_forwards() * forward_seconds / 60
            self.result.notes.append(
                f"fewer than {MIN_IMAGES} images say nothing, and these take about"
                f" {minutes:.0f} minutes: name fewer methods"
            )

    @cached_property
    def _forward_seconds(self) -> float:
        """Of one image; finds what the maps cost, and the grid."""
        # without recording attention
        batch = self.images[: self.batch_size]
        forward_seconds = _time(partial(compute_logits, self.model, batch)) / len(batch)

        # each method by itself, then all together: they share a forward pass
        images = self.images[: self.num_timed]
        classes = self.classes[: self.num_timed]
        for method in self.methods:
            seconds = _time(partial(self._explain, self.model, images, classes, [method]))
            self.result.milliseconds[method] = 1000 * seconds / len(images)
        explain_all = partial(self._explain, self.model, images, classes, self.methods)
        rows, columns = explain_all()[self.methods[0]].shape[1:]
        self.grid = (rows, columns)
        self.group_side = GROUP_SIDE if min(self.grid) >= LARGE_GRID else 1
        # known from here on: what the plan itself explains is not counted as work done
        self._cost = _time(explain_all) / len(images) / forward_seconds
        return forward_seconds

    def _count_forwards(self) -> float:
        count = len(self.images)
        few = min(self.few, count)
        num_maps = len(self.methods) + len(BASELINES)
        # of both curves; two more points keep every patch, which is computed once
        points = len(self._removed_fractions) + len(self._kept_fractions) - 2
        forwards = (self._cost + len(self._groups)) * (count + few)
        # dropping tokens, half a pass in the mean, is measured of every random map
        forwards += (num_maps + RANDOM_MAPS - 1) * count * points / 2
        forwards += len(PAINTED) * num_maps * min(self.filled, count) * points
        return forwards

    @property
    def _removed_fractions(self) -> tuple[float, ...]:
        """Of the patches, of deletion curves."""
        return FRACTIONS[:: self.curve_step]

    @property
    def _kept_fractions(self) -> tuple[float, ...]:
        """Of the patches, of insertion curves, the last of which is all."""
        return KEPT[self.curve_step - 1 :: self.curve_step]

    @property
    def _groups(self) -> Bool[Tensor, "m P"]:
        """What leave-one-out leaves out together."""
        return tile_patches(self.grid, self.group_side)

    @torch.no_grad()
    def measure(self) -> Measurement:
        """Measure everything."""
        # sets the grid, and verifies the capture of this architecture
        assert self._forward_seconds
        if self.group_side > 1:
            rows, columns = self.grid
            self.result.notes.append(
                f"leave-one-out leaves out groups of {self.group_side} × {self.group_side} patches:"
                f" of {rows} × {columns}, a single one changes next to nothing"
            )
        maps = self._explain(self.model, self.images, self.classes)
        started = time.perf_counter()
        maps[LEAVE_ONE_OUT] = self._leave_one_out(self.model, self.images, self.classes)
        seconds = time.perf_counter() - started
        self.result.milliseconds[LEAVE_ONE_OUT] = 1000 * seconds / len(self.images)

        self._measure_removals(maps)
        self._measure_randomised_weights(maps)
        return self.result

    def _measure_removals(self, maps: dict[str, PatchMaps]) -> None:
        """What removing patches does in the order of each map, of all maps at once."""
        # random maps have one name
        maps_by_name = {name: [values] for name, values in maps.items()}
        maps_by_name |= baseline_maps(self.images, self.grid, seed=self.seed)
        names = [name for name, several in maps_by_name.items() for _ in several]
        stacked = torch.stack([values for several in maps_by_name.values() for values in several])

        reference = self._average(maps[LEAVE_ONE_OUT]).repeat(len(names), 1, 1)
        correlation = rank_correlation(self._average(stacked.flatten(0, 1)), reference)
        self._record("leave_one_out_correlation", names, correlation)

        if not can_drop_tokens(self.model):
            self.result.notes.append(
                f"{type(self.model).__name__} needs all of its tokens: for dropped ones, patches"
                " have the mean fill"
            )
        deletion, insertion = self._compute_areas(stacked, fill="auto")
        self._record("srg", names, insertion - deletion)
        self._record("deletion", names, deletion)
        self._record("insertion", names, insertion)

        # painting keeps every token, so that it costs more: fewer images, one random map
        one_of_each = torch.stack([several[0][: self.filled] for several in maps_by_name.values()])
        for fill, metric in PAINTED.items():
            deletion, insertion = self._compute_areas(one_of_each, fill=fill)
            self._record(metric, list(maps_by_name), insertion - deletion)

    def _average(self, maps: PatchMaps) -> Float[Tensor, "B 1 m"]:
        """The mean of each group that leave-one-out leaves out."""
        groups = self._groups.to(maps)
        return (maps.flatten(1) @ groups.T / groups.sum(dim=1))[:, None]

    def _compute_areas(
        self, maps: Float[Tensor, "M n rows columns"], *, fill: Fill
    ) -> tuple[Float[Tensor, " Mn"], Float[Tensor, " Mn"]]:
        """Areas below the probability while patches are removed in the maps' order (deletion), and
        while they are added to nothing (insertion; Petsiuk et al. 2018). Their difference is the
        symmetric relevance gain (Blücher et al. 2024)."""
        count = maps.shape[1]
        predict = self._build_predictor(
            self.model,
            self.images[:count],
            self.classes[:count],
            task=f"deletion and insertion, {fill}",
            fill=fill,
            precision=self.precision,
        )
        order = find_order(maps.flatten(0, 1))
        removed = self._removed_fractions
        deletion_curves = deletion_curve(predict, order, fractions=removed)

        kept = self._kept_fractions
        removed_first = [1 - fraction for fraction in kept]
        insertion_curves = deletion_curve(predict, order.flip(1), fractions=removed_first)
        return (
            area_under(deletion_curves, fractions=removed),
            area_under(insertion_curves, fractions=kept),
        )

    def _measure_randomised_weights(self, maps: dict[str, PatchMaps]) -> None:
        """Rank correlation with maps of the model with randomised weights (Adebayo et al. 2018)."""
        images = self.images[: self.few]
        classes = self.classes[: self.few]
        randomised = randomise_weights(self.model)
        randomised_maps = self._explain(randomised, images, classes)
        randomised_maps[LEAVE_ONE_OUT] = self._leave_one_out(randomised, images, classes)

        values = self.result.values["randomised_correlation"]
        for name, other_maps in randomised_maps.items():
            correlation = rank_correlation(maps[name][: self.few], other_maps)
            values[name] = correlation.abs().cpu().numpy()
        # these don't depend on the model
        for baseline in ("centre", "edges"):
            values[baseline] = np.ones(len(images), dtype=np.float32)

    def _explain(
        self,
        model: nn.Module,
        images: Images,
        classes: Int[Tensor, " n"],
        methods: Sequence[str] | None = None,
    ) -> dict[str, PatchMaps]:
        """The maps of each method, by default of all, [n, rows, columns]."""
        batches = []
        batch_classes = torch.split(classes, self.batch_size)
        for batch, targets in zip(torch.split(images, self.batch_size), batch_classes, strict=True):
            _, _, maps = compute_maps(
                model,
                batch,
                methods=methods or self.methods,
                choose_targets=partial(_as_column, targets),
                target=self.target,
                # `plan` did it for this architecture
                verify=methods is not None,
            )
            batches.append(maps)
            self.advance(len(batch) * self._cost, "maps")
        return {
            parts[0].method.name: torch.cat([part.values[:, 0] for part in parts])
            for parts in zip(*batches, strict=True)
        }

    def _leave_one_out(
        self, model: nn.Module, images: Images, classes: Int[Tensor, " n"]
    ) -> PatchMaps:
        drops = leave_one_out(
            self._build_predictor(model, images, classes, task=LEAVE_ONE_OUT),
            batch=len(images),
            groups=self._groups,
            device=images.device,
        )
        # each patch has what its group loses
        return torch.unflatten(drops @ self._groups.to(drops), 1, self.grid)

    def _build_predictor(
        self,
        model: nn.Module,
        images: Images,
        classes: Int[Tensor, " n"],
        *,
        task: str,
        fill: Fill = "auto",
        precision: Precision = "float32",
    ) -> Predict:
        return build_predictor(
            model,
            images,
            classes,
            grid=self.grid,
            target=self.target,
            fill=fill,
            precision=precision,
            batch_size=self.batch_size,
            on_forward=lambda forwards: self.advance(forwards, task),
        )

    def _record(self, metric: str, names: Sequence[str], values: Float[Tensor, " Mn"]) -> None:
        """Keep the values of each map; of maps with the same name their mean."""
        values_by_map = torch.unflatten(values, 0, (len(names), -1))
        for name in dict.fromkeys(names):
            rows = [row for row, other in zip(values_by_map, names, strict=True) if other == name]
            self.result.values[metric][name] = torch.stack(rows).mean(dim=0).cpu().numpy()


def _as_column(classes: Int[Tensor, " n"], logits: Tensor) -> Int[Tensor, "n 1"]:
    """The classes to explain, whatever the model predicts."""
    return classes[:, None]


def _time(compute: Callable[[], object]) -> float:
    """Seconds that it takes, the second time."""
    compute()
    started = time.perf_counter()
    # an accelerator has finished then
    copy_to_host(compute())
    return time.perf_counter() - started
