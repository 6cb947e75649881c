"""Measure every method beside baselines on the same images: the work behind `vit faithfulness`."""

import copy
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from vit.bundle import Bundle
from vit.explanation.capture.readout import Grid, Images, PatchMaps
from vit.explanation.capture.tokens import can_drop_tokens
from vit.explanation.faithfulness import grid_pointing, token_ablation
from vit.explanation.faithfulness.baselines import baseline_maps
from vit.explanation.faithfulness.map_metrics import KEPT, REMOVED, PerImage, compute_saco, find_order
from vit.explanation.faithfulness.sanity_checks import randomise_weights, rank_correlation
from vit.explanation.methods.table import MapOptions, compute_maps
from vit.model.logits import compute_logits

LEAVE_ONE_OUT = "leave-one-out"  # occlusion of each patch: the reference that maps are compared with
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
    batch_size: int = 32
    few_images: int = 64  # the first ones, for painting over, sensitivity and randomised weights
    mosaics: int = 32  # of the grid pointing game
    seed: int = 0
    on_progress: Callable[[str], object] = lambda task: None

    def __post_init__(self) -> None:
        self.model, self.few = self.bundle.model, slice(self.few_images)
        device = next(self.model.parameters()).device
        self.images, self.classes = self.images.to(device), self.classes.to(device)
        self.maps: dict[str, PatchMaps] = {}  # of the methods and of leave-one-out, every image
        self.grid: Grid = (0, 0)
        self.result = Measurement()

    def measure(self) -> Measurement:
        """Everything, in a few minutes for 256 small images."""
        self._measure_maps()
        self._measure_randomised_weights()
        self._measure_sensitivity()
        self._measure_pointing()
        return self.result

    def _measure_maps(self) -> None:
        of_methods = {method: partial(self._explain, method) for method in self.methods}
        for name, compute in (of_methods | {LEAVE_ONE_OUT: self._leave_one_out}).items():
            self.on_progress(f"maps: {name}")
            started = time.perf_counter()
            maps = compute(self.model, self.images, self.classes)
            self.result.milliseconds[name] = 1000 * (time.perf_counter() - started) / len(self.images)
            self.maps[name], self.grid = maps, (maps.shape[1], maps.shape[2])
        baselines = baseline_maps(self.images, self.grid, seed=self.seed)
        for name, several in ({name: [maps] for name, maps in self.maps.items()} | baselines).items():
            self.on_progress(f"deletion, insertion, SaCo: {name}")
            self._score(name, several)

    def _measure_randomised_weights(self) -> None:
        """Rank correlation with maps of the model with weights randomised from its head down (Adebayo et al. 2018)."""
        images, classes = self.images[self.few], self.classes[self.few]
        models = [randomise_weights(self.model, fraction_of_blocks=fraction) for fraction in FRACTIONS_OF_BLOCKS]
        values = self.result.values["randomised_correlation"]
        for method in self.methods:
            self.on_progress(f"randomised weights: {method}")
            stages = [self._explain(method, model, images, classes) for model in models]
            found = [rank_correlation(self.maps[method][self.few], maps).abs() for maps in stages]
            self.result.cascade[method] = [float(stage.mean()) for stage in found]
            values[method] = found[-1].cpu().numpy()
        drops = self._leave_one_out(models[-1], images, classes)
        values[LEAVE_ONE_OUT] = rank_correlation(self.maps[LEAVE_ONE_OUT][self.few], drops).abs().cpu().numpy()
        for baseline in ("centre", "edges"):  # which don't depend on the model
            values[baseline] = np.ones(len(images), dtype=np.float32)

    def _measure_sensitivity(self) -> None:
        """Max-sensitivity (Yeh et al. 2019, eq. 4) under uniform noise of 2 % of the pixel range: the largest distance
        of a map of the noisy image, relative to the larger of the two maps' norms: 0 to 2, also for maps of zeros."""
        images, classes = self.images[self.few], self.classes[self.few]
        generator = torch.Generator().manual_seed(self.seed)
        reach = _NOISE / torch.tensor(self.bundle.preprocess.std, device=images.device).view(3, 1, 1)
        uniform = (torch.rand(images.shape, generator=generator).to(images) for _ in range(_NOISY_COPIES))
        noise = [(2 * of_copy - 1) * reach for of_copy in uniform]
        for method in self.methods:
            self.on_progress(f"sensitivity: {method}")
            whole = self.maps[method][self.few].flatten(1)
            distances = []
            for of_copy in noise:
                moved = self._explain(method, self.model, images + of_copy, classes).flatten(1)
                norm = torch.maximum(whole.norm(dim=1), moved.norm(dim=1)).clamp_min(1e-30)
                distances.append((moved - whole).norm(dim=1) / norm)
            self.result.values["sensitivity"][method] = torch.stack(distances).amax(dim=0).cpu().numpy()

    def _measure_pointing(self) -> None:
        """The grid pointing game, for models that take another number of patches and let tokens be left out."""
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
        top = self._in_batches(partial(compute_logits, model), mosaics).topk(4, dim=1).indices
        recognised = 100 * float((top[:, :, None] == targets[:, None, :]).any(dim=1).float().mean())
        self.result.notes.append(f"mosaics: {recognised:.0f} % of the quarters' classes are in the top four")
        maps: dict[str, Sequence[PatchMaps]] = {}
        for method in self.methods:
            self.on_progress(f"grid pointing: {method}")
            maps[method] = [self._explain(method, model, mosaics, quarter) for quarter in targets.T]
        self.on_progress("grid pointing: baselines")
        grid = (2 * self.grid[0], 2 * self.grid[1])
        baselines = baseline_maps(mosaics, grid, seed=self.seed)
        maps |= {name: baselines[name][:1] * 4 for name in ("random", "centre", "edges")}
        leave_blocks_out = partial(grid_pointing.leave_blocks_out, model, grid=grid)
        maps[LEAVE_ONE_OUT] = self._in_batches(leave_blocks_out, mosaics, targets).unbind(dim=1)
        for name, of_quarters in maps.items():
            self.result.values["grid_pointing"][name] = grid_pointing.point(of_quarters).cpu().numpy()

    def _score(self, name: str, several: Sequence[PatchMaps]) -> None:
        """Deletion, insertion, SaCo and the correlation with leave-one-out; the mean over several maps of an image."""
        values: dict[str, list[Tensor]] = defaultdict(list)
        curves: dict[str, list[Tensor]] = defaultdict(list)
        for maps in several:
            for fill, chosen in {"auto": slice(None), "mean": self.few, "blur": self.few}.items():
                suffix, compute = "" if fill == "auto" else f"_{fill}", partial(self._curves, fill=fill)
                found = self._in_batches(compute, self.images[chosen], self.classes[chosen], maps[chosen]).unbind(dim=1)
                for kind, curve, fractions in zip(("deletion", "insertion"), found, (REMOVED, KEPT), strict=True):
                    values[kind + suffix].append(token_ablation.area_under(curve, fractions=fractions))
                    if fill == "auto":
                        curves[kind].append(curve)
            values["saco"].append(self._in_batches(self._saco, self.images, self.classes, maps))
            values["leave_one_out_correlation"].append(rank_correlation(maps, self.maps[LEAVE_ONE_OUT]))
        for metric, numbers in values.items():
            self.result.values[metric][name] = _mean(numbers)
        self.result.curves[name] = {kind: _mean(numbers) for kind, numbers in curves.items()}

    def _curves(self, images: Tensor, classes: Tensor, maps: PatchMaps, *, fill: str) -> Float[Tensor, "B 2 steps"]:
        """Probabilities while patches are removed in the maps' order, and while they are added to nothing."""
        predict = token_ablation.build_predictor(self.model, images, classes, grid=self.grid, fill=fill)
        order, left = find_order(maps), [1 - fraction for fraction in KEPT]
        deletion = token_ablation.deletion_curve(predict, order, fractions=REMOVED)
        insertion = token_ablation.deletion_curve(predict, order.flip(1), fractions=left)
        return torch.stack([deletion, insertion], dim=1)

    def _saco(self, images: Tensor, classes: Tensor, maps: PatchMaps) -> Float[Tensor, " B"]:
        return compute_saco(token_ablation.build_predictor(self.model, images, classes, grid=self.grid), maps)

    def _explain(self, method: str, model: nn.Module, images: Tensor, classes: Tensor) -> PatchMaps:
        def compute(images: Tensor, classes: Tensor) -> Tensor:
            _, _, (maps,) = compute_maps(
                model, images, methods=[method], choose_targets=lambda _: classes[:, None], options=self.options
            )
            return maps.values[:, 0]

        return self._in_batches(compute, images, classes)

    def _leave_one_out(self, model: nn.Module, images: Tensor, classes: Tensor) -> PatchMaps:
        def compute(images: Tensor, classes: Tensor) -> Tensor:
            predict = token_ablation.build_predictor(model, images, classes, grid=self.grid)
            patches = self.grid[0] * self.grid[1]
            drops = token_ablation.leave_one_out(predict, batch=len(images), patches=patches, device=images.device)
            return torch.unflatten(drops, 1, self.grid)

        return self._in_batches(compute, images, classes)

    def _in_batches(self, compute: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        batches = zip(*(torch.split(tensor, self.batch_size) for tensor in tensors), strict=True)
        return torch.cat([compute(*batch) for batch in batches])


def _mean(several: Sequence[Tensor]) -> Float[np.ndarray, "n ..."]:
    mean: np.ndarray = np.mean([numbers.cpu().numpy() for numbers in several], axis=0)
    return mean
