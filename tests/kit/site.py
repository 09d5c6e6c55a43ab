"""The site, built as CI builds it."""

import shutil
import subprocess
import sys
from pathlib import Path


ROOT = Path(__file__).parents[2]


def build(folder: Path) -> Path:
    """Build the site from a copy of its sources in `folder`; the folder of its pages."""
    shutil.copytree(ROOT / "docs", folder / "docs")
    shutil.copyfile(ROOT / "mkdocs.yml", folder / "mkdocs.yml")
    for name in ("trl_padfix", "recipes", "CHANGELOG.md", "SECURITY.md", "CONTRIBUTING.md"):
        (folder / name).symlink_to(ROOT / name)
    for command in (["docs/copied_pages.py"], ["-m", "zensical", "build", "--strict"]):
        done = subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder / "build/site"
