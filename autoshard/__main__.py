"""`python -m autoshard`."""

from autoshard.cli.app import main

main()
