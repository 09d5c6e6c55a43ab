"""Which module imports which: downwards only, and in no circle."""

import ast
import functools
from graphlib import TopologicalSorter
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[2]
LAYERS = ("core", "trainers", "integrations", "tools", "cli")
FILES = {layer: sorted((ROOT / "trl_padfix" / layer).rglob("*.py")) for layer in LAYERS}


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@functools.cache
def imported_by(path: Path) -> set[str]:
    """Modules and names that a file imports at run time, in functions too, but not under `TYPE_CHECKING`."""
    package, found = path.relative_to(ROOT).parts[:-1], set()
    tree = ast.parse(path.read_text())
    typing_only = [n for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    skipped = {id(n) for block in typing_only for statement in block.body for n in ast.walk(statement)}
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            source = ".".join((*base, *filter(None, [node.module])))
            found |= {source} | {f"{source}.{alias.name}" for alias in node.names}
    return found


def test_nothing_imports_upwards():
    for layer in LAYERS:
        above = [f"trl_padfix.{other}." for other in LAYERS[LAYERS.index(layer) + 1 :]] + ["trl."] * (layer == "core")
        for file in FILES[layer]:
            assert not [name for name in imported_by(file) if f"{name}.".startswith((*above,))], file


def test_no_circle():
    for layer in LAYERS:
        names = {module_name(file): file for file in FILES[layer]}
        assert len(names) > 1
        # Raises `CycleError` with the circle. A package is imported along with its modules, which is no circle.
        graph = {name: imported_by(file) & names.keys() - {name} for name, file in names.items()}
        graph = {n: {m for m in found if not n.startswith(f"{m}.")} for n, found in graph.items()}
        list(TopologicalSorter(graph).static_order())


@pytest.mark.parametrize("layer", LAYERS[:2])
def test_rooms_stand_on_floors(layer):
    """A room is a folder with all its files, or a file beside the folders: of two rooms only one imports the other."""
    rooms = {module_name(file): module_name(file).split(".")[2] for file in FILES[layer] if file.stem != "__init__"}
    graph = {room: set[str]() for room in rooms.values()}
    for file in FILES[layer]:
        if room := rooms.get(module_name(file)):
            graph[room] |= {rooms[name] for name in imported_by(file) & rooms.keys()} - {room}
    assert len(list(TopologicalSorter(graph).static_order())) == len(graph) > 10  # raises `CycleError`


def test_one_file_of_core_reads_the_code_of_models():
    files = [file for file in FILES["core"] if file.parent.name != "parity"]
    readers = {file.name for file in files if imported_by(file) & {"dis", "inspect"}}
    assert readers == {"inspection.py", "patching.py"}  # a patch hands on the signature of what it wraps
    words = ("co_names", "co_varnames", "co_flags", "getclosurevars", "getsource")
    assert {file.name for file in files if any(word in file.read_text() for word in words)} == {"inspection.py"}
