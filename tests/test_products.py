"""A product is deleted with its folder and its lines in vit/api.py and vit/cli/: the rest works."""

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "vit"
PRODUCTS = sorted(
    f"vit.{floor}.{folder.name}"
    for floor in ("analysis", "deploy")
    for folder in (PACKAGE / floor).iterdir()
    if (folder / "__init__.py").is_file()
)
# imports all that is left, trains two steps and evaluates
USE = """
from importlib import import_module
from pathlib import Path

import vit

root = Path(vit.__file__).parents[1]
assert root == Path.cwd(), root
for path in sorted((root / "vit").rglob("*.py")):
    if path.name not in ("__init__.py", "__main__.py"):
        import_module(".".join(path.relative_to(root).with_suffix("").parts))
sections = {
    "data": {"name": "digits", "workers": 0},
    "model": {"patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2},
    "train": {"epochs": 1, "batch_size": 640, "device": "cpu", "precision": "float32"},
}
run = vit.train(sections, output="run")
assert run.steps == 2, run.steps
vit.evaluate(run.bundle, num_examples=1).save("evaluation")
assert Path("evaluation/report.html").is_file()
"""


def copy_without(products: Sequence[str], folder: Path) -> None:
    """Copy the package without these products."""
    shutil.copytree(PACKAGE, folder / "vit", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(PACKAGE.parent / "configs", folder / "configs")
    for product in products:
        shutil.rmtree(folder / product.replace(".", "/"))
    commands = [f"{product.rpartition('.')[2]}," for product in products]
    for path in [folder / "vit" / "api.py", *(folder / "vit" / "cli").glob("*.py")]:
        kept = [
            line
            for line in path.read_text().splitlines(keepends=True)
            if not any(f"{product}." in line for product in products)
            and line.strip() not in commands
        ]
        path.write_text("".join(kept))


def run(folder: Path, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    outcome = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert outcome.returncode == 0, outcome.stderr
    return outcome.stdout


def list_imports(folder: Path) -> Iterator[tuple[str, str]]:
    """Each file with each module that it imports."""
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    yield str(path), f"{node.module}.{alias.name}."
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    yield str(path), f"{alias.name}."


@pytest.mark.parametrize("product", PRODUCTS)
def test_nothing_left_imports_a_deleted_product(product: str, tmp_path: Path) -> None:
    copy_without([product], tmp_path)
    files = [path for path, module in list_imports(tmp_path) if module.startswith(f"{product}.")]
    assert files == []
    assert "train" in run(tmp_path, "-m", "vit", "--help")


@pytest.mark.extended
def test_without_any_product_the_rest_is_imported_trains_and_evaluates(tmp_path: Path) -> None:
    copy_without(PRODUCTS, tmp_path)
    run(tmp_path, "-c", USE)
    help = run(tmp_path, "-m", "vit", "--help")
    assert "train" in help
    assert "audit" not in help
