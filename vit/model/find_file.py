"""Find the file of a model that a user names. This needs no torch, whose import takes seconds."""

from mimetypes import guess_type
from pathlib import Path

import vit  # its folder holds the model of the package
from vit.runtime.files import expand_home
from vit.runtime.places import explain_file, suggest

MODEL_FILE = "model.safetensors"
_TIMM = "timm:"
# The model that comes with the package.
PACKAGED = "imagenette"
PACKAGED_FILE = Path(vit.__file__).parent / "pretrained" / f"{PACKAGED}.safetensors"


def find_model(source: str | Path) -> str | Path:
    """Return what a user's name of a model means: timm:NAME; the folder of timm or Hugging Face; or
    the file of weights, which is the name itself, that of a run, or that of the package. Raises
    FileNotFoundError, and ValueError for an image, an archive or a document."""
    if str(source).startswith(_TIMM):
        return str(source)
    path = expand_home(source)
    if (path / "config.json").is_file():
        return path
    file = path / MODEL_FILE if path.is_dir() else path
    if problem := explain_file(file):
        raise ValueError(problem)
    if file.exists():
        if (guess_type(file.name)[0] or "").startswith("image/"):
            raise ValueError(f"{source} is an image, not a model; the model comes first")
        return file

    # A folder of images may have the same name.
    if str(source) == PACKAGED:
        return PACKAGED_FILE
    if path.is_dir():
        raise FileNotFoundError(
            f"{source} holds no {MODEL_FILE}, which training writes after the first evaluation; "
            "for other weights, name their file"
        )
    # timm takes seconds to import
    from timm import list_models

    names = [PACKAGED, *(f"{_TIMM}{name}" for name in list_models())]
    raise FileNotFoundError(
        f"{source} does not exist; a model is a run, a file of weights, a folder of timm or "
        f"Hugging Face, timm:NAME or {PACKAGED}{suggest(source, names)}"
    )


def find_initial_weights(init: str | Path, directory: Path) -> str:
    """Return the value of `model.init` for the weights that a user names: timm:NAME, or an absolute
    path. Raises the errors of `find_model`, and ValueError for the run that is about to be trained
    in `directory`."""
    found = find_model(init)
    if isinstance(found, str):
        return found
    if directory.resolve() in found.resolve().parents:
        raise ValueError(f"--init {init} is the run in --output; choose another --output")
    return str(found.absolute())
