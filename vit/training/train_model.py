"""A training run from its configuration to its end."""

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from vit.bundle import PRETRAINED_FOLDER, list_pretrained
from vit.config import (
    Config,
    dump_config,
    load_config,
    plain_values,
    read_sections,
    validate_config,
)
from vit.data.sources.folders import check_not_inside
from vit.model.model_file import MODEL_FILE
from vit.options import TrainOptions
from vit.runtime.arguments import check_kind
from vit.runtime.console import build_console
from vit.runtime.files import write_text
from vit.runtime.processes import join_processes
from vit.training.automatic import choose_config, find_device
from vit.training.execution import time_steps
from vit.training.folds import OVERRIDES, check_folds, run_folds, save_folds
from vit.training.model_answers import complete_model_file
from vit.training.pictures import save_first_images
from vit.training.print_plan import print_plan
from vit.training.recipe import ConfigLike, find_recipe, names_images
from vit.training.result import TrainingResult
from vit.training.run import build_run
from vit.training.run_directory import CONFIG_FILE, open_run_directory
from vit.training.user_objects import UserObjects


def train_model(
    source: ConfigLike | None,
    overrides: Sequence[str],
    output: Path,
    options: TrainOptions,
    objects: UserObjects,
    *,
    shows_plan: bool = False,
) -> TrainingResult:
    """Train a model; arguments and errors as of `vit.train`.

    Args:
        source: a configuration, or images to choose one for.
        overrides: `key.path=value`, applied on top of it.
        output: the run's directory.
        options: how to start.
        objects: what was passed from Python and replaces parts of the configuration.
        shows_plan: print what the run will do before it starts; of a dry run with the minutes.
    """
    if source is not None:
        expected = "a recipe, YAML file, photos or sections; pass images from Python as dataset=…"
        check_kind(source, (str, Path, Mapping, Config), name="config", expected=expected)
    if options.resume and options.overwrite:
        raise ValueError("--resume continues a run and --overwrite replaces it; give one of them")
    if options.init is not None:
        init = find_initial_weights(options.init, output)
        overrides = [f"model.init={init}", *overrides]
    if options.group_by is not None:
        # as JSON, hence YAML: of an expression nothing is read as YAML's own
        group_by = str(options.group_by)
        value = group_by if group_by.isdecimal() else json.dumps(group_by)
        overrides = [f"data.group_by={value}", *overrides]
    if options.folds is not None:
        overrides = [*OVERRIDES, *overrides]
    config = resolve_config(source, overrides, output, options, objects)
    device = find_device(overrides) if config is None else config.train.device
    # before the directory is made, which would spoil the images for every later run
    root = source if config is None else config.data.root
    if isinstance(root, str | Path) and (config is None or config.data.name == "folder"):
        check_not_inside(output, Path(root).expanduser())

    with (
        join_processes(device) as (process, device_name),
        open_run_directory(
            output,
            resume=options.resume,
            overwrite=options.overwrite,
            # a dry run leaves a run that is there alone
            is_main=process.is_main and not options.dry_run,
        ),
    ):
        splits = None
        probe = None
        choices: dict[str, str] = {}
        if config is None and process.is_main:
            # it measures the speed of training: one process does so for all
            assert isinstance(source, str | Path)
            choice = choose_config(source, overrides, options.minutes)
            config, choices, splits, probe = choice
        config = process.broadcast(config)
        assert config is not None
        if options.folds is not None:
            check_folds(config)

        run = build_run(
            config,
            directory=output,
            process=process,
            device_name=device_name,
            objects=objects,
            splits=splits,
            probe=probe,
            resume=options.resume and not options.dry_run,
        )
        trainer = run.trainer
        resumed = options.resume and not options.dry_run and trainer.resume()
        if process.is_main and not options.dry_run and not resumed:
            write_text(output / CONFIG_FILE, dump_config(run.config))
            if run.probe is not None and run.probe.curve is not None:
                run.probe.curve.save(output)

        if shows_plan and options.dry_run:
            # its steps train, and all processes take part in them
            step_seconds = time_steps(trainer.train_step, trainer.train_batches)
            seconds = step_seconds * trainer.plan.count_full_steps(run.data.preprocess.image_size)
            if seconds < 120:
                duration = f"{seconds:.0f} seconds"
            else:
                duration = f"{seconds / 60:.0f} minutes"
            choices["estimate"] = f"{duration} of training steps"
        if shows_plan and process.is_main:
            print_plan(run, choices, resumed=resumed)
        if options.dry_run:
            save_first_images(run.image_loader, output / "dry_run.png")
            return TrainingResult(output, steps=0, seconds=0.0, best_top1=None)

        progress = trainer.train()
        complete_model_file(run, output, process, module=copy.deepcopy(objects.model))
        if options.folds is not None:
            cross_validation = run_folds(
                run.config, run.data, trainer.train_step.device, num_folds=options.folds
            )
            if process.is_main:
                save_folds(cross_validation, output)
                build_console(stderr=True).print(cross_validation.describe(), soft_wrap=True)

    return TrainingResult(
        output,
        steps=progress.step,
        seconds=progress.elapsed_seconds,
        best_top1=None if progress.best.top1 < 0 else progress.best.top1,
        module=objects.model,
        passed_images=None if objects.dataset is None else run.data.splits,
    )


def resolve_config(
    source: ConfigLike | None,
    overrides: Sequence[str],
    output: Path,
    options: TrainOptions,
    objects: UserObjects,
) -> Config | None:
    """The configuration of the run in the directory `output`.

    Args:
        source: a file, a recipe's name, sections or a `Config`; None for that of the run which is
            to be resumed.
        overrides: `key.path=value`, applied on top of it.
        output: the run's directory.
        options: whether to continue the run in it, if there is one.
        objects: what replaces parts of the configuration.

    Returns:
        The configuration; None where images are named, for which one is to be chosen.

    Raises:
        ValueError: there is no configuration, it is wrong, or it differs from that of the run
            which is to be resumed.
    """
    saved = output / CONFIG_FILE
    continues = options.resume and saved.exists()
    has_images = names_images(source)
    if options.minutes is not None and not has_images:
        raise ValueError(
            "--minutes is for a configuration that is chosen for images; others have train.epochs"
        )
    if has_images and not continues:
        if objects.dataset is not None or objects.model is not None:
            raise ValueError(
                "a configuration is chosen for images and models that are named; "
                "name a recipe to pass them from Python"
            )
        return None
    if source is None and not continues:
        usage = "vit train PHOTOS or CONFIG [key.path=value …] --output DIR"
        raise ValueError(f"which configuration? {usage}")

    if source is None or has_images:
        source = saved
    elif isinstance(source, Config):
        source = plain_values(source)
    elif not isinstance(source, Mapping):
        source = find_recipe(source)
    sections = read_sections(source, overrides)
    objects.mark_sections(sections)
    config = validate_config(sections)
    if not continues:
        return config

    # what was chosen then holds, whatever memory is free now
    if config.data.pipeline == "auto":
        sections.setdefault("data", {})["pipeline"] = load_config(saved).data.pipeline
        config = validate_config(sections)
    return config


def find_initial_weights(init: str | Path, output: Path) -> str:
    """The value of `model.init` for what a user names: timm:NAME; a file, a folder, a run directory
    or the model that comes with the package as an absolute path.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is the run that is about to be trained.
    """
    if str(init).startswith("timm:"):
        return str(init)
    path = Path(init).expanduser()
    # a folder of timm's has a config.json and is opened as a whole
    if path.is_dir() and not (path / "config.json").is_file():
        path /= MODEL_FILE
    if not path.exists() and str(init) in list_pretrained():
        path = PRETRAINED_FOLDER / f"{init}.safetensors"
    if not path.exists():
        names = " or ".join(["timm:NAME", *list_pretrained()])
        raise FileNotFoundError(f"--init {init} is not {names}, and there is no {path}")
    if path.resolve().parent == output.resolve():
        raise ValueError(f"--init {init} is the run in --output; choose another --output")
    return str(path.absolute())
