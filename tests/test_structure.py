"""The layout of the package, and pinned versions that install."""

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
MAX_POSITIONAL_PARAMETERS = 5


def list_imports(path: Path) -> Iterator[str]:
    """Yield the modules that a file imports anywhere, except for types alone.

    `from a.b import name` gives "a.b" and "a.b.name".
    """
    tree = ast.parse(path.read_text())
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_no_import_circle_hides_inside_functions() -> None:
    """import-linter sees the layers; this sees each module. The root package is left out: it imports
    its public names when they are asked for."""
    paths = {}
    for path in sorted((ROOT / "vit").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        paths[".".join(parts).removesuffix(".__init__")] = path
    del paths["vit"]

    imports = {
        module: {name for name in list_imports(path) if name in paths and name != module}
        for module, path in paths.items()
    }
    # raises CycleError, which names the circle
    order = list(TopologicalSorter(imports).static_order())
    assert len(order) == len(paths) > 100


def test_no_function_takes_too_many_positional_arguments() -> None:
    """Without self and cls."""
    too_many = []
    for folder in ("vit", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    names = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]
                    if names[:1] in (["self"], ["cls"]):
                        names = names[1:]
                    if len(names) > MAX_POSITIONAL_PARAMETERS:
                        too_many.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}")
    assert too_many == []
