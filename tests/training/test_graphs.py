"""The step of every packaged recipe can be captured as a CUDA graph; no GPU is needed to see it."""

from contextlib import nullcontext
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.recipe_step import RECIPE_NAMES, build, draw_batch, list_sizes, load_recipe
from vit.training.train_step import StepResult, capture_step

# two narrow blocks, one without drop path, one with it, of which some recipes read the first token
# only: all others have the structure of one of these
SHORT = [
    "model.depth=2",
    "model.embed_dim=64",
    "model.num_heads=2",
    "train.batch_size=4",
    "train.max_steps=100",
]
# one for a CPU, one for a GPU; all others are extended tests
COMMON_RECIPES = ("cifar10/cpu", "cifar10/speedrun")
RECIPES = [
    pytest.param(name, marks=[] if name in COMMON_RECIPES else pytest.mark.extended)
    for name in RECIPE_NAMES
]


class Recorder(TorchDispatchMode):
    """Every operation of a step, its numbers and the tensors that live beyond the step, told by
    what they are."""

    def __init__(self, kept: list[Tensor]) -> None:
        super().__init__()
        self.names = {id(tensor): number for number, tensor in enumerate(kept)}
        self.operations: list[tuple[str, list[Any]]] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        told = [self._tell(leaf) for leaf in tree_leaves((arguments, named))]
        self.operations.append((str(function), told))
        return function(*arguments, **(named or {}))

    def _tell(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return str(leaf)
        return self.names.get(id(leaf), (tuple(leaf.shape), leaf.dtype, leaf.device))


@pytest.mark.parametrize("name", RECIPES)
def test_a_step_reads_no_value_and_does_what_the_one_before_did(name: str) -> None:
    """A step that read a value of the device would wait for it; one that took another number from
    the host each time could not be captured, for a CUDA graph keeps the numbers that it was
    captured with."""
    config = load_recipe(name, *SHORT, "train.precision=bfloat16")
    step, batch = build(config), draw_batch(config, list_sizes(config)[0])
    rates = []
    step(*batch)  # the first one allocates the optimizer's state
    kept = [
        *step.module.state_dict(keep_vars=True).values(),
        *step.averaged_model.state_dict(keep_vars=True).values(),
        *batch,
    ]
    recorded = []
    for _ in range(2):
        rates.append(step.learning_rate)
        step.set_schedule_values()
        with Recorder(kept) as recorder:
            step.run_on_device(*batch)
        step.num_steps += 1
        recorded.append(recorder.operations)
    assert rates[0] != rates[1]
    assert recorded[0] == recorded[1]
    assert not {"aten._local_scalar_dense.default", "aten.nonzero.default"} & {
        name for name, _ in recorded[0]
    }


def test_the_optimizer_is_marked_while_a_step_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's AdamW refuses to be captured without it."""
    monkeypatch.setattr("torch.cuda.CUDAGraph", Mock)
    monkeypatch.setattr("torch.cuda.graph", nullcontext)
    optimizer = torch.optim.AdamW([torch.zeros(2)])
    (group,) = optimizer.param_groups
    marks = []

    def run(images: Tensor, targets: Tensor) -> StepResult:
        marks.append(group["capturable"])
        return StepResult(*[images] * len(StepResult._fields))

    replay = capture_step(run, optimizer, torch.zeros(3), torch.zeros(3))
    assert (marks, group["capturable"]) == ([True], False)
    assert torch.equal(replay(torch.ones(3), torch.ones(3)).loss, torch.ones(3))
