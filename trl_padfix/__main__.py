"""`python -m trl_padfix`: the `trl-padfix` command."""

from .cli.app import app


app(prog_name="trl-padfix")
