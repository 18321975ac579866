"""The habits of the code base, as tests: sizes, names, the direction of imports, what may be called where."""

import ast
import itertools
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]

MODULE_LINES = 400
FUNCTION_LINES = 60  # without its docstring
NAMES_THAT_SAY_NOTHING = {"base", "common", "helper", "helpers", "misc", "util", "utils"}

# Importable without JAX: a wrong config ends the run in the first second, and needs no device.
JAX_FREE = ("trainer.config", "trainer.validate", "trainer.parallel", "trainer.errors", "trainer.models.config")
JAX_AND_FRIENDS = {"jax", "jaxlib", "flax", "optax", "orbax", "tensorstore"}

# Imports point one way: ops <- models <- step <- loop <- __main__. What a module or folder may not import:
RUN = ("trainer.step", "trainer.loop", "trainer.__main__", "launch")
CONFIG = ("trainer.config", "trainer.config_files", "trainer.config_values", "trainer.validate")
MAY_NOT_IMPORT = {
    "trainer.ops": ("trainer.models", "trainer.data", *CONFIG, *RUN),
    "trainer.models": ("trainer.data", *CONFIG, *RUN),
    "trainer.data": ("trainer.models", *RUN),
    "trainer.mesh": ("trainer.models", *CONFIG, *RUN),
    "trainer.sharding": ("trainer.models", *CONFIG, *RUN),
    "trainer.params": ("trainer.models", *CONFIG, *RUN),
    "trainer.step": ("trainer.loop", "trainer.__main__", "launch"),
    "trainer.loop": ("trainer.__main__", "launch"),
    "trainer": ("launch",),
}

MESH_CONSTRUCTORS = {
    "jax.make_mesh",
    "jax.sharding.Mesh",
    "jax.sharding.AbstractMesh",
    "jax.experimental.mesh_utils.create_device_mesh",
    "jax.experimental.mesh_utils.create_hybrid_device_mesh",
}

TEXT_SUFFIXES = {"", ".cfg", ".jinja", ".json", ".md", ".py", ".sh", ".toml", ".txt", ".yaml", ".yml"}
MACHINE_PATH = re.compile(r"(?<![\w.:/~-])/(home|root|Users|work|tmp|private)/\w")


@cache
def modules() -> dict[str, ast.Module]:
    """The syntax tree of each module of the two packages, by its dotted name."""
    paths = [path for package in ("trainer", "launch") for path in sorted((ROOT / package).rglob("*.py"))]
    return {module_name(path): ast.parse(path.read_text(), str(path)) for path in paths}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def module_path(name: str) -> Path:
    path = ROOT.joinpath(*name.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def within(name: str, package: str) -> bool:
    """Whether a dotted name is the package or lies under it."""
    return f"{name}.".startswith(f"{package}.")


def imports(name: str) -> list[tuple[str, str]]:
    """(local name, dotted name of what it stands for) of each import anywhere in the module."""
    found = []
    package = name if module_path(name).name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(modules()[name]):
        if isinstance(node, ast.Import):
            found += [(alias.asname or alias.name, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            found += [(alias.asname or alias.name, f"{source}.{alias.name}") for alias in node.names]
    return found


def calls(name: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name of what is called) of each call in the module, imported names written out in full."""
    imported = dict(imports(name))
    for node in ast.walk(modules()[name]):
        if isinstance(node, ast.Call):
            head, dot, rest = ast.unparse(node.func).partition(".")
            yield node.lineno, imported.get(head, head) + dot + rest


def lines_without_docstring(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    lines = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function) is not None:
        lines -= function.body[0].end_lineno - function.body[0].lineno + 1
    return lines


def tracked_files() -> list[Path]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: nothing is tracked")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_modules_and_functions_are_short():
    too_long = []
    for name, tree in modules().items():
        lines = len(module_path(name).read_text().splitlines())
        if lines > MODULE_LINES:
            too_long.append(f"{name}: {lines} lines")
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = lines_without_docstring(node)
                if lines > FUNCTION_LINES:
                    too_long.append(f"{name}.{node.name}: {lines} lines")
    assert not too_long


def test_file_names_say_what_is_inside():
    paths = [path for folder in ("trainer", "launch", "tests") for path in (ROOT / folder).rglob("*")]
    assert not [str(path) for path in paths if path.stem.removeprefix("test_") in NAMES_THAT_SAY_NOTHING]


def test_imports_point_one_way():
    wrong = []
    for name in modules():
        forbidden = {other for package, others in MAY_NOT_IMPORT.items() if within(name, package) for other in others}
        for _, origin in imports(name):
            if any(within(origin, other) for other in forbidden):
                wrong.append(f"{name} imports {origin}")
    assert not wrong


def test_config_needs_no_jax():
    code = f"""
import importlib, sys
for name in {JAX_FREE}:
    importlib.import_module(name)
    print(name, *{JAX_AND_FRIENDS}.intersection(sys.modules))
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == list(JAX_FREE)


def test_platform_comes_from_the_mesh():
    # In a dry run the default backend is the CPU, while the step is compiled for a TPU.
    assert not [f"{name}:{line}" for name in modules() for line, call in calls(name) if "default_backend" in call]


def test_one_module_makes_meshes():
    assert "trainer.mesh" in modules()
    made = [(name, line) for name in modules() for line, call in calls(name) if call in MESH_CONSTRUCTORS]
    assert made and not [f"{name}:{line}" for name, line in made if name != "trainer.mesh"]


def test_no_except_swallows_everything():
    broad = []
    for name, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ExceptHandler) and not isinstance(node.body[-1], ast.Raise):
                caught = {"BaseException"} if node.type is None else set(re.findall(r"\w+", ast.unparse(node.type)))
                if caught & {"BaseException", "Exception"}:
                    broad.append(f"{name}:{node.lineno}")
    assert not broad


def test_tracked_files_name_no_machine():
    found = []
    for path in tracked_files():
        if path.suffix in TEXT_SUFFIXES and path.parent != ROOT / "data":  # data/ is text to train on
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
                if MACHINE_PATH.search(line):
                    found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert not found


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_every_dependency_is_pinned_once(python):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            pin = Requirement(line)
            if pin.marker is None or pin.marker.evaluate({"python_version": python}):
                assert pin.name.lower() not in pins, line
                pins[pin.name.lower()] = str(pin.specifier).removeprefix("==")
    asked = [*project["dependencies"], *itertools.chain(*project["optional-dependencies"].values())]
    for requirement in map(Requirement, asked):
        assert pins[requirement.name.lower()] in requirement.specifier
