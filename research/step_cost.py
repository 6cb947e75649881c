"""What a training step of each packaged recipe costs on paper, and what bounds it on two GPUs.

    python research/step_cost.py --output benchmarks/results

No GPU is used: the recipe's own step runs at its own batch size on tensors without memory (torch's
FakeTensorMode), as it would on a GPU, and every operation is counted as it goes by:

    FLOPs      torch's formulas of matrix products, convolutions and attention; a multiply-add counts as two
    bytes      what an operation reads and writes. Compiled, operations between two of the former are taken as one
               kernel, which reads what was computed before it and writes what is used after it
    launches   kernels that the host starts; an operation on lists of tensors takes one for as many as torch packs,
               and the backward passes of convolutions and attention take several. As CUDA's autocast does, and a
               CPU's doesn't, layer norms are computed in float32, with the casts that this takes

An operation takes at least FLOPs / rate or bytes / bandwidth, whichever is longer; the device's
time is their sum, the host's is 5 µs a launch (an assumption: measured values lie between 3 and
10). The longer one bounds the step. The rates of an H100 were measured, those of an L4 are its data
sheet's. Real kernels reach three quarters of them (an assumption, too), so a run is estimated at
4/3 of the bound.

The memory of a step says in how many micro-batches a card takes a batch, by the rule of
`vit.training.micro_batches.choose_grad_accum_steps`.
"""

import argparse
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from conditions import describe_conditions, write_result
from recipe_step import RECIPE_NAMES, build, build_run_plan, draw_batch, list_sizes, load_recipe, without_memory
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from vit.analysis.faithfulness.map_metrics import to_markdown
from vit.config import Config
from vit.training.micro_batches import MEMORY_FRACTION
from vit.training.train_step import TrainStep

NAME = "step-cost"
LAUNCH_SECONDS = 5e-6
PACKED = {
    1: 110,
    2: 64,
    3: 48,
    4: 36,
    5: 30,
}  # lists of an operation → tensors that one of its kernels takes


# kernels of an operation on CUDA, where they are several: gradients of a convolution's input, weight
# and bias; of an attention's rows, queries, keys and values
KERNELS = {"convolution_backward": 3, "flash_attention_for_cpu_backward": 3}
# of the rates that kernels reach
EFFICIENCY = 0.75
# of a card's memory, what its driver, torch's kernels and libraries take
CONTEXT_BYTES = 0.8e9
CARD_GIGABYTES = (8, 16, 24, 80)


@dataclass(frozen=True)
class Card:
    """Dense bfloat16 and memory: what was measured, or stands in NVIDIA's data sheet."""

    flops: float  # a second
    bandwidth: float  # bytes a second
    source: str


CARDS = {
    # a product of 8,192² matrices, and a copy read and written (H100 80GB HBM3)
    "H100": Card(798e12, 3.0e12, "measured"),
    # the same product; the memory of its data sheet (4.8 TB/s), at the share that the H100's copy reaches
    "H200": Card(790e12, 4.3e12, "measured; data sheet"),
    "L4": Card(121e12, 300e9, "data sheet"),
}

# what `vit train PHOTOS` takes on a GPU, with the batch for so many images
PHOTOS = {
    "1,000 photos": ("folder/small", 128, 1_000),
    "3,000 photos": ("imagenette/gpu", 256, 3_000),
    "16,384 photos": ("imagenette/gpu", 1024, 16_384),
    "45,000 images of 32 px": ("cifar10/best", 1024, 45_000),
}


@dataclass
class Operation:
    """One operation that starts kernels. Tensors are told by their storage."""

    flops: int
    launches: int
    reads: dict[int, int]  # storage → bytes
    writes: dict[int, int]

    @property
    def bytes(self) -> int:
        return sum(self.reads.values()) + sum(self.writes.values())


def count_launches(function: Any, arguments: Sequence[Any]) -> int:
    """One kernel, or as many as torch's operations on lists of tensors take."""
    lists = [len(value) for value in arguments if isinstance(value, list) and value]
    if lists and re.match(r"aten::_(foreach|fused_adam|fused_sgd)", function.name()):
        return math.ceil(lists[0] / PACKED[min(len(lists), 5)])
    counts = [count for name, count in KERNELS.items() if name in function.name()]
    return counts[0] if counts else 1


class CudaCasts(TorchFunctionMode):
    """CUDA's autocast computes layer norms in float32."""

    def __torch_function__(
        self, function: Any, types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        named = named or {}
        if function is F.layer_norm and arguments[0].dtype in (torch.bfloat16, torch.float16):
            arguments = (arguments[0].float(), *arguments[1:])
        return function(*arguments, **named)


class Recorder(TorchDispatchMode):
    """Every operation that passes."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self._alive: list[Any] = []  # so that no two storages share an address

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        named = named or {}
        result = function(*arguments, **named)
        given = [leaf for leaf in tree_leaves((arguments, named)) if isinstance(leaf, Tensor)]
        reads = self._measure(given)
        writes = self._measure([leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)])
        if function._schema.is_mutable:
            changed = zip(function._schema.arguments, arguments, strict=False)
            of_schema = [
                value
                for kind, value in changed
                if kind.alias_info is not None and kind.alias_info.is_write
            ]
            writes |= self._measure(
                [leaf for leaf in tree_leaves(of_schema) if isinstance(leaf, Tensor)]
            )
        elif all(storage in reads for storage in writes):  # a view
            return result
        if not function.name().startswith("aten::empty"):
            formula = flop_registry.get(function._overloadpacket)
            flops = int(formula(*arguments, **named, out_val=result)) if formula else 0
            self.operations.append(
                Operation(flops, count_launches(function, arguments), reads, writes)
            )
        return result

    def _measure(self, tensors: Sequence[Tensor]) -> dict[int, int]:
        found: dict[int, int] = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._alive.append(storage)
            size = min(tensor.numel() * tensor.element_size(), storage.nbytes())
            found[storage._cdata] = max(size, found.get(storage._cdata, 0))
        return found


@dataclass
class Recorded:
    """The operations of one step: forward, loss and backward, which are compiled, and the update,
    which is not."""

    compiled: list[Operation]
    update: list[Operation]
    saved_bytes: int  # what backward keeps
    weight_bytes: int


def record_step(config: Config, size: tuple[int, int]) -> Recorded:
    """Run the second step of the recipe; the first one allocates the optimizer's state."""
    real = draw_batch(config, size)
    with without_memory():
        step = build(config)
        step.threads = None  # on a GPU none divide the batch
        batch = [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in real]
        return record(step, *batch)


def record(step: TrainStep, images: Tensor, targets: Tensor) -> Recorded:
    """Run `step` twice; the operations of the second time."""
    step(images, targets)
    saved: dict[int, Any] = {}

    def keep(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    forward_and_backward: list[Operation] = []
    update = step.update

    def mark(*results: Tensor) -> Any:
        forward_and_backward.extend(recorder.operations)
        return update(*results)

    step.update = mark  # type: ignore[method-assign]
    step.set_schedule_values()
    with (
        Recorder() as recorder,
        CudaCasts(),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
    ):
        step.run_on_device(images, targets)
    weights = sum(
        parameter.numel() * parameter.element_size() for parameter in step.module.parameters()
    )
    rest = recorder.operations[len(forward_and_backward) :]
    return Recorded(
        forward_and_backward, rest, sum(kept.nbytes() for kept in saved.values()), weights
    )


def fuse(operations: Sequence[Operation]) -> list[Operation]:
    """Each run of operations without a formula for FLOPs as one kernel: it reads what is older than
    the run, and writes what an operation after it reads or what nothing here does (results)."""
    last_read = {
        storage: place for place, operation in enumerate(operations) for storage in operation.reads
    }
    fused: list[Operation] = []
    place = 0
    while place < len(operations):
        end = place + 1
        if not operations[place].flops:
            while end < len(operations) and not operations[end].flops:
                end += 1
        reads: dict[int, int] = {}
        writes: dict[int, int] = {}
        for operation in operations[place:end]:
            reads |= {
                storage: size for storage, size in operation.reads.items() if storage not in writes
            }
            writes |= operation.writes
        writes = {
            storage: size for storage, size in writes.items() if last_read.get(storage, end) >= end
        }
        fused.append(Operation(sum(o.flops for o in operations[place:end]), 1, reads, writes))
        place = end
    return fused


def estimate(operations: Sequence[Operation], card: Card) -> dict[str, Any]:
    """Seconds of the device and the host, and which of FLOPs, bytes and launches takes longest."""
    by_flops = by_bytes = 0.0
    for operation in operations:
        computing, moving = operation.flops / card.flops, operation.bytes / card.bandwidth
        by_flops += computing if computing > moving else 0
        by_bytes += moving if moving >= computing else 0
    device, host = (
        by_flops + by_bytes,
        LAUNCH_SECONDS * sum(operation.launches for operation in operations),
    )
    bound = "launches" if host > device else "FLOPs" if by_flops > by_bytes else "bytes"
    return {
        "device_seconds": device,
        "host_seconds": host,
        "seconds": max(device, host),
        "bound": bound,
    }


def describe_size(config: Config, size: tuple[int, int]) -> dict[str, Any]:
    """The cost of one step on images of one size."""
    recorded = record_step(config, size)
    eager, compiled = recorded.compiled + recorded.update, fuse(recorded.compiled) + recorded.update
    found: dict[str, Any] = {
        "image_size": list(size),
        "flops": sum(operation.flops for operation in eager),
        # weights, gradients, average, two values of the optimizer
        "memory_bytes": 5 * recorded.weight_bytes + recorded.saved_bytes,
        "image_bytes": recorded.saved_bytes / config.train.batch_size,
    }
    for name, operations in {
        "eager": eager,
        "compiled": compiled,
        "update": recorded.update,
    }.items():
        counted = {
            "bytes": sum(operation.bytes for operation in operations),
            "launches": sum(operation.launches for operation in operations),
        }
        found[name] = counted | {card: estimate(operations, CARDS[card]) for card in CARDS}
    return found


def describe_recipe(name: str, *overrides: str) -> dict[str, Any]:
    """The cost of a step for each image size of a recipe's run, and of the run."""
    config = load_recipe(name, "train.precision=bfloat16", *overrides)
    steps = build_run_plan(config).total_steps
    sizes = [(fraction, describe_size(config, size)) for fraction, size in list_sizes(config)]
    seconds = {
        card: steps * sum(part * of["compiled"][card]["seconds"] for part, of in sizes)
        for card in CARDS
    }
    described = {
        "batch_size": config.train.batch_size,
        "total_steps": steps,
        "run_seconds": seconds,
    }
    return described | {"sizes": [of for _, of in sizes]}


def describe_memory(recipe: dict[str, Any], *, batch_size: int, resident_bytes: float = 0) -> Any:
    """GiB of a step at the recipe's largest images, and by card the micro-batches that it takes.

    Args:
        recipe: of `describe_recipe`.
        batch_size: images of a step.
        resident_bytes: of the images that stay on the card.
    """
    size = max(recipe["sizes"], key=lambda size: size["memory_bytes"])
    image_bytes = size["image_bytes"]
    constant_bytes = size["memory_bytes"] - recipe["batch_size"] * image_bytes
    micro_batches: dict[str, int | None] = {}
    for gigabytes in CARD_GIGABYTES:
        free_bytes = gigabytes * 1e9 - CONTEXT_BYTES - resident_bytes
        max_images = int((MEMORY_FRACTION * free_bytes - constant_bytes) // image_bytes)
        micro_batches[f"{gigabytes} GB"] = (
            math.ceil(batch_size / max_images) if max_images > 0 else None
        )
    return {
        "batch_size": batch_size,
        "memory_bytes": constant_bytes + batch_size * image_bytes + resident_bytes,
        "micro_batches": micro_batches,
    }


def describe_memories(recipes: dict[str, Any]) -> dict[str, Any]:
    """`describe_memory` of each recipe, and of what `vit train PHOTOS` takes."""
    memories = {
        f"`{name}`": describe_memory(recipe, batch_size=recipe["batch_size"])
        for name, recipe in recipes.items()
    }
    for label, (name, batch_size, num_images) in PHOTOS.items():
        if name in recipes:
            height, width = recipes[name]["sizes"][-1]["image_size"]
            memories[f"`vit train PHOTOS`, {label}"] = describe_memory(
                recipes[name],
                batch_size=batch_size,
                resident_bytes=num_images * 3 * height * width,
            )
    return memories


def build_memory_table(memories: dict[str, Any]) -> str:
    """Of everything that takes more than 1 GiB."""
    cards = [f"{gigabytes} GB" for gigabytes in CARD_GIGABYTES]
    rows = [
        [
            label,
            str(memory["batch_size"]),
            f"{memory['memory_bytes'] / 2**30:.1f}",
            *(str(memory["micro_batches"][card] or "does not fit") for card in cards),
        ]
        for label, memory in memories.items()
        if memory["memory_bytes"] > 2**30
    ]
    return to_markdown(["run", "batch", "GiB", *cards], rows)


def build_tables(result: dict[str, Any]) -> str:
    """What a step costs, what bounds it on each card, and in how many parts it fits."""
    costs, bounds = [], []
    for name, recipe in result["recipes"].items():
        for of in recipe["sizes"]:
            label = f"`{name}`, {of['image_size'][0]} px"
            costs.append(
                [
                    label, str(recipe["batch_size"]), f"{of['flops'] / 1e12:.2f}",
                    *(f"{of[mode]['bytes'] / 1e9:.1f}" for mode in ("eager", "compiled")),
                    *(f"{of[mode]['launches']:,}" for mode in ("eager", "compiled", "update")),
                    f"{of['memory_bytes'] / 2**30:.1f}",
                ]
            )  # fmt: skip
            cells = []
            for card in result["cards"]:
                eager, compiled = of["eager"][card], of["compiled"][card]
                share = of["flops"] / result["cards"][card]["flops"] / compiled["seconds"]
                cells += [
                    *(f"{1e3 * it['seconds']:.1f}, {it['bound']}" for it in (eager, compiled)),
                    f"{share:.0%}",
                ]
            bounds.append([label, *cells])
    header = [
        "recipe",
        "batch",
        "TFLOP",
        "GB",
        "GB compiled",
        "launches",
        "compiled",
        "of which update",
        "GiB",
    ]
    of_cards = [
        title
        for card in result["cards"]
        for title in (f"{card}, ms", "compiled, ms", "of its rate")
    ]
    runs = [
        [
            f"`{name}`",
            f"{recipe['total_steps']:,}",
            *(
                f"{seconds / share:,.0f}"
                for seconds in recipe["run_seconds"].values()
                for share in (1, EFFICIENCY)
            ),
        ]
        for name, recipe in result["recipes"].items()
    ]
    tables = [
        to_markdown(header, costs),
        to_markdown(["recipe", *of_cards], bounds),
        to_markdown(
            [
                "recipe",
                "steps",
                *(
                    title
                    for card in result["cards"]
                    for title in (f"{card}, s at least", "estimate, s")
                ),
            ],
            runs,
        ),
        build_memory_table(result["memory"]),
    ]
    return "\n\n".join(tables)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipes", nargs="+", default=RECIPE_NAMES)
    parser.add_argument("--output", type=Path, help=f"folder for {NAME}-on-paper.json")
    options = parser.parse_args()
    described = {name: describe_recipe(name) for name in options.recipes}
    result = {
        "machine": describe_conditions("cpu") | {"device": "on paper"},
        "cards": {name: vars(card) for name, card in CARDS.items()},
        "launch_seconds": LAUNCH_SECONDS,
        "efficiency": EFFICIENCY,
        "recipes": described,
        "memory": describe_memories(described),
    }
    print(build_tables(result))
    if options.output:
        print(f"\n{write_result(options.output, NAME, result)}")


if __name__ == "__main__":
    main()
