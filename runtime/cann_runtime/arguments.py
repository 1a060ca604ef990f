"""The argument parser of all command lines: argparse, but with errors on one line, as every other error of ours.

What arguments there are is each program's own business.
"""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """argparse.ArgumentParser whose errors are one line on stderr, exit code 2."""

    def error(self, message: str) -> NoReturn:
        """Print the message without the usage, which is long."""
        print(f"{self.prog}: error: {message} (--help lists the arguments)", file=sys.stderr)
        raise SystemExit(2)
