"""The step of every packaged recipe as graphs: compiled whole, and replayed as a CUDA graph is replayed.

No GPU is needed: what CUDA would run is traced on tensors without memory (torch's FakeTensorMode), where a step that
waited for the device would raise, and the graph of a step on a CPU stands for a captured one.
"""

from collections import Counter
from functools import partial
from typing import Any

import jaxtyping
import pytest
import torch
from recipe_step import build, cuda_without_device, draw_batch, list_sizes, load_recipe
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vit.build.recipe import list_recipes
from vit.model import patch_embed

# three blocks: one without drop path, one with it, and the last one, of which some recipes read the first token only
SHORT = ["model.depth=3", "train.batch_size=4", "train.max_steps=100"]


def flatten(model: torch.nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("name", list_recipes())
def test_forward_loss_and_backward_are_one_graph_for_each_image_size(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs: Counter[str] = Counter()

    def count(direction: str, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs[direction] += 1
        assert not any(isinstance(given, torch.SymInt) for given in inputs)  # a CUDA graph's sizes are fixed
        return graph

    compilers = {f"{way}_compiler": partial(count, way) for way in ("fw", "bw")}
    whole = partial(torch.compile, fullgraph=True, backend=aot_autograd(**compilers))
    monkeypatch.setattr(torch, "compile", whole)
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # the tests' own checks of shapes break graphs
    monkeypatch.setattr(patch_embed, "_run_uncompiled", patch_embed._run)  # on CPUs a convolutional stem is left out
    torch._dynamo.reset()
    config = load_recipe(name, *SHORT, "train.precision=bfloat16", "model.attention_backend=fused")
    step = build(config, compile=True)
    for number, (_, size) in enumerate(list_sizes(config), start=1):
        for seed in range(3):
            assert step(*draw_batch(config, size, seed=seed)).finite
        assert graphs == {"fw": number, "bw": number}


class Recorder(TorchDispatchMode):
    """Every operation of a step, its numbers and the tensors that live beyond the step, told by what they are."""

    def __init__(self, kept: list[Tensor]) -> None:
        super().__init__()
        self.names = {id(tensor): number for number, tensor in enumerate(kept)}
        self.operations: list[tuple[str, list[Any]]] = []

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        told = [self._tell(leaf) for leaf in tree_leaves((arguments, named))]
        self.operations.append((str(function), told))
        return function(*arguments, **(named or {}))

    def _tell(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return str(leaf)
        return self.names.get(id(leaf), (tuple(leaf.shape), leaf.dtype, leaf.device))


@pytest.mark.parametrize("name", list_recipes())
def test_a_step_on_cuda_waits_for_nothing_and_equals_the_one_before(name: str) -> None:
    """A step that read a value of the device would raise here; one that took another number from the host each time
    could not be captured, for a CUDA graph keeps the numbers that it was captured with."""
    config = load_recipe(name, *SHORT, "train.precision=bfloat16")
    for _, size in list_sizes(config):
        real = draw_batch(config, size)
        with cuda_without_device():
            step = build(config, device="cuda")
            batch = [torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda") for tensor in real]
            step(*batch)  # the first one allocates the optimizer's state
            kept = [
                *step.module.state_dict(keep_vars=True).values(),
                *step.averaged_model.state_dict().values(),
                *batch,
            ]
            recorded = []
            for _ in range(2):
                step.set_numbers()
                with Recorder(kept) as recorder:
                    result = step.run(*batch)
                step.schedule.step()
                step.step += 1
                recorded.append(recorder.operations)
        assert recorded[0] == recorded[1]
        assert result.loss.device.type == "cuda"
        assert {tensor.device.type for state in step.optimizer.state.values() for tensor in state.values()} == {"cuda"}


@pytest.mark.parametrize("name", list_recipes())
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
    replayed.set_numbers()
    graph = make_fx(replayed.run)(*seeded(2))
    for seed in range(3, 6):
        replayed.schedule.step()
        replayed.step += 1
        replayed.set_numbers()
        expected, result = plain(*seeded(seed)), graph(*seeded(seed))
        assert torch.equal(result.loss, expected.loss)
    assert torch.equal(flatten(replayed.module), flatten(plain.module))
    assert torch.equal(flatten(replayed.averaged_model), flatten(plain.averaged_model))
