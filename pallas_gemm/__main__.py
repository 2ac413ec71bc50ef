"""What this package does on a command line: `python -m pallas_gemm`, or `pallas-gemm`.

`doctor` says what this computer makes of a product, and if it is right. `doctor --prove` runs the
kernel of its GPU in order of growing trust, and keeps what came of it. The others take shapes and
functions: `pallas-gemm explain 4096x14336x4096 --target=h200`.
"""

import argparse
import pathlib
import sys
from typing import NoReturn

from pallas_gemm._version import __version__
from pallas_gemm.api import commands as works
from pallas_gemm.computer import driver


class _OneLineParser(argparse.ArgumentParser):
    """A parser whose errors are one line that says what is wrong."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def main(arguments: list[str] | None = None) -> int:
    """Runs a command and returns the exit status.

    Args:
        arguments: The command line without the program; that of the process if None.
    """
    installed = pathlib.Path(sys.argv[0]).stem == "pallas-gemm"
    prog = "pallas-gemm" if installed else "python -m pallas_gemm"
    parser = _OneLineParser(prog=prog, description=__doc__)
    parser.add_argument("--version", action="version", version=f"pallas-gemm {__version__}")
    commands = parser.add_subparsers(dest="command", title="commands", metavar="COMMAND")
    doctor = commands.add_parser(
        "doctor", help="devices, what computes a product and why, a self-check"
    )
    doctor.add_argument(
        "--prove",
        action="store_true",
        help="run the kernel of this GPU in every way there is, and trust it if it is exact",
    )
    works.add_to(commands)
    given = parser.parse_args(arguments)
    if given.command is None:
        parser.print_help()
        return 0
    driver.skip_check_without_driver()
    if given.command != "doctor":
        try:
            return given.run(given)
        except (ValueError, TypeError, RuntimeError, OSError) as error:
            parser.error(" ".join(str(error).split()))
    return _prove() if given.prove else _report()


def _report() -> int:
    from pallas_gemm.api import doctor

    text, fine = doctor.report()
    sys.stdout.write(text)
    return 0 if fine else 1


def _prove() -> int:
    from pallas_gemm.proving import prove

    def say(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    try:
        return 0 if prove.prove(say).failed is None else 1
    except (prove.NothingToProveError, OSError) as error:
        sys.stderr.write(f"{' '.join(str(error).split())}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
