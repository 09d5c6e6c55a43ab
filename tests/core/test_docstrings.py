"""Docstrings list the arguments and attributes that there are: a renamed field is renamed there, too."""

import ast
import re
from pathlib import Path


PACKAGE = Path(__file__).parents[2] / "trl_padfix"


def listed(docstring, section):
    """Names of the entries of `Args:` or `Attributes:`; an entry may have several (`a, b (`int`):`)."""
    entries = re.search(rf"^{section}:\n((?: {{4}}.*\n|\n)+)", f"{docstring}\n", re.MULTILINE)
    names = re.findall(r"^ {4}(\w+(?:, \w+)*)(?: \(.*\))?:", entries[1], re.MULTILINE) if entries else []
    return {name for several in names for name in several.split(", ")}


def parameters(function):
    arguments = function.args
    several = [a for a in (arguments.vararg, arguments.kwarg) if a is not None]
    return {a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *several)}


def members(node, classes):
    """What a class and its bases in the package define: fields, methods, attributes of `self`, and parameters."""
    names = {n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
    for method in (n for n in node.body if isinstance(n, ast.FunctionDef)):
        names |= {method.name} | (parameters(method) if method.name == "__init__" else set())
    stored = [n for n in ast.walk(node) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)]
    names |= {n.attr for n in stored if getattr(n.value, "id", None) == "self"}
    bases = [classes[ast.unparse(base)] for base in node.bases if ast.unparse(base) in classes]
    return names.union(*(members(base, classes) for base in bases))


def wrong_entries(sources):
    """The entries of docstrings in `sources` that name nothing, by where they stand."""
    trees = [ast.parse(source) for source in sources]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    classes = {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}
    found = {}
    for node in nodes:
        if not isinstance(node, ast.ClassDef | ast.FunctionDef) or not (docstring := ast.get_docstring(node)):
            continue
        if isinstance(node, ast.FunctionDef):
            wrong = listed(docstring, "Args") - parameters(node)
        elif any(ast.unparse(base).startswith("trl") for base in node.bases):
            continue  # TRL's class has the fields
        else:
            named = listed(docstring, "Args") | listed(docstring, "Attributes")
            wrong = named and named - members(node, classes)
        if wrong:
            found[node.name] = wrong
    return found


def test_docstrings_list_what_there_is():
    assert wrong_entries(path.read_text() for path in PACKAGE.rglob("*.py")) == {}


def test_a_renamed_field_is_found():
    source = '''
class Plan:
    """
    Attributes:
        rows (`int`): Rows.
        accumulated, processes (`int`): Numbers.
    """

    rows: int
    accumulation_steps: int
    processes: int
'''
    assert wrong_entries([source]) == {"Plan": {"accumulated"}}
