"""Measure every method beside baselines on the same images: the work behind `vit faithfulness`."""

import copy
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from vit.bundle import Bundle
from vit.explanation.capture.readout import Grid, Images, PatchMaps
from vit.explanation.capture.tokens import can_drop_tokens
from vit.explanation.faithfulness import grid_pointing, token_ablation
from vit.explanation.faithfulness.baselines import RANDOM_MAPS, baseline_maps
from vit.explanation.faithfulness.map_metrics import KEPT, REMOVED, SACO_GROUPS, PerImage, compute_saco, find_order
from vit.explanation.faithfulness.sanity_checks import randomise_weights, rank_correlation
from vit.explanation.methods.table import MapOptions, compute_maps
from vit.model.logits import compute_logits
from vit.runtime.device import Precision, autocast, choose_precision

LEAVE_ONE_OUT = "leave-one-out"  # occlusion of each patch: a reference to compare with, not an upper bound
BASELINES = ("random", "centre", "edges", LEAVE_ONE_OUT)  # what methods are measured beside
FRACTIONS_OF_BLOCKS = (0.0, 0.34, 0.67, 1.0)  # randomised, from the last one; the head always is
_NOISE, _NOISY_COPIES = 0.02, 10  # of max-sensitivity, in the range 0 to 1 of pixels


@dataclass
class Measurement:
    """Per-image numbers by metric and method, and how long they took."""

    values: dict[str, dict[str, PerImage]] = field(default_factory=lambda: defaultdict(dict))
    # by method and kind, deletion or insertion: [n, steps]
    curves: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)
    # mean |rank correlation| with the trained model's map at each of `FRACTIONS_OF_BLOCKS`, by method
    cascade: dict[str, list[float]] = field(default_factory=dict)
    milliseconds: dict[str, float] = field(default_factory=dict)  # an image, forward pass included, by method
    notes: list[str] = field(default_factory=list)


@dataclass
class Benchmark:
    """Methods and baselines for the given class of each image, as the model takes it; `measure` does the work."""

    bundle: Bundle
    images: Images
    classes: Int[Tensor, " n"]
    methods: Sequence[str]
    options: MapOptions = field(default_factory=MapOptions)
    batch_size: int = 64
    # how many of the images, the first ones, for what costs more:
    grouped: int = 64  # SaCo
    filled: int = 64  # patches filled with the mean
    blurred: int = 8
    few: int = 16  # randomised weights and sensitivity
    mosaics: int = 12  # of the grid pointing game
    seed: int = 0
    advance: Callable[[float, str], object] = lambda forwards, task: None  # forward passes done

    def __post_init__(self) -> None:
        self.model = self.bundle.model
        self.device = next(self.model.parameters()).device
        self.images, self.classes = self.images.to(self.device), self.classes.to(self.device)
        self.maps: dict[str, PatchMaps] = {}  # of the methods and of leave-one-out, every image
        self.grid: Grid = (0, 0)
        self.result = Measurement()
        # of forward passes without patches: means of areas then differ by less than 0.002, those of SaCo by 0.01
        self.precision = choose_precision("auto", self.device)
        self._task, self._cost = "", 0.0  # what is being measured; forward passes that all maps of an image take

    @cached_property
    def plan(self) -> tuple[float, float]:
        """What `measure` will take, from the first images: forward passes of an image, and seconds."""
        images, classes = self.images[: self.few // 2], self.classes[: self.few // 2, None]
        whole = self.images[: self.batch_size]
        forward = _time(partial(compute_logits, self.model, whole)) / len(whole)
        with autocast(self.device, self.precision):
            faster = _time(partial(compute_logits, self.model, whole)) / len(whole)
        for method in self.methods:
            explain = partial(self._compute_maps, self.model, images, classes, methods=[method])
            self.result.milliseconds[method] = 1000 * _time(explain) / len(images)
        explain = partial(self._compute_maps, self.model, images, classes, methods=self.methods)
        self._cost = _time(explain) / len(images) / forward
        rows, columns = explain().shape[-2:]
        self.grid, patches, count = (rows, columns), rows * columns, len(self.images)
        maps = len(self.methods) + 4  # random maps have one more for each but the first
        points = len(REMOVED) + len(KEPT) - 2  # of curves; two more keep every patch
        work = self._cost * (count + self.few * (len(FRACTIONS_OF_BLOCKS) + _NOISY_COPIES) + 16 * self.mosaics)
        work += patches * (count + self.few + 4 * self.mosaics)
        removals = (maps + RANDOM_MAPS - 1) * count * points / 2
        removals += maps * (min(self.grouped, count) * SACO_GROUPS * 0.9)
        removals += maps * points * (min(self.filled, count) + min(self.blurred, count))
        return work + removals, work * forward + removals * faster

    @torch.no_grad()
    def measure(self) -> Measurement:
        """Everything."""
        assert self.plan
        self._measure_maps()
        self._measure_removals()
        self._measure_randomised_weights()
        self._measure_sensitivity()
        self._measure_pointing()
        return self.result

    def _measure_maps(self) -> None:
        self._task = "maps"
        of_methods = self._explain(self.model, self.images, self.classes[:, None])
        self.maps = {method: maps[:, 0] for method, maps in of_methods.items()}
        self._task, started = LEAVE_ONE_OUT, time.perf_counter()
        self.maps[LEAVE_ONE_OUT] = self._leave_one_out(self.model, self.images, self.classes)
        self.result.milliseconds[LEAVE_ONE_OUT] = 1000 * (time.perf_counter() - started) / len(self.images)

    def _measure_removals(self) -> None:
        """What removing patches does, for all maps at once."""
        every = {name: [maps] for name, maps in self.maps.items()}
        every |= baseline_maps(self.images, self.grid, seed=self.seed)
        names = [name for name, several in every.items() for _ in several]
        maps = torch.stack([of_one for several in every.values() for of_one in several])  # [M, n, rows, columns]
        reference = self.maps[LEAVE_ONE_OUT].repeat(len(names), 1, 1)
        self._keep("leave_one_out_correlation", names, rank_correlation(maps.flatten(0, 1), reference))
        if not can_drop_tokens(self.model):
            name = type(self.model).__name__
            self.result.notes.append(f"{name} needs all of its tokens: for dropped ones, patches have the mean fill")
        self._measure_curves(names, maps, fill="auto")
        names = list(every)  # one random map from here on
        maps = torch.stack([several[0] for several in every.values()])
        self._measure_curves(names, maps[:, : self.filled], fill="mean")
        self._measure_curves(names, maps[:, : self.blurred], fill="blur")
        self._task, some = "SaCo", slice(self.grouped)
        score = self._build_score(self.model, self.images[some], self.classes[some], precision=self.precision)
        self._keep("saco", names, compute_saco(lambda kept: score(kept)[:, 0], maps[:, some].flatten(0, 1)))

    def _measure_curves(self, names: list[str], maps: Float[Tensor, "M n rows columns"], *, fill: str) -> None:
        """Areas below probability and logit while patches are removed in the maps' order and while they are added to
        nothing; their difference is the symmetric relevance gain (Blücher et al. 2024)."""
        suffix, count = "" if fill == "auto" else f"_{fill}", maps.shape[1]
        self._task = f"deletion and insertion{suffix.replace('_', ', ')}"
        of_images = (self.model, self.images[:count], self.classes[:count])
        score = self._build_score(*of_images, fill=fill, precision=self.precision)
        order = find_order(maps.flatten(0, 1))
        deletion = token_ablation.deletion_curve(score, order, fractions=REMOVED)  # [M·n, steps, 2]
        insertion = token_ablation.deletion_curve(score, order.flip(1), fractions=[1 - kept for kept in KEPT])
        for column, of_score in enumerate(("", "_logit")):
            lower = token_ablation.area_under(deletion[..., column], fractions=REMOVED)
            upper = token_ablation.area_under(insertion[..., column], fractions=KEPT)
            self._keep(f"srg{of_score}{suffix}", names, upper - lower)
            if not of_score:
                self._keep(f"deletion{suffix}", names, lower)
                self._keep(f"insertion{suffix}", names, upper)
        if fill == "auto":
            for name in dict.fromkeys(names):
                of_kinds = {"deletion": deletion, "insertion": insertion}
                self.result.curves[name] = {k: _mean(names, name, of[..., 0]) for k, of in of_kinds.items()}

    def _measure_randomised_weights(self) -> None:
        """Rank correlation with maps of the model with weights randomised from its head down (Adebayo et al. 2018)."""
        self._task = "randomised weights"
        images, classes = self.images[: self.few], self.classes[: self.few]
        models = [randomise_weights(self.model, fraction_of_blocks=fraction) for fraction in FRACTIONS_OF_BLOCKS]
        stages = [self._explain(model, images, classes[:, None]) for model in models]
        values = self.result.values["randomised_correlation"]
        for method in self.methods:
            found = [rank_correlation(self.maps[method][: self.few], maps[method][:, 0]).abs() for maps in stages]
            self.result.cascade[method] = [float(stage.mean()) for stage in found]
            values[method] = found[-1].cpu().numpy()
        drops = self._leave_one_out(models[-1], images, classes)
        values[LEAVE_ONE_OUT] = rank_correlation(self.maps[LEAVE_ONE_OUT][: self.few], drops).abs().cpu().numpy()
        for baseline in ("centre", "edges"):  # which don't depend on the model
            values[baseline] = np.ones(len(images), dtype=np.float32)

    def _measure_sensitivity(self) -> None:
        """Max-sensitivity (Yeh et al. 2019, eq. 4) under uniform noise of 2 % of the pixel range: the largest distance
        of a map of the noisy image, relative to the larger of the two maps' norms: 0 to 2, also for maps of zeros."""
        self._task, images, classes = "sensitivity", self.images[: self.few], self.classes[: self.few, None]
        generator = torch.Generator().manual_seed(self.seed)
        reach = _NOISE / torch.tensor(self.bundle.preprocess.std, device=images.device).view(3, 1, 1)
        uniform = (torch.rand(images.shape, generator=generator).to(images) for _ in range(_NOISY_COPIES))
        copies = [self._explain(self.model, images + (2 * of_copy - 1) * reach, classes) for of_copy in uniform]
        for method in self.methods:
            whole, distances = self.maps[method][: self.few].flatten(1), []
            for of_copy in copies:
                moved = of_copy[method].flatten(1)
                norm = torch.maximum(whole.norm(dim=1), moved.norm(dim=1)).clamp_min(1e-30)
                distances.append((moved - whole).norm(dim=1) / norm)
            self.result.values["sensitivity"][method] = torch.stack(distances).amax(dim=0).cpu().numpy()

    def _measure_pointing(self) -> None:
        """The grid pointing game, for models that take another number of patches and let tokens be left out."""
        self._task = "grid pointing"
        if not (hasattr(self.model, "set_input_size") and can_drop_tokens(self.model)):
            name = type(self.model).__name__
            self.result.notes.append(f"no grid pointing: {name} does not take another number of patches")
            return
        mosaics, targets = grid_pointing.build_mosaics(self.images, self.classes, count=self.mosaics, seed=self.seed)
        if len(mosaics) == 0:
            self.result.notes.append("no grid pointing: the images show fewer than four classes")
            return
        model: Any = copy.deepcopy(self.model)
        model.set_input_size((mosaics.shape[-2], mosaics.shape[-1]))
        grid = (2 * self.grid[0], 2 * self.grid[1])
        classify = self._build_classifier(model, mosaics, grid=grid)
        top = classify(torch.arange(grid[0] * grid[1], device=mosaics.device).expand(len(mosaics), -1)).topk(4, dim=1)
        recognised = 100 * float((top.indices[:, :, None] == targets[:, None, :]).any(dim=1).float().mean())
        self.result.notes.append(f"mosaics: {recognised:.0f} % of the quarters' classes are in the top four")
        maps: dict[str, Sequence[PatchMaps]] = {
            method: found.unbind(dim=1) for method, found in self._explain(model, mosaics, targets).items()
        }
        baselines = baseline_maps(mosaics, grid, seed=self.seed)
        maps |= {name: baselines[name][:1] * 4 for name in ("random", "centre", "edges")}
        maps[LEAVE_ONE_OUT] = grid_pointing.leave_blocks_out(classify, targets, grid=grid).unbind(dim=1)
        for name, of_quarters in maps.items():
            self.result.values["grid_pointing"][name] = grid_pointing.point(of_quarters).cpu().numpy()

    def _explain(self, model: nn.Module, images: Images, targets: Int[Tensor, "n T"]) -> dict[str, Tensor]:
        """Each method's maps of the T classes of each image [n, T, rows, columns], from one forward pass."""
        batches = []
        size, work = self.batch_size, self._cost * images[0].numel() / self.images[0].numel()
        for batch, classes in zip(torch.split(images, size), torch.split(targets, size), strict=True):
            # `plan` verified the capture of this architecture
            batches.append(self._compute_maps(model, batch, classes, methods=self.methods, verify=False))
            self.advance(classes.numel() * work, self._task)
        return dict(zip(self.methods, torch.cat(batches, dim=1), strict=True))

    def _compute_maps(
        self,
        model: nn.Module,
        images: Images,
        targets: Int[Tensor, "b T"],
        *,
        methods: Sequence[str],
        verify: bool = True,
    ) -> Float[Tensor, "methods b T rows columns"]:
        options: dict[str, Any] = {"options": self.options, "verify": verify}
        _, _, found = compute_maps(model, images, methods=methods, choose_targets=lambda _: targets, **options)
        return torch.stack([maps.values.expand(-1, targets.shape[1], -1, -1) for maps in found])

    def _leave_one_out(self, model: nn.Module, images: Images, classes: Int[Tensor, " n"]) -> PatchMaps:
        score = self._build_score(model, images, classes)
        arguments: dict[str, Any] = {"batch": len(images), "patches": self.grid[0] * self.grid[1]}
        drops = token_ablation.leave_one_out(lambda kept: score(kept)[:, 0], **arguments, device=images.device)
        return torch.unflatten(drops, 1, self.grid)

    def _build_score(
        self,
        model: nn.Module,
        images: Images,
        classes: Int[Tensor, " n"],
        *,
        fill: str = "auto",
        precision: Precision = "float32",
    ) -> token_ablation.Predict:
        """Probability and logit [R, 2] of each image's class, from the patches that are kept."""
        classify = self._build_classifier(model, images, grid=self.grid, fill=fill, precision=precision)
        return lambda kept: token_ablation.score_classes(classify(kept), classes)

    def _build_classifier(
        self, model: nn.Module, images: Images, *, grid: Grid, fill: str = "auto", precision: Precision = "float32"
    ) -> token_ablation.Classify:
        def advance(forwards: float) -> None:
            self.advance(forwards * images[0].numel() / self.images[0].numel(), self._task)

        running: dict[str, Any] = {"batch_size": self.batch_size, "on_forward": advance}
        with autocast(self.device, precision):
            classify = token_ablation.build_classifier(model, images, grid=grid, fill=fill, **running)

        def run(kept: Int[Tensor, "R kept"]) -> Float[Tensor, "R C"]:
            with autocast(self.device, precision):
                return classify(kept).float()

        return run

    def _keep(self, metric: str, names: list[str], values: Float[Tensor, " Mn"]) -> None:
        for name in dict.fromkeys(names):
            self.result.values[metric][name] = _mean(names, name, values)


def _mean(names: list[str], name: str, values: Float[Tensor, "Mn ..."]) -> Float[np.ndarray, "n ..."]:
    """The mean over the maps of that name."""
    chosen = [of_map for other, of_map in zip(names, values.chunk(len(names)), strict=True) if other == name]
    mean: np.ndarray = torch.stack(chosen).mean(dim=0).cpu().numpy()
    return mean


def _time(compute: Callable[[], Tensor]) -> float:
    """Seconds that it takes, the second time."""
    compute()
    started = time.perf_counter()
    compute().cpu()  # an accelerator has finished then
    return time.perf_counter() - started
