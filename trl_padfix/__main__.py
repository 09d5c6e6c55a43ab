"""`python -m trl_padfix`: the `trl-padfix` command."""

from .cli import main


main()
