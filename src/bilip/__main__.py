"""`python -m bilip`."""

from bilip.cli import main

main()
