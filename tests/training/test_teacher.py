"""A teacher: its answers, the loss with them, and runs that learn from them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import log_softmax, softmax
from sklearn.linear_model import LogisticRegression

import vit
from tests.conftest import Launcher, SaveModel
from tests.training.conftest import TINY, flatten, run_until
from tests.training.recorded import read_steps, train_recorded
from tests.training.test_resume import assert_equal_runs
from tests.training.test_train_step import build_step, draw_batch, weights
from tests.training.worlds import join_world, start_world
from vit.config import load_config
from vit.data.augment import MixParams, mix_batch
from vit.data.preprocess import Preprocess
from vit.runtime.threads import BatchThreads
from vit.training.folds import assign_folds
from vit.training.run import Run
from vit.training.teacher import compute_answers

MakeRun = Callable[..., Run]


@pytest.fixture(scope="module")
def teacher(save_model: SaveModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random weights, whose features tell digits apart better than chance."""
    return save_model(
        tmp_path_factory.mktemp("teacher") / "model.safetensors",
        preprocess=Preprocess((8, 8)),
        img_size=8,
        patch_size=4,
    )


def draw_targets(size: int) -> torch.Tensor:
    """Class probabilities and a teacher's logits, of five classes."""
    generator = torch.Generator().manual_seed(1)
    probabilities = torch.rand(size, 5, generator=generator).softmax(dim=1)
    return torch.cat([probabilities, 3 * torch.randn(size, 5, generator=generator)], dim=1)


def test_the_loss_is_the_cross_entropy_and_the_divergence_at_the_temperature() -> None:
    step = build_step(has_teacher=True, label_smoothing=0.1)
    images, _ = draw_batch(4)
    targets = draw_targets(4)
    with torch.no_grad():
        logits = step.module.train()(images).double().numpy()
    probabilities, answers = np.split(targets.double().numpy(), 2, axis=1)
    smoothed = 0.9 * probabilities + 0.1 / 5
    cross_entropy = -(smoothed * log_softmax(logits, axis=1)).sum(axis=1).mean()
    asked = softmax(answers / 3, axis=1)
    ratio = log_softmax(answers / 3, axis=1) - log_softmax(logits / 3, axis=1)
    divergence = (asked * ratio).sum(axis=1).mean()
    result = step(images, targets)
    assert result.loss.item() == pytest.approx(cross_entropy + 9 * divergence, rel=1e-6)
    assert result.correct == (logits.argmax(axis=1) == probabilities.argmax(axis=1)).sum()


def test_a_teacher_that_agrees_changes_nothing() -> None:
    """Nor does one whose logits are all higher by the same number."""
    images, labels = draw_batch(8)
    alone, taught = build_step(), build_step(has_teacher=True)
    with torch.no_grad():
        answers = taught.module.train()(images) + 2
    classes = torch.eye(5)[labels]
    losses = [
        alone(images, classes).loss,
        taught(images, torch.cat([classes, answers], dim=1)).loss,
    ]
    torch.testing.assert_close(losses[1], losses[0])
    torch.testing.assert_close(weights(taught), weights(alone), rtol=0, atol=1e-5)


@pytest.mark.parametrize("options", [{"grad_accum_steps": 4}, {"threads": BatchThreads(3)}])
def test_parts_of_a_batch_make_the_whole_batchs_step(options: dict[str, Any]) -> None:
    images, _ = draw_batch(10)
    whole, split = (build_step(has_teacher=True, lr=0.1, **more) for more in ({}, options))
    results = [step(images, draw_targets(10)) for step in (whole, split)]
    torch.testing.assert_close(weights(split), weights(whole), rtol=0, atol=1e-6)
    torch.testing.assert_close(results[1].loss, results[0].loss)


def test_a_mixture_has_the_mixture_of_the_targets() -> None:
    images = torch.rand(4, 3, 8, 8)
    targets = torch.rand(4, 7)
    params = MixParams(torch.tensor([0.25, 1.0, 0.5, 0.0]), torch.zeros(4, 4, dtype=torch.int64))
    mixed, mixed_targets = mix_batch(images, targets, params, num_classes=5)
    for values, given in ((mixed, images), (mixed_targets, targets)):
        torch.testing.assert_close(values[0], 0.25 * given[0] + 0.75 * given[1])
        torch.testing.assert_close(values[3], given[2])


def test_an_image_is_predicted_by_a_probe_that_has_not_seen_it() -> None:
    rng = np.random.default_rng(0)
    labels = np.arange(60) % 3
    features = rng.normal(size=(60, 8)) + 2 * np.eye(8)[labels]
    answers = compute_answers(
        {(1, "avg"): torch.from_numpy(features)}, labels, num_classes=4, balanced=False, groups=None
    )
    # the same probe from scikit-learn, on standardised features
    folds = assign_folds(labels)
    matches = []
    for strength in 10.0 ** np.arange(-4, 1.5, 0.5):
        expected = np.zeros((60, 3))
        for fold in range(5):
            seen = features[folds != fold]
            mean, std = seen.mean(axis=0), seen.std(axis=0)
            model = LogisticRegression(C=strength, max_iter=1000)
            model.fit((seen - mean) / std, labels[folds != fold])
            out = folds == fold
            expected[out] = model.decision_function((features[out] - mean) / std)
        matches.append(np.abs(expected - answers[:, :3]).max())
    assert min(matches) < 1e-3
    # a class without images is never the answer
    assert (answers[:, 3] < answers[:, :3].min(axis=1) - 10).all()


def test_images_that_are_never_left_out_get_their_label() -> None:
    labels = np.array([0, 0, 1, 1])
    features = torch.randn(4, 3)
    answers = compute_answers(
        {(1, "avg"): features}, labels, num_classes=2, balanced=False, groups=["a", "a", "b", "b"]
    )
    assert softmax(answers / 3, axis=1) == pytest.approx(np.eye(2)[labels], abs=1e-4)


def test_a_killed_run_goes_on_to_the_same_bytes(
    make_run: MakeRun, teacher: Path, tmp_path: Path
) -> None:
    mixed = ["augment.mixup=0.4", "augment.cutmix=1.0", "train.class_balance=sampler"]
    overrides = [
        f"train.teacher={teacher}",
        "train.checkpoint_every_steps=2",
        "train.epochs=2",
        *mixed,
    ]
    whole = make_run(tmp_path / "whole", *overrides)
    whole.trainer.train()
    broken = make_run(tmp_path / "broken", *overrides)
    run_until(broken, 8)
    resumed = make_run(tmp_path / "broken", *overrides)
    assert resumed.trainer.resume()
    resumed.trainer.train()
    assert_equal_runs(tmp_path / "whole", tmp_path / "broken")
    states = [flatten(run.trainer.train_step.state_dict()) for run in (whole, resumed)]
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_answers_are_computed_once_and_again_when_they_are_damaged(
    make_run: MakeRun,
    teacher: Path,
    tmp_path: Path,
    empty_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    option = f"train.teacher={teacher}"
    first = make_run(tmp_path / "a", option).teacher
    with monkeypatch.context() as patch:
        patch.setattr("vit.training.teacher.compute_features", None)
        again = make_run(tmp_path / "b", option).teacher
    assert torch.equal(again.logits, first.logits)
    (file,) = empty_cache.glob("*-teacher-*.npz")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.warns(UserWarning, match="is damaged; it is made again"):
        made_again = make_run(tmp_path / "c", option).teacher
    assert torch.equal(made_again.logits, first.logits)


@pytest.mark.extended
def test_another_teacher_is_another_run(
    make_run: MakeRun, teacher: Path, tmp_path: Path, save_model: SaveModel
) -> None:
    copy = tmp_path / "copy.safetensors"
    copy.write_bytes(teacher.read_bytes())
    broken = make_run(tmp_path / "run", f"train.teacher={copy}")
    run_until(broken, 8)
    save_model(copy, preprocess=Preprocess((8, 8)), img_size=8, patch_size=4, depth=1)
    with pytest.raises(ValueError, match="the teacher's weights is"):
        make_run(tmp_path / "run", f"train.teacher={copy}").trainer.resume()


def test_a_path_is_the_same_from_every_directory(
    teacher: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(teacher.parent)
    config = load_config(None, [f"train.teacher={teacher.name}"])
    assert config.train.teacher == str(teacher)


def test_a_run_without_a_teacher_is_the_run_that_it_was(make_run: MakeRun, tmp_path: Path) -> None:
    settings = make_run(tmp_path / "run").trainer.identity.settings
    assert not [name for name in settings if "teacher" in name]


def test_a_module_from_python_has_a_teacher(teacher: Path, tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 10))
    overrides = [*TINY[:1], "train.epochs=1", "train.precision=float32", f"train.teacher={teacher}"]
    result = vit.train("digits", output=tmp_path, overrides=overrides, model=module)
    assert result.steps > 0


def test_the_plan_names_the_teacher(
    cli: Launcher, teacher: Path, tmp_path: Path, empty_yaml: Path
) -> None:
    run = tmp_path / "run"
    outcome = cli.succeed(
        "train", empty_yaml, *TINY, f"train.teacher={teacher}", "--dry-run", "-o", run
    )
    assert "a linear probe on its features is right on" in " ".join(outcome.text.split())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["train.teacher=nowhere.safetensors"],
            "train.teacher nowhere.safetensors is not timm:NAME",
        ),
        (["train.teacher=timm:vit_tinny"], "timm has no model 'vit_tinny'; similar names"),
    ],
)
def test_mistakes_are_one_sentence(
    cli: Launcher, tmp_path: Path, empty_yaml: Path, overrides: list[str], message: str
) -> None:
    text = cli.fail("train", empty_yaml, *TINY, *overrides, "-o", tmp_path / "run")
    assert message in " ".join(text.split())


def test_a_loss_from_python_has_no_teacher(teacher: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"train\.teacher is for .* leave it out"):
        vit.train(
            "digits",
            output=tmp_path,
            overrides=[f"train.teacher={teacher}"],
            loss=torch.nn.CrossEntropyLoss(),
        )


@pytest.mark.chaos
def test_two_processes_learn_alike(teacher: Path, tmp_path: Path) -> None:
    losses = []
    for size in (1, 2):
        directory = tmp_path / str(size)
        world = start_world(_train, directory, teacher, size=size)
        assert join_world(world) == [0] * size
        losses.append([line["loss"] for line in read_steps(directory)])
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)


def _train(directory: Path, teacher: Path) -> None:
    overrides = ["model.embed_dim=32", "model.depth=2", "train.max_steps=8"]
    train_recorded(directory, [*overrides, f"train.teacher={teacher}"], count=False)
