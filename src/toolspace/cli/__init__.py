"""The command line, over the library. One module per command; `main` finds them."""
