"""The command line, run in the process of a test."""

import sys

import pytest

from bilip import cli


def command_line(monkeypatch, capfd):
    """A function that runs `bilip` with its arguments; what comes back is the exit code, stdout and stderr."""

    def run(*args):
        monkeypatch.setattr(sys, "argv", ["bilip", *args])
        capfd.readouterr()
        with pytest.raises(SystemExit) as end:
            cli.main()
        out, err = capfd.readouterr()
        return end.value.code or 0, out, err

    return run
