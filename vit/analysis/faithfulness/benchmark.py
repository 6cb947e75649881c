"""Measure methods and baselines on the same images: the work behind `vit faithfulness`."""

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
from vit.explanation.capture.forward import PatchMaps
from vit.explanation.capture.reader import read_model
from vit.explanation.capture.tokens import Grid
from vit.explanation.checks.sanity_checks import randomise_weights, rank_correlation
from vit.explanation.checks.token_ablation import (
    FRACTIONS,
    Fill,
    Predict,
    area_under,
    build_probability,
    build_removal,
    deletion_curve,
    leave_one_out,
    tile_patches,
)
from vit.explanation.methods.maps import compute_maps
from vit.explanation.targets import CLASS, Target
from vit.model.logits import compute_logits
from vit.runtime.device import Precision, choose_precision, copy_to_host
from vit.runtime.tensors import Images

# an interval over fewer images says nothing
MIN_IMAGES = 8
# occlusion of each patch: a reference, not an upper bound
LEAVE_ONE_OUT = "leave-one-out"
# methods are compared with these
BASELINES = ("random", "centre", "edges", LEAVE_ONE_OUT)
# fills with which patches are painted over, in addition to dropping their tokens, and the metric of
# each; no method is built on the second
PAINTED: dict[Fill, str] = {"mean": "srg_mean", "blur": "srg_blur"}
# on grids with at least this many patches a side leave-one-out leaves out groups: a single patch
# changes hardly anything there, and each would take a forward pass
LARGE_GRID = 14
GROUP_SIDE = 2
# the same under a time limit
LARGER_GROUP_SIDE = 4
# fractions of the patches that insertion curves keep
KEPT = tuple((step + 1) / 10 for step in range(10))


@dataclass
class Measurement:
    """The numbers of every image.

    Attributes:
        values: By metric and map.
        milliseconds: Time for the map of one image by method, forward pass included.
        notes: Sentences about what was measured and how.
    """

    values: dict[str, dict[str, PerImage]] = field(default_factory=lambda: defaultdict(dict))
    milliseconds: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass
class Benchmark:
    """A benchmark of methods and baselines for one class of each image; `measure` does the work.

    Args:
        bundle: The model, on its device.
        images: Model inputs [n, 3, H, W].
        classes: The class of each image that is explained.
        methods: Names in `METHODS`.
        target: The number of the class that is explained and measured.
        batch_size: Images at a time.
        filled: Number of images, the first ones, in which patches are painted over.
        few: Number of images that are explained with randomised weights.
        seed: Seed of the random maps.
        advance: Called with the forward passes done and their purpose.

    Attributes:
        grid: Rows and columns of patches, known once the plan was made.
        precision: Precision of the forward passes without patches; areas change by less than 0.002.
        curve_step: 1: all fractions of the curves are measured, 2: every second one.
        num_timed: Images whose maps the plan times.
        group_side: Patches on each side of the groups that leave-one-out leaves out.
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
        self.images = self.images.to(self.bundle.device)
        self.classes = self.classes.to(self.bundle.device)
        self.grid: Grid = (0, 0)
        self.result = Measurement()
        self.precision = choose_precision("auto", self.bundle.device)
        self.curve_step = 1
        self.num_timed = self.few // 2
        # cost of the maps of one image by all methods, in forward passes
        self._cost = 0.0
        self.group_side = 1

    @property
    def plan(self) -> tuple[float, float]:
        """The work of `measure`, estimated on the first images: forward passes of an image, and
        seconds."""
        forward_seconds = self._forward_seconds
        forwards = self._count_forwards()
        return forwards, forwards * forward_seconds

    def fit(self, seconds: float) -> None:
        """Reduce the work to a time limit, in this order: larger groups, curves with half of their
        points, fewer images (at least `MIN_IMAGES`), and half of them with patches painted over and
        with randomised weights. Notes say what is left out."""
        started = time.perf_counter()
        asked = len(self.images)
        # the plan itself must not use up the time
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
                f"{self.filled} images have patches painted over, and {self.few} are explained with"
                " randomised weights"
            )
        if len(self.images) < asked:
            self.result.notes.append(
                f"{len(self.images)} of {asked} images fit into {seconds / 60:g} minutes"
            )
        if takes_longer():
            minutes = self._count_forwards() * forward_seconds / 60
            self.result.notes.append(
                f"{MIN_IMAGES} images, the fewest that can be measured, take about {minutes:.0f}"
                " minutes; name fewer methods"
            )

    @cached_property
    def _forward_seconds(self) -> float:
        """Seconds of a forward pass of one image without a record of attention. Finds the cost of the
        maps, and the grid."""
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
        # set last: maps that the plan itself makes are not counted as work done
        self._cost = _time(explain_all) / len(images) / forward_seconds
        return forward_seconds

    def _count_forwards(self) -> float:
        count = len(self.images)
        few = min(self.few, count)
        num_maps = len(self.methods) + len(BASELINES)
        # both curves; two more points keep every patch, which is computed once
        points = len(self._removed_fractions) + len(self._kept_fractions) - 2
        forwards = (self._cost + len(self._groups)) * (count + few)
        # with dropped tokens, half a pass on average, every random map is measured
        forwards += (num_maps + RANDOM_MAPS - 1) * count * points / 2
        forwards += len(PAINTED) * num_maps * min(self.filled, count) * points
        return forwards

    @property
    def _removed_fractions(self) -> tuple[float, ...]:
        """Fractions of the patches that deletion curves remove."""
        return FRACTIONS[:: self.curve_step]

    @property
    def _kept_fractions(self) -> tuple[float, ...]:
        """Fractions of the patches that insertion curves keep; the last one is all."""
        return KEPT[self.curve_step - 1 :: self.curve_step]

    @property
    def _groups(self) -> Bool[Tensor, "m P"]:
        """The patches that leave-one-out leaves out together."""
        return tile_patches(self.grid, self.group_side)

    @torch.no_grad()
    def measure(self) -> Measurement:
        """Measure everything."""
        # this sets the grid and verifies the capture of this architecture
        assert self._forward_seconds
        if self.group_side > 1:
            rows, columns = self.grid
            self.result.notes.append(
                f"leave-one-out leaves out groups of {self.group_side} × {self.group_side} patches:"
                f" a single one of {rows} × {columns} changes hardly anything"
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
        """Remove patches in the order of each map, for all maps at once."""
        # several random maps have one name
        maps_by_name = {name: [values] for name, values in maps.items()}
        maps_by_name |= baseline_maps(self.images, self.grid, seed=self.seed)
        names = [name for name, several in maps_by_name.items() for _ in several]
        stacked = torch.stack([values for several in maps_by_name.values() for values in several])

        reference = self._average(maps[LEAVE_ONE_OUT]).repeat(len(names), 1, 1)
        correlation = rank_correlation(self._average(stacked.flatten(0, 1)), reference)
        self._record("leave_one_out_correlation", names, correlation)

        if not read_model(self.model, self.images).can_drop_tokens:
            self.result.notes.append(
                f"{type(self.model).__name__} needs all of its tokens: patches get the mean fill"
                " instead of being dropped"
            )
        deletion, insertion = self._compute_areas(stacked, fill="auto")
        self._record("srg", names, insertion - deletion)
        self._record("deletion", names, deletion)
        self._record("insertion", names, insertion)

        # painting keeps every token and costs more: it uses fewer images and one random map
        one_of_each = torch.stack([several[0][: self.filled] for several in maps_by_name.values()])
        for fill, metric in PAINTED.items():
            deletion, insertion = self._compute_areas(one_of_each, fill=fill)
            self._record(metric, list(maps_by_name), insertion - deletion)

    def _average(self, maps: PatchMaps) -> Float[Tensor, "B 1 m"]:
        """Average each group that leave-one-out leaves out."""
        groups = self._groups.to(maps)
        return (maps.flatten(1) @ groups.T / groups.sum(dim=1))[:, None]

    def _compute_areas(
        self, maps: Float[Tensor, "M n rows columns"], *, fill: Fill
    ) -> tuple[Float[Tensor, " Mn"], Float[Tensor, " Mn"]]:
        """Compute the areas under the probability while patches are removed in the order of a map
        (deletion), and while they are added to an empty image (insertion; Petsiuk et al. 2018).
        Insertion minus deletion is the symmetric relevance gain (Blücher et al. 2024)."""
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
        # insertion is deletion in the opposite order: the most relevant patches are removed last
        insertion_curves = deletion_curve(predict, order.flip(1), fractions=removed_first)
        return (
            area_under(deletion_curves, fractions=removed),
            area_under(insertion_curves, fractions=kept),
        )

    def _measure_randomised_weights(self, maps: dict[str, PatchMaps]) -> None:
        """Compute the rank correlation with the maps of randomised weights (Adebayo et al. 2018)."""
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
        """Compute the maps [n, rows, columns] of some methods, by default of all."""
        batches = []
        batch_classes = torch.split(classes, self.batch_size)
        for batch, targets in zip(torch.split(images, self.batch_size), batch_classes, strict=True):
            _, _, maps = compute_maps(
                model,
                batch,
                methods=methods or self.methods,
                target=self.target.with_classes(targets),
                # the plan has verified this architecture
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
        # each patch gets the drop of its group
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
        compute_kept = build_removal(
            model,
            images,
            grid=self.grid,
            fill=fill,
            precision=precision,
            batch_size=self.batch_size,
            on_forward=lambda forwards: self.advance(forwards, task),
        )
        return build_probability(compute_kept, classes, target=self.target)

    def _record(self, metric: str, names: Sequence[str], values: Float[Tensor, " Mn"]) -> None:
        """Keep the values of each map, or their mean for maps with the same name."""
        values_by_map = torch.unflatten(values, 0, (len(names), -1))
        for name in dict.fromkeys(names):
            rows = [row for row, other in zip(values_by_map, names, strict=True) if other == name]
            self.result.values[metric][name] = torch.stack(rows).mean(dim=0).cpu().numpy()


def _time(compute: Callable[[], object]) -> float:
    """Measure the seconds of the second run."""
    compute()
    started = time.perf_counter()
    # this waits for an accelerator
    copy_to_host(compute())
    return time.perf_counter() - started
