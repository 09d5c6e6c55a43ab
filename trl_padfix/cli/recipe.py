"""`trl-padfix recipe list | show | copy`."""

from __future__ import annotations

import shutil
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated

import typer
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


@app.command("list")
def list_recipes() -> None:
    """Name every recipe and what it trains."""
    root = folder()
    for path in sorted([*root.glob("*.yaml"), *root.glob("accelerate/*.yaml")]):
        about = path.read_text().splitlines()[0].lstrip("# ").rstrip(":.")
        console.print(f"[bold]{path.relative_to(root)}[/bold]\n    {about}")


@app.command()
def show(name: Annotated[str, Argument(help="Name of the file, as `list` prints it.")]) -> None:
    """Print a recipe."""
    typer.echo(_find(name).read_text(), nl=False)


@app.command()
def copy(
    name: Annotated[str, Argument(help="Name of the file, as `list` prints it; `all` for the whole folder.")],
    to: Annotated[Path, Argument(help="Folder to copy it to; made if it is not there.")] = Path("recipes"),
) -> None:
    """Copy a recipe (or all of them, with their data), to change it; nothing is written over."""
    root = folder()
    if name == "all":
        files = [p for p in root.rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    else:
        files = [_find(name)]
    targets = {path: to / path.relative_to(root) for path in files}
    if existing := next((target for target in targets.values() if target.exists()), None):
        raise typer.BadParameter(
            f"{str(existing)!r} is there already, and nothing is written over. Name another folder.", param_hint="TO"
        )
    for path, target in targets.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    typer.echo(f"{len(files)} file{'s' * (len(files) != 1)} copied to {to}")
