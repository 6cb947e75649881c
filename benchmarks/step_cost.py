"""What a training step of each packaged recipe costs on paper, and what bounds it on two GPUs.

    python benchmarks/step_cost.py --output benchmarks/results

No GPU is used: the recipe's own step runs at its own batch size on tensors without memory (torch's
FakeTensorMode), as it would on a GPU, and every operation is counted as it goes by:

    FLOPs      torch's formulas of matrix products, convolutions and attention; a multiply-add counts as two
    bytes      what an operation reads and writes. Compiled, operations between two of the former are taken as one
               kernel, which reads what was computed before it and writes what is used after it
    launches   kernels that the host starts; an operation on lists of tensors takes one for as many as torch packs

An operation takes at least FLOPs / rate or bytes / bandwidth, whichever is longer; the device's
time is their sum, the host's is 5 µs a launch (an assumption: measured values lie between 3 and
10). The longer one bounds the step.
"""

import argparse
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from conditions import describe_conditions, write_result
from recipe_step import build, build_run_plan, draw_batch, list_sizes, load_recipe, without_memory
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from vit.config import Config
from vit.explanation.faithfulness.map_metrics import to_markdown
from vit.factory.recipe import list_recipes
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


@dataclass(frozen=True)
class Card:
    """Dense bfloat16 and memory, of NVIDIA's data sheets."""

    flops: float  # a second
    bandwidth: float  # bytes a second
    memory: float  # bytes


CARDS = {"H100": Card(989e12, 3.35e12, 80e9), "L4": Card(121e12, 300e9, 24e9)}


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
    packs = lists and re.match(r"aten::_(foreach|fused_adam|fused_sgd)", function.name())
    return math.ceil(lists[0] / PACKED[min(len(lists), 5)]) if packs else 1


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


def build_tables(result: dict[str, Any]) -> str:
    """What a step costs, and what bounds it on each card."""
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
            *(f"{seconds / 60:.1f}" for seconds in recipe["run_seconds"].values()),
        ]
        for name, recipe in result["recipes"].items()
    ]
    tables = [
        to_markdown(header, costs),
        to_markdown(["recipe", *of_cards], bounds),
        to_markdown(
            ["recipe", "steps", *(f"{card}, minutes at least" for card in result["cards"])], runs
        ),
    ]
    return "\n\n".join(tables)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipes", nargs="+", default=list(list_recipes()))
    parser.add_argument("--output", type=Path, help=f"folder for {NAME}-on-paper.json")
    options = parser.parse_args()
    result = {
        "machine": describe_conditions("cpu") | {"device": "on paper"},
        "cards": {name: vars(card) for name, card in CARDS.items()},
        "launch_seconds": LAUNCH_SECONDS,
        "recipes": {name: describe_recipe(name) for name in options.recipes},
    }
    print(build_tables(result))
    if options.output:
        print(f"\n{write_result(options.output, NAME, result)}")


if __name__ == "__main__":
    main()
