"""Every package that is imported directly is declared, so that no other package has to bring it, in
versions that are tested."""

import ast
import re
import sys
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# folder or file in vit/ → the extras whose users run it
EXTRAS = {
    "analysis/audit": ["audit"],
    "data/depth.py": ["dicom"],
    "data/images.py": ["heic"],
    "data/sources/huggingface.py": ["datasets"],
    "deploy/export": ["export"],
    "deploy/serve": ["serve"],
}
# packages whose models are passed to us, and that of a notebook: they are imported only then
BROUGHT_BY_THE_USER = {"transformers", "IPython"}
# written into exports as they are, for programs that have them
WRITTEN = "deploy/export/templates/"


def list_packages(requirements: list[str]) -> set[str]:
    """The top-level packages of the distributions that are required; an absent one counts by its
    name."""
    packages = set()
    for text in requirements:
        match = re.match(r"[\w.-]+", text)
        assert match is not None
        name = match[0]
        packages.add(name.replace("-", "_"))
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        listed = distribution.read_text("top_level.txt")
        if listed is not None:
            packages |= set(listed.split())
        else:
            packages |= {file.parts[0].removesuffix(".py") for file in distribution.files or ()}
    return packages


def find_packages(path: Path) -> set[str]:
    """The top-level packages that a file imports anywhere in it."""
    packages = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            packages |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            packages.add(node.module.partition(".")[0])
    return packages - {"vit"} - sys.stdlib_module_names


def test_every_import_is_declared() -> None:
    dependencies = list_packages(PROJECT["dependencies"])
    optional = {
        place: {
            package
            for extra in extras
            for package in list_packages(PROJECT["optional-dependencies"][extra])
        }
        for place, extras in EXTRAS.items()
    }
    undeclared = set()
    num_checked = 0
    for path in sorted((ROOT / "vit").rglob("*.py")):
        name = path.relative_to(ROOT / "vit").as_posix()
        if name.startswith(WRITTEN):
            continue
        declared = dependencies | BROUGHT_BY_THE_USER
        for place, packages in optional.items():
            if name.startswith(place):
                declared = declared | packages
        imported = find_packages(path)
        num_checked += len(imported)
        undeclared |= {f"{name}: {package}" for package in imported - declared}
    assert undeclared == set()
    assert num_checked > 200


def read_pins(name: str) -> dict[str, Version]:
    """Package → version in a file of constraints."""
    lines = (ROOT / name).read_text().splitlines()
    pins = (line.split("==") for line in lines)
    return {canonicalize_name(package): Version(version) for package, version in pins}


def test_constraints_are_the_oldest_and_the_newest_versions_that_are_tested() -> None:
    """`make oldest-constraints` after a bound has changed."""
    oldest, newest = read_pins("constraints-oldest.txt"), read_pins("constraints.txt")
    groups = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    for requirement in map(Requirement, (text for group in groups for text in group)):
        name = canonicalize_name(requirement.name)
        if name == "vit-pipeline":
            continue
        assert requirement.specifier.contains(newest[name]), requirement
        (bound,) = (part for part in requirement.specifier if part.operator == ">=")
        # what the extra dev doesn't bring isn't installed for tests
        assert oldest.get(name, Version(bound.version)) == Version(bound.version), requirement
    names = {canonicalize_name(Requirement(text).name) for text in PROJECT["dependencies"]}
    assert names <= oldest.keys()
