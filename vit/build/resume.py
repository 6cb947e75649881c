"""A run goes on from its checkpoints, also to more epochs than it was to have where its schedule allows that."""

from pathlib import Path

from vit.build.run import Run, build_plan, build_schedule, find_patch_size
from vit.config import Config, dump_config, load_config
from vit.model.model_file import MODEL_FILE
from vit.optim.schedule import schedule_factor
from vit.runtime.files import rename_durably, write_text
from vit.training.identity import find_changes
from vit.training.plan import TrainingPlan
from vit.training.run_directory import CONFIG_FILE


def resume_run(run: Run, config: Config, *, directory: Path) -> bool:
    """Go back to the newest whole checkpoint; False where there is none. Where `config` has more epochs than the run
    in `directory`, to the newest one that a run of so many epochs has too: it ends as that one would, bit for bit. The
    model file so far is kept under another name. Raises ValueError where there is no such checkpoint."""
    saved, trainer = directory / CONFIG_FILE, run.trainer
    if not saved.exists() or "train.epochs" not in find_changes(config, saved):
        return trainer.resume()
    shorter, plan, is_main = load_config(saved), trainer.plan, trainer.process.is_main
    sizes = {"steps_per_epoch": plan.steps_per_epoch, "batch_size": plan.batch_size}
    patch_size = find_patch_size(run.model)
    common = count_common_steps(shorter, build_plan(shorter, **sizes, patch_size=patch_size), config, plan)
    steps = trainer.process.broadcast(trainer.checkpoints.list_steps())
    if not [step for step in steps if step <= common]:
        text = f"{directory} has no checkpoint of the first {common} steps, which {plan.epochs} epochs would share"
        raise ValueError(f"{text}; start another run from its model with --init {directory}")
    model = directory / MODEL_FILE
    if is_main and model.exists():
        rename_durably(model, directory / f"model-{shorter.train.epochs}-epochs.safetensors")
    trainer.resume(most_steps=common)
    if is_main:
        write_text(saved, dump_config(config))
    return True


def count_common_steps(config: Config, plan: TrainingPlan, other: Config, other_plan: TrainingPlan) -> int:
    """After how many steps two runs that differ in their epochs alone are still in the same state."""

    def at(config: Config, plan: TrainingPlan, step: int) -> tuple[object, ...]:
        """What the step before `step` was made with, and the rate that is set for the next one."""
        epoch = (step - 1) // plan.steps_per_epoch
        factor = schedule_factor(step, **build_schedule(config, plan))
        return factor, plan.image_size(epoch), epoch < plan.mix_until * plan.epochs

    steps = range(1, min(plan.total_steps, other_plan.total_steps))
    return next((step for step in steps if at(config, plan, step) != at(other, other_plan, step)), steps.stop) - 1
