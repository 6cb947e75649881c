"""Find the file of a model that a user names. This needs no torch, whose import takes seconds."""

from pathlib import Path

import vit  # its folder holds the models of the package
from vit.runtime.files import expand_home
from vit.runtime.places import explain_file, suggest

MODEL_FILE = "model.safetensors"
# Models that come with the package, as NAME.safetensors.
PRETRAINED_FOLDER = Path(vit.__file__).parent / "pretrained"


def list_pretrained() -> list[str]:
    """Return the names of the models that come with the package."""
    return sorted(path.stem for path in PRETRAINED_FOLDER.glob("*.safetensors"))


def list_example_photos() -> list[Path]:
    """Return the photos that come with the package, to try its models with."""
    folder = PRETRAINED_FOLDER / "photos"
    if not folder.is_dir():
        folder = PRETRAINED_FOLDER.parents[1] / "docs" / "photos"  # in a checkout
    return sorted(folder.glob("*.jpg"))


def is_timm_folder(source: str | Path) -> bool:
    """Tell a folder of timm, or of Hugging Face, from a run."""
    return (expand_home(source) / "config.json").is_file()


def is_model_name(text: str) -> bool:
    """Tell a model that a user names from images: timm:NAME, a model file, a run, or the name of a
    model of the package, unless a file or folder has the same name."""
    path = expand_home(text)
    if text.startswith("timm:") or path.suffix == ".safetensors":
        return True
    return (path / MODEL_FILE).is_file() or (text in list_pretrained() and not path.exists())


def find_model_file(source: str | Path) -> Path:
    """Return the model file that a user names: itself, that of a run, or one of the package.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is an archive or a document.
    """
    path = Path(source)
    file = path / MODEL_FILE if path.is_dir() else path
    if problem := explain_file(file):
        raise ValueError(problem)
    if file.is_file():
        return file

    # A folder of images may have the same name.
    names = list_pretrained()
    if str(source) in names:
        return PRETRAINED_FOLDER / f"{source}.safetensors"
    if path.is_dir():
        raise FileNotFoundError(
            f"{source} holds no {MODEL_FILE}; training writes it after the first evaluation"
        )
    choices = ", ".join([f"a {MODEL_FILE}", "a run", "timm:NAME", *names])
    raise FileNotFoundError(
        f"{path} does not exist; MODEL is one of: {choices}{suggest(path, names)}"
    )


def find_initial_weights(init: str | Path, directory: Path | None = None) -> str:
    """Return the value of `model.init` for the weights that a user names: timm:NAME, or the
    absolute path of a file, a folder, a run or the model that comes with the package.

    Args:
        init: Name or path of the weights.
        directory: Directory of the run that starts from them.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is the run that is about to be trained, an archive or a document.
    """
    if str(init).startswith("timm:"):
        return str(init)
    path = expand_home(init)
    # A folder of timm is opened as a whole.
    if path.is_dir() and not is_timm_folder(path):
        path /= MODEL_FILE
    if not path.exists() and str(init) in list_pretrained():
        path = PRETRAINED_FOLDER / f"{init}.safetensors"
    if problem := explain_file(path):
        raise ValueError(f"--init {problem}")
    if not path.exists():
        names = list_pretrained()
        known = " or ".join(["timm:NAME", *names])
        hint = suggest(init, names)
        raise FileNotFoundError(f"--init {init} is not {known}, and there is no {path}{hint}")
    if directory is not None and directory.resolve() in path.resolve().parents:
        raise ValueError(f"--init {init} is the run in --output; choose another --output")
    return str(path.absolute())
