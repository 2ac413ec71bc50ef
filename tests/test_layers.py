"""Imports point one way: no module knows of a layer above its own, and no two know each other.

Lazy imports count: a function that imports what is above it is an arrow back all the same.
"""

import ast
import functools
import pathlib
import textwrap
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PACKAGES = ("schedules", "pallas_gemm", "bench", "examples")

LAYERS: tuple[tuple[str, ...], ...] = (
    ("schedules", "pallas_gemm._version"),
    ("pallas_gemm.program",),
    ("pallas_gemm.problem", "pallas_gemm.device"),
    ("pallas_gemm.config", "pallas_gemm.computer", "pallas_gemm.offline"),
    ("pallas_gemm.call",),
    ("pallas_gemm.kernels",),
    ("pallas_gemm.kernels.hopper", "pallas_gemm.kernels.blackwell"),
    ("pallas_gemm.planning",),
    ("pallas_gemm.op", "pallas_gemm.tuning", "pallas_gemm.proving"),
    ("pallas_gemm.rewriting",),
    ("pallas_gemm.api", "pallas_gemm.checkpoint_policies"),
    ("pallas_gemm",),
    ("pallas_gemm.layers",),
    ("pallas_gemm.flax", "pallas_gemm.equinox", "pallas_gemm.optax", "bench"),
    ("examples",),
)
"""What is in one row knows what is in the rows above, and itself; the longest name counts.

Of the package itself, row `pallas_gemm` holds what re-exports its names, and the command line.
"""

FEW = 10
"""Python files that a reader finds at the top of the package."""

LONGEST_FILE = 450
LONGEST_FUNCTION = 50
"""Lines of a file, and of a function that is not public: the arguments of those take more."""


def _name(path: pathlib.Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {
    _name(path): path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))
}


def _imports(path: pathlib.Path) -> Iterator[str]:
    """Yields the modules of this project that a module imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            # `from package import module` imports the module.
            names = [
                whole if (whole := f"{node.module}.{alias.name}") in MODULES else node.module
                for alias in node.names
            ]
        yield from (name for name in names if name in MODULES)


@functools.cache
def _graph() -> dict[str, list[str]]:
    return {name: sorted({*_imports(path)} - {name}) for name, path in MODULES.items()}


def _home(module: str) -> str:
    """Returns the entry of `LAYERS` that a module belongs to."""
    owners = [own for row in LAYERS for own in row if f"{module}.".startswith(f"{own}.")]
    assert owners, f"{module} belongs to no layer"
    return max(owners, key=len)


def _row(home: str) -> int:
    return next(i for i, row in enumerate(LAYERS) if home in row)


def _cycle(graph: dict[str, list[str]]) -> list[str]:
    """Returns a chain of modules that leads back to its first; empty without one."""
    finished: set[str] = set()

    def walk(module: str, chain: list[str]) -> list[str]:
        if module in chain:
            return [*chain[chain.index(module) :], module]
        if module in finished:
            return []
        for other in graph[module]:
            if found := walk(other, [*chain, module]):
                return found
        finished.add(module)
        return []

    return next((found for module in graph if (found := walk(module, []))), [])


@pytest.mark.parametrize("module", MODULES)
def test_no_arrow_points_up(module: str) -> None:
    own = _home(module)
    wrong = [
        other
        for other in _graph()[module]
        if (home := _home(other)) != own and _row(home) >= _row(own)
    ]
    assert not wrong, f"{module}, of {own}, imports {', '.join(wrong)}"


def test_no_modules_import_each_other() -> None:
    assert not (chain := _cycle(_graph())), " -> ".join(chain)


def test_arrows_and_cycles_are_noticed() -> None:
    assert _cycle({"a": ["b"], "b": ["c"], "c": ["b"]}) == ["b", "c", "b"]
    assert not _cycle({"a": ["b", "c"], "b": ["c"], "c": []})
    assert _row(_home("pallas_gemm.kernels.hopper.plan")) > _row(_home("pallas_gemm.kernels.smem"))
    assert _home("pallas_gemm.__main__") == "pallas_gemm"
    # An import inside of a function, of a module by way of its package.
    assert "pallas_gemm.api.doctor" in _graph()["pallas_gemm.__main__"]


def test_the_top_of_the_package_is_read_at_a_glance() -> None:
    assert len(list((ROOT / "pallas_gemm").glob("*.py"))) <= FEW


def test_what_pallas_has_no_words_for_is_in_one_folder() -> None:
    words = ("inline_mgpu", "inline_ptx")
    outside = [
        name
        for name, path in MODULES.items()
        if name.startswith("pallas_gemm.") and any(word in path.read_text() for word in words)
        if not name.startswith("pallas_gemm.kernels.ptx.")
    ]
    assert not outside


def test_every_file_is_read_in_one_sitting() -> None:
    lines = {name: len(path.read_text().splitlines()) for name, path in MODULES.items()}
    assert not {name: count for name, count in lines.items() if count > LONGEST_FILE}


@functools.cache
def _exported() -> frozenset[tuple[str | None, str]]:
    """Returns what packages re-export: each name, with its module."""
    files = [path for path in MODULES.values() if path.name == "__init__.py"]
    nodes = (node for path in files for node in ast.walk(ast.parse(path.read_text())))
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    pairs = ((node.module, alias) for node in imports for alias in node.names)
    return frozenset((module, alias.name) for module, alias in pairs if alias.asname == alias.name)


def _long_functions(module: str, text: str) -> list[str]:
    """Returns the functions of a module that are too long, and neither public nor make a class."""
    whole = ast.parse(text)
    public = [x for x in whole.body if (module, getattr(x, "name", "")) in _exported()]
    made = [x for own in public if isinstance(own, ast.ClassDef) for x in own.body]
    public += [x for x in made if isinstance(x, ast.FunctionDef) and x.name == "__init__"]
    functions = [x for x in ast.walk(whole) if isinstance(x, ast.FunctionDef)]
    lines = ((x.name, (x.end_lineno or 0) - x.lineno + 1) for x in functions if x not in public)
    return [name for name, count in lines if count > LONGEST_FUNCTION]


@pytest.mark.parametrize("module", [name for name in MODULES if name.startswith("pallas_gemm")])
def test_every_function_but_public_ones_is_short(module: str) -> None:
    assert not _long_functions(module, MODULES[module].read_text())


def test_long_functions_are_noticed() -> None:
    short, long = ("def {}():\n" + "    pass\n" * count for count in (49, 50))
    module = "pallas_gemm.api.gemm"
    assert _long_functions(module, long.format("of") + short.format("others")) == ["of"]
    # The same name elsewhere is not public.
    assert not _long_functions(module, long.format("gemm"))
    assert _long_functions("pallas_gemm.api.einsum", long.format("gemm")) == ["gemm"]
    module, maker = "pallas_gemm.api.recipe", textwrap.indent(long.format("__init__"), "    ")
    assert not _long_functions(module, f"class Recipe:\n{maker}")
    assert _long_functions(module, f"class Other:\n{maker}") == ["__init__"]
