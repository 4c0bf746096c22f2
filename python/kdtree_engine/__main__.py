"""`python -m kdtree_engine` is the command `kdtree`."""

from kdtree_engine.cli import main

main()
