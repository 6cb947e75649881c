"""One step by its numbers."""

import copy
import time

import pytest
import torch
from torch import Tensor, nn

from vit.model.vision_transformer import VisionTransformer
from vit.optim.optimizer import create_optimizer
from vit.runtime.threads import BatchThreads, thread_generator
from vit.training.losses import build_loss
from vit.training.train_step import TrainStep


def build_step(
    model: nn.Module | None = None, *, optimizer: str = "sgd", lr: float = 1.0, **arguments
) -> TrainStep:
    """A step in float32 at a constant rate."""
    if model is None:
        torch.manual_seed(0)
        model = VisionTransformer(8, 4, num_classes=5, embed_dim=16, depth=2, num_heads=2)
    if optimizer == "sgd":  # which our runs don't have: it moves along the gradient itself
        algorithm = torch.optim.SGD(model.parameters(), lr=lr, fused=True)
    else:
        algorithm = create_optimizer(optimizer, model, lr=lr)
    names = ("label_smoothing", "class_weights", "multilabel", "user_loss")
    loss = build_loss(**{name: arguments.pop(name) for name in names if name in arguments})
    arguments = {"precision": "float32"} | arguments
    return TrainStep(model, algorithm, lambda step: 1.0, loss, **arguments)


def draw_batch(size: int = 16, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 3, 8, 8, generator=generator), torch.randint(
        0, 5, (size,), generator=generator
    )


def weights(step: TrainStep) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in step.module.parameters()])


@pytest.mark.parametrize("threads", [None, 3])
@pytest.mark.parametrize(("size", "count"), [(256, 4), (10, 4), (10, 1), (7, 7), (1, 1)])
def test_parts_make_the_whole_batchs_step(size, count, threads):
    pool = None if threads is None else BatchThreads(threads)
    whole, split = build_step(), build_step(grad_accum_steps=count, threads=pool)
    results = [step(*draw_batch(size)) for step in (whole, split)]
    torch.testing.assert_close(weights(split), weights(whole), rtol=0, atol=1e-6)
    torch.testing.assert_close(results[1].loss, results[0].loss)
    torch.testing.assert_close(results[1].grad_norm, results[0].grad_norm)
    assert results[1].correct == results[0].correct


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "muon"])
def test_threads_train_convolutions_as_the_whole_batch_does(optimizer):
    """Their gradients lie in memory in another order, and torch's fused optimizers read values in
    that order."""

    def train(threads: BatchThreads | None) -> list[Tensor]:
        torch.manual_seed(0)
        options = {"stem": "conv_pool_residual", "global_pool": "avg", "pos_embed": "sincos"}
        model = VisionTransformer(
            8, 4, num_classes=5, embed_dim=16, depth=1, num_heads=2, **options
        )
        step = build_step(model, optimizer=optimizer, lr=1e-2, threads=threads)
        for seed in range(2):
            step(*draw_batch(seed=seed))
        return [parameter.detach() for parameter in model.parameters()]

    for divided, whole in zip(train(BatchThreads(2)), train(None), strict=True):
        assert divided.stride() == whole.stride()
        torch.testing.assert_close(divided, whole, rtol=0, atol=1e-4)


def test_threads_draw_the_same_numbers_in_every_run():
    """Which paths are dropped doesn't depend on which thread is first, and no two parts drop the
    same."""

    def train(delays: list[float]) -> Tensor:
        torch.manual_seed(0)
        model = VisionTransformer(
            8, 4, num_classes=5, embed_dim=16, depth=2, num_heads=2, drop_path_rate=0.5
        )
        step = build_step(model, threads=BatchThreads(4), precision="bfloat16")
        loss = step.loss

        def compute_late(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            time.sleep(delays[int(targets[0]) % len(delays)])
            return loss(logits, targets)

        step.loss = compute_late
        for seed in range(3):
            torch.manual_seed(seed)
            step(*draw_batch(64, seed=seed))
        return weights(step)

    assert torch.equal(train([0.0, 0.01, 0.0, 0.02]), train([0.02, 0.0, 0.01, 0.0]))
    threads = BatchThreads(4)
    drawn = threads.map(
        lambda _: torch.rand(8, generator=thread_generator()), range(4), is_random=True
    )
    assert len({tuple(values.tolist()) for values in drawn}) == 4
    assert thread_generator() is None


def test_gradient_norm_is_reported_before_clipping_and_the_step_is_clipped():
    free, clipped, loose = build_step(), build_step(clip_grad=0.01), build_step(clip_grad=1e6)
    start = weights(free)
    results = [step(*draw_batch()) for step in (free, clipped, loose)]
    norm = (weights(free) - start).norm()  # the rate is 1
    assert norm > 0.1
    for result in results:
        torch.testing.assert_close(result.grad_norm, norm, rtol=1e-5, atol=0)
    torch.testing.assert_close(
        (weights(clipped) - start).norm(), torch.tensor(0.01), rtol=1e-4, atol=0
    )
    torch.testing.assert_close(weights(loose), weights(free), rtol=0, atol=0)


def test_average_follows_the_weights_as_worked_by_hand():
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 5, bias=False))
    with torch.no_grad():
        model[1].weight.zero_()
    step = build_step(model, ema_decay=0.2)
    step(*draw_batch())
    first = model[1].weight.detach().clone()
    step(*draw_batch(seed=1))
    second = model[1].weight.detach()
    # the first decay is 2/11, below 0.2; the second would be 3/12 and is held to 0.2
    expected = 0.2 * (9 / 11) * first + 0.8 * second
    torch.testing.assert_close(step.averaged_model[1].weight, expected)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon"])
def test_a_step_that_is_not_finite_changes_nothing(optimizer):
    step = build_step(optimizer=optimizer, lr=1e-3, ema_decay=0.9, clip_grad=1.0)
    step(*draw_batch())
    before, average = weights(step), copy.deepcopy(step.averaged_model.state_dict())
    state = copy.deepcopy(step.optimizer.state_dict()["state"])
    images, labels = draw_batch(seed=1)
    images[3, 0, 0, 0] = float("inf")
    result = step(images, labels)
    assert not result.finite
    assert torch.equal(weights(step), before)
    assert all(
        torch.equal(value, average[name])
        for name, value in step.averaged_model.state_dict().items()
    )
    for index, values in step.optimizer.state_dict()["state"].items():
        assert all(
            torch.equal(value, state[index][key])
            for key, value in values.items()
            if value is not None
        )
    assert step(*draw_batch(seed=2)).finite
    assert not torch.equal(weights(step), before)


@pytest.mark.parametrize("mixed", [False, True])
def test_smoothing_does_not_pull_common_images_to_a_rare_class(mixed):
    """With a weight of 41:1 each class that is right and certain has the loss of smoothing alone."""

    def build_certain() -> nn.Module:
        model = nn.Sequential(nn.Flatten(), nn.Linear(192, 2))
        model[1].weight.data.zero_()
        model[1].bias.data.copy_(torch.tensor([20.0, 0.0]))
        return model

    class_weights = torch.tensor([0.51, 21.0])
    step = build_step(build_certain(), label_smoothing=0.1, class_weights=class_weights)
    plain = build_step(build_certain(), label_smoothing=0.1)
    images, _ = draw_batch()
    labels = torch.zeros(len(images), dtype=torch.int64)
    targets = nn.functional.one_hot(labels, 2).float() if mixed else labels
    expected = 0.51 * plain(images, targets).loss
    torch.testing.assert_close(step(images, targets).loss, expected)


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_restored_state_goes_on_to_the_same_bits(precision):
    step = build_step(precision=precision, optimizer="muon", lr=1e-3, ema_decay=0.9)
    for seed in range(3):
        step(*draw_batch(seed=seed))
    resumed = build_step(
        copy.deepcopy(step.module), precision=precision, optimizer="muon", lr=1e-3, ema_decay=0.9
    )
    resumed.load_state_dict(copy.deepcopy(step.state_dict()))
    for seed in range(3, 6):
        ours, theirs = resumed(*draw_batch(seed=seed)), step(*draw_batch(seed=seed))
        assert torch.equal(ours.loss, theirs.loss)
    assert torch.equal(weights(resumed), weights(step))
    averages = zip(
        resumed.averaged_model.parameters(), step.averaged_model.parameters(), strict=True
    )
    assert all(torch.equal(ours, theirs) for ours, theirs in averages)


def test_the_average_has_the_running_statistics_of_a_norm_over_the_batch():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(192), nn.Linear(192, 5))
    step = build_step(model, lr=0.1, ema_decay=0.5)
    expected = model[1].running_mean.clone()
    for number in range(6):
        images, targets = draw_batch(seed=number)
        step(images + 3, targets)
        decay = min(0.5, (2 + number) / (11 + number))
        expected = decay * expected + (1 - decay) * model[1].running_mean
    average = step.averaged_model[1].running_mean
    torch.testing.assert_close(average, expected)
    assert average.mean() > 0.5
