"""`python -m toolspace`: the command line."""

from toolspace.cli.main import main

main()
