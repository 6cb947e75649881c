"""The methods by name, and one call that computes several of them from one forward pass."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor, nn

from vit.data.images import Preprocess
from vit.explain.readout import Forward, compute_entropy, run_forward, split_prefix
from vit.explain.rollout import mixing_matrix, rollout_row, rollout_row_from_matrices


@runtime_checkable
class Explainable(Protocol):
    """What explanation needs of a bundle."""

    @property
    def model(self) -> nn.Module: ...
    @property
    def preprocess(self) -> Preprocess: ...
    @property
    def class_names(self) -> tuple[str, ...]: ...


@dataclass(frozen=True)
class MapOptions:
    """What the methods can be told; each uses what concerns it, and the manifest records all of it."""

    head_fusion: str = "mean"
    discard_ratio: float = 0.0
    residual: float = 0.5
    start_layer: int = 0


@dataclass(frozen=True)
class Method:
    """A way from a recorded forward pass to tokens' relevance [B, T, N], N with the prefix tokens."""

    name: str
    title: str
    compute: Callable[[Forward, Int[Tensor, "B T"], MapOptions], Float[Tensor, "B T N"]]
    class_specific: bool
    signed: bool = False


@dataclass
class Maps:
    """Maps of one method: `values` [B, T, rows, columns], float32, for T targets (1 when class-agnostic)."""

    method: Method
    values: Float[Tensor, "B T rows columns"]
    prefix_mass: Float[Tensor, "B T"]
    entropy: Float[Tensor, "B T"]


def compute_rollout(
    forward: Forward, targets: Int[Tensor, "B T"], options: MapOptions
) -> Float[Tensor, "B 1 N"]:
    """Attention rollout read through the model's own readout; not about any class."""
    layers = forward.record.layers
    if options.head_fusion == "mean" and options.discard_ratio == 0:
        row = rollout_row(forward.readout, layers, residual=options.residual, start_layer=options.start_layer)
    else:
        mixings = [
            mixing_matrix(
                layer.attention(),
                head_fusion=options.head_fusion,
                discard_ratio=options.discard_ratio,
                num_prefix_tokens=forward.num_prefix_tokens,
            )
            for layer in layers[options.start_layer :]
        ]
        row = rollout_row_from_matrices(forward.readout, mixings, residual=options.residual)
    return row.unsqueeze(1)


METHODS = {method.name: method for method in [Method("rollout", "attention rollout", compute_rollout, False)]}


def find_methods(names: Sequence[str]) -> list[Method]:
    """Methods by name; ValueError lists the known ones."""
    unknown = [name for name in names if name not in METHODS]
    if unknown:
        raise ValueError(f"unknown method {unknown[0]!r}; known: {', '.join(METHODS)}")
    return [METHODS[name] for name in names]


def compute_maps(
    model: nn.Module,
    images: Float[Tensor, "B 3 height width"],
    *,
    methods: Sequence[str] = ("rollout",),
    choose_targets: Callable[[Float[Tensor, "B C"]], Int[Tensor, "B T"]] | None = None,
    options: MapOptions | None = None,
) -> tuple[Float[Tensor, "B C"], list[Maps]]:
    """Logits and the maps of every method. `choose_targets` picks classes from logits; default the predicted
    one."""
    chosen = find_methods(methods)
    forward = run_forward(model, images, gradients=any(method.class_specific for method in chosen))
    logits = forward.logits.detach()
    targets = logits.argmax(dim=1, keepdim=True) if choose_targets is None else choose_targets(logits)
    maps = []
    for method in chosen:
        mass = method.compute(forward, targets, options or MapOptions()).detach()
        values, prefix_mass = split_prefix(
            mass, num_prefix_tokens=forward.num_prefix_tokens, grid=forward.grid
        )
        maps.append(Maps(method, values.float(), prefix_mass, compute_entropy(values)))
    return logits, maps
