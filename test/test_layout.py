"""Imports in the package point one way, through the layers below."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = "lowbit_optim"
# A module imports from the layers to its left alone. What is not named here builds on the finished optimizer.
LAYERS = [
    "codec",
    "shards",
    "subclasses",
    "sharding",
    "updates",
    "weights",
    "compiled",
    "options",
    "hyperparameters",
    "formats",
    "checkpoint",
    "offload",
    "optimizer",
    "lion",
]
ONLY_WHERE_USED = ["fused", "int8_training", "triton_launch"]
MODULES = sorted(p.relative_to(ROOT).as_posix() for p in (ROOT / PACKAGE).rglob("*.py"))


class Import(NamedTuple):
    target: str  # dotted and absolute, with the imported name: lowbit_optim.subclasses.OptimState8bit
    at_import: bool  # whether importing the module runs it


def imports_of(source: str, module: str) -> Iterator[Import]:
    """All imports of a module, given its source and its path such as ``lowbit_optim/subclasses/blockwise.py``."""
    package = module.split("/")[:-1]
    tree = ast.parse(source)
    inside_functions = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        at_import = id(node) not in inside_functions
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, at_import) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            yield from (Import(f"{prefix}.{alias.name}", at_import) for alias in node.names)


def layer(dotted: str) -> str:
    """``lowbit_optim.subclasses.blockwise`` -> ``subclasses``; the package itself is the empty string."""
    return [*dotted.split("."), ""][1]


def layer_of_file(module: str) -> str:
    name = module.split("/")[1].removesuffix(".py")
    return "" if name == "__init__" else name


def wrong_imports(source: str, module: str) -> list[str]:
    own = layer_of_file(module)
    if own not in LAYERS:
        return []
    below = LAYERS[: LAYERS.index(own)]
    return [
        i.target
        for i in imports_of(source, module)
        if i.target.split(".")[0] == PACKAGE and layer(i.target) not in [own, *below, *ONLY_WHERE_USED]
    ]


def early_imports(source: str, module: str) -> list[str]:
    """Imports of what is to be imported only where it is used, by other modules, that run with the module's own."""
    return [
        i.target
        for i in imports_of(source, module)
        if i.at_import and i.target.split(".")[0] == PACKAGE and layer(i.target) in ONLY_WHERE_USED
    ]


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_one_way(module: str) -> None:
    assert wrong_imports((ROOT / module).read_text(), module) == []


@pytest.mark.parametrize("module", [m for m in MODULES if layer_of_file(m) not in ONLY_WHERE_USED])
def test_what_needs_triton_is_imported_only_where_used(module: str) -> None:
    assert early_imports((ROOT / module).read_text(), module) == []


@pytest.mark.parametrize("module", MODULES)
def test_torch_distributed_is_imported_only_where_used(module: str) -> None:
    """Some builds of torch are without it."""
    imports = imports_of((ROOT / module).read_text(), module)
    assert [i.target for i in imports if i.at_import and i.target.startswith("torch.distributed")] == []


def test_codec_imports_torch_alone() -> None:
    module = f"{PACKAGE}/codec.py"
    roots = {i.target.split(".")[0] for i in imports_of((ROOT / module).read_text(), module)}
    assert roots - sys.stdlib_module_names == {"torch"}


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("codec.py", "from .lion import Lion"),
        ("codec.py", "import lowbit_optim.optimizer"),
        ("subclasses/blockwise.py", "from ..optimizer import LionBase"),
        ("subclasses/blockwise.py", "from lowbit_optim import Lion"),
        ("optimizer.py", "def f():\n    from lowbit_optim.lion import lion_update"),
    ],
)
def test_a_wrong_import_is_seen(module: str, line: str) -> None:
    assert len(wrong_imports(line, f"{PACKAGE}/{module}")) == 1


@pytest.mark.parametrize(
    "line", ["from . import fused", "from .fused.step import run", "import lowbit_optim.int8_training"]
)
def test_an_early_import_is_seen(line: str) -> None:
    assert len(early_imports(line, f"{PACKAGE}/optimizer.py")) == 1
    assert early_imports(f"def f():\n    {line}", f"{PACKAGE}/optimizer.py") == []
