"""The best model by the measure that was asked for, and an end when it is no longer found."""

from pathlib import Path

import pytest
import torch

from tests.conftest import TINY_RUN, Launcher
from tests.training.conftest import MakeRun, flatten, read_metrics, run_until
from vit.training.plan import Progress, Validation

MEASURES = ["top1", "macro_f1", "loss"]


@pytest.mark.parametrize(
    ("select_by", "better", "worse"),
    [
        ("top1", Validation(9.0, 0.6, 0.0), Validation(0.1, 0.4, 1.0)),
        ("top1", Validation(0.9, 0.5, 0.0), Validation(1.1, 0.5, 1.0)),
        ("macro_f1", Validation(9.0, 0.0, 0.6), Validation(0.1, 1.0, 0.4)),
        ("loss", Validation(0.9, 0.0, 0.0), Validation(1.1, 1.0, 1.0)),
        ("loss", Validation(1.0, 0.6, 0.0), Validation(1.0, 0.4, 1.0)),
    ],
)
def test_the_measure_decides_and_ties_are_broken(
    select_by: str, better: Validation, worse: Validation
) -> None:
    progress = Progress(step=1)
    assert progress.record_best(Validation(1.0, 0.5, 0.5), select_by=select_by)
    progress.step = 2
    assert not progress.record_best(worse, select_by=select_by)
    assert (progress.best_step, progress.evaluations_since_best) == (1, 1)
    assert progress.record_best(better, select_by=select_by)
    assert (progress.best_step, progress.evaluations_since_best) == (2, 0)
    assert progress.best == better


@pytest.mark.parametrize("select_by", MEASURES)
def test_the_model_file_is_the_one_that_the_log_says(
    make_run: MakeRun, tmp_path: Path, select_by: str
) -> None:
    run = make_run(tmp_path, f"train.select_by={select_by}", "train.epochs=5")
    progress = run.trainer.train()
    sign = -1 if select_by == "loss" else 1
    values = {
        metrics["step"]: sign * metrics[f"val_{select_by}"] for metrics in read_metrics(tmp_path)
    }
    assert values[progress.best_step] == max(values.values())


PATIENT = [
    "train.early_stopping_patience=2",
    "train.epochs=40",
    "optimizer.muon_lr=0.3",
    "optimizer.lr=0.3",
]


def test_a_run_without_a_better_model_ends_and_stays_ended(
    make_run: MakeRun, tmp_path: Path
) -> None:
    run = make_run(tmp_path, *PATIENT)
    progress = run.trainer.train()
    metrics = read_metrics(tmp_path)
    assert 3 <= len(metrics) < 40
    ranks = [
        Validation(line["val_loss"], line["val_top1"], line["val_macro_f1"]).rank("top1")
        for line in metrics
    ]
    assert ranks.index(max(ranks)) == len(ranks) - 3  # the best, then two that are not
    assert progress.evaluations_since_best == 2
    again = make_run(tmp_path, *PATIENT)
    assert again.trainer.resume()
    again.trainer.train()
    assert read_metrics(tmp_path) == metrics


def test_patience_survives_a_kill(make_run: MakeRun, tmp_path: Path) -> None:
    whole = make_run(tmp_path / "whole", *PATIENT)
    whole.trainer.train()
    total = whole.trainer.progress.step
    for name, step in (
        ("before", total - 6),
        ("after", total - 2),
    ):  # of the last evaluation but one: epochs have 5
        run_until(make_run(tmp_path / name, *PATIENT), step)
        resumed = make_run(tmp_path / name, *PATIENT)
        assert resumed.trainer.resume()
        resumed.trainer.train()
        assert read_metrics(tmp_path / name) == read_metrics(tmp_path / "whole")
        states = [flatten(of_run.trainer.train_step.state_dict()) for of_run in (whole, resumed)]
        assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def test_the_user_is_told(cli: Launcher, empty_yaml: Path, tmp_path: Path) -> None:
    bad = [
        "optimizer.lr=0.3",
        "optimizer.muon_lr=0.3",
        "train.epochs=30",
        "train.select_by=macro_f1",
    ]
    outcome = cli.succeed(
        *(
            "train",
            empty_yaml,
            *TINY_RUN,
            *bad,
            "train.early_stopping_patience=1",
            "-o",
            tmp_path / "run",
        )
    )
    assert "stopped early: macro f1 was best at step" in outcome.text
    assert "macro F1 " in outcome.text
    line = cli.fail(
        *(
            "train",
            empty_yaml,
            *TINY_RUN,
            "data.validation_fraction=0",
            "train.early_stopping_patience=1",
        ),
        *("-o", tmp_path / "other"),
    )
    assert (
        "train.early_stopping_patience needs validation images; data.validation_fraction is 0"
        in line
    )
