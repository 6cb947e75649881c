"""The step of every packaged recipe as graphs: compiled whole, and replayed as a CUDA graph is
replayed.

No GPU is needed: the graph of a step on a CPU stands for a captured one.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.recipe_step import RECIPE_NAMES, build, draw_batch, list_sizes, load_recipe

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
pytestmark = pytest.mark.skipif(
    torch.__version__ < "2.10", reason="torch compiles no training step before 2.10"
)
RECIPES = [
    pytest.param(name, marks=[] if name in COMMON_RECIPES else pytest.mark.extended)
    for name in RECIPE_NAMES
]


def flatten(model: torch.nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


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
    _, size = list_sizes(config)[0]
    step, batch = build(config), draw_batch(config, size)
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


# Muon with an average and mixed images; AdamW with clipping; Muon alone
@pytest.mark.extended
@pytest.mark.parametrize(
    "name",
    [
        "cifar10/speedrun",
        "folder/finetune",
        pytest.param("digits", marks=pytest.mark.extended),
    ],
)
def test_the_graph_of_one_step_trains_the_next_ones(name: str) -> None:
    config = load_recipe(name, *SHORT, "train.precision=float32")
    _, size = list_sizes(config)[0]
    plain, replayed = build(config), build(config)

    def seeded(seed: int) -> tuple[Tensor, Tensor]:
        batch = draw_batch(config, size, seed=seed)
        torch.manual_seed(seed)  # of the paths that are dropped
        return batch

    for seed in range(2):
        for step in (plain, replayed):
            step(*seeded(seed))
    plain(*seeded(2))
    replayed.set_schedule_values()
    graph = make_fx(lambda images, targets: replayed.run_on_device(images, targets))(*seeded(2))
    for seed in range(3, 5):
        replayed.num_steps += 1
        replayed.set_schedule_values()
        expected = plain(*seeded(seed))
        with torch.no_grad():  # the backward pass is in the graph
            result = graph(*seeded(seed))
        assert torch.equal(result.loss, expected.loss)
    assert torch.equal(flatten(replayed.module), flatten(plain.module))
    assert torch.equal(flatten(replayed.averaged_model), flatten(plain.averaged_model))
