"""`trl-padfix recipe list | show | copy`."""

from __future__ import annotations

import re
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated

import typer
from rich.padding import Padding
from typer import Argument

from .console import console
from .user_errors import WrappedSummaries


__all__ = ["app", "folder"]

app = typer.Typer(
    cls=WrappedSummaries,
    no_args_is_help=True,
    help="List, show and copy the recipes and configurations of accelerate.",
    rich_markup_mode=None,
)

_SHIPPED = (".yaml", ".py", ".md")


def folder() -> Path:
    """The folder of the recipes: in the package if it is installed from a wheel, beside it in a clone."""
    package = Path(__file__).parents[1]
    places = (package / "recipes", package.parent / "recipes")
    return next(place for place in places if (place / "README.md").exists())


def _find(name: str) -> Path:
    root = folder()
    recipes = sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.suffix in _SHIPPED)
    if f"{name}.yaml" in recipes:
        name = f"{name}.yaml"
    if name not in recipes:
        near = get_close_matches(name, [*recipes, *(path.removesuffix(".yaml") for path in recipes)], n=1)
        mean = f" Is {near[0]!r} meant?" if near else ""
        raise typer.BadParameter(
            f"there is no recipe {name!r}.{mean} `trl-padfix recipe list` names them.", param_hint="NAME"
        )
    return root / name


def _with_needs(path: Path, root: Path) -> list[Path]:
    """A file of the recipes, and what it names: data, a script, a configuration of accelerate, and what these name."""
    needed, waiting = [], [path]
    while waiting:
        file = waiting.pop()
        if file in needed:
            continue
        needed.append(file)
        if file.suffix not in (".yaml", ".py"):
            continue
        for name in sorted(set(re.findall(r"recipes/([\w./-]*\w)", file.read_text()))):
            named = root / name
            waiting += [p for p in named.rglob("*") if p.is_file()] if named.is_dir() else [named] * named.is_file()
    return needed


@app.command("list")
def list_recipes() -> None:
    """Name every recipe and what it trains."""
    root = folder()
    for path in sorted([*root.glob("*.yaml"), *root.glob("accelerate/*.yaml")]):
        about = path.read_text().splitlines()[0].lstrip("# ").rstrip(":.")
        console.print(f"[bold]{path.relative_to(root)}[/bold]")
        console.print(Padding(about, (0, 0, 0, 4)))  # indents every line of a long one


@app.command()
def show(name: Annotated[str, Argument(help="Name of the file, as `list` prints it.")]) -> None:
    """Print a recipe."""
    typer.echo(_find(name).read_text(), nl=False)


@app.command()
def copy(
    name: Annotated[str, Argument(help="Name of the file, as `list` prints it; `all` for the whole folder.")],
    to: Annotated[Path, Argument(help="Folder to copy it to; made if it is not there.")] = Path("recipes"),
) -> None:
    """Copy a recipe with the files that it names (or all recipes), to change it; nothing is written over."""
    root = folder()
    if name == "all":
        files = [p for p in root.rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    else:
        files = _with_needs(_find(name), root)
    wanted = {to / path.relative_to(root): _content(path, to) for path in files}
    contents = {target: content for target, content in wanted.items() if not _is_there(target, content)}
    if existing := next((target for target in contents if target.exists()), None):
        raise typer.BadParameter(
            f"{str(existing)!r} is there already, and nothing is written over. Name another folder.", param_hint="TO"
        )
    for target, content in contents.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
    there = len(wanted) - len(contents)
    same = f"; {there} {'was' if there == 1 else 'were'} there already, the same" if there else ""
    typer.echo(f"{len(contents)} file{'s' * (len(contents) != 1)} copied to {to}{same}")


def _content(path: Path, to: Path) -> bytes:
    """A file as it is copied: the files of the recipes name one another from the folder above."""
    content = path.read_bytes()
    named_elsewhere = path.suffix in _SHIPPED and to != Path("recipes")
    return content.replace(b"recipes/", f"{to.as_posix()}/".encode()) if named_elsewhere else content


def _is_there(target: Path, content: bytes) -> bool:
    """Whether another recipe brought the same file before."""
    return target.is_file() and target.read_bytes() == content
