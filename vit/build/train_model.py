"""A run from its configuration to its end."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from vit.build.data import Given
from vit.build.recipe import Chosen, ConfigLike, prepare_config
from vit.build.resume import resume_run
from vit.build.run import Run, build_run
from vit.build.summary import draw_batch
from vit.config import Config, dump_config
from vit.runtime.files import write_text
from vit.runtime.processes import Process, join_processes
from vit.training.result import TrainingResult
from vit.training.run_directory import CONFIG_FILE, open_run_directory


def train_model(
    config: ConfigLike | None,
    output: Path,
    given: Given,
    *,
    overrides: Sequence[str],
    init: str | Path | None,
    minutes: float | None,
    resume: bool,
    overwrite: bool,
    dry_run: bool,
    on_start: Callable[[Run, bool], object],
) -> TrainingResult:
    """`vit.train`, with what replaces parts of the configuration in `given`."""
    changes = [*overrides, *given.overrides]
    device, choose = prepare_config(config, changes, output, resume=resume, init=init, minutes=minutes)
    with join_processes(device) as (process, device_name):
        build = partial(_build_chosen, choose, given=given, directory=output, process=process, device_name=device_name)
        if dry_run:
            output.mkdir(parents=True, exist_ok=True)
            _, run = build()
            on_start(run, False)
            draw_batch(run, output / "dry_run.png")
            return TrainingResult(output, steps=0, seconds=0.0, best_top1=None)
        with open_run_directory(output, resume=resume, overwrite=overwrite, is_main=process.is_main):
            resolved, run = build()
            resumed = resume and resume_run(run, resolved, directory=output)
            if process.is_main:
                if not (output / CONFIG_FILE).exists():
                    write_text(output / CONFIG_FILE, dump_config(resolved))
                on_start(run, resumed)
            progress = run.trainer.run()
    best_top1 = None if progress.best_top1 < 0 else progress.best_top1
    return TrainingResult(output, progress.step, progress.elapsed_seconds, best_top1, given.model)


def _build_chosen(choose: Callable[[], Chosen], *, given: Given, process: Process, **more: Any) -> tuple[Config, Run]:
    """The run of the configuration that the main process chooses, for which it may have opened the data set."""
    chosen = choose() if process.is_main else None
    if chosen is not None and chosen.dataset is not None:
        given = replace(given, dataset=chosen.dataset)
    told = process.broadcast(None if chosen is None else chosen[:2])
    assert told is not None
    resolved, choices = told
    return resolved, replace(build_run(resolved, process=process, given=given, **more), choices=choices)
