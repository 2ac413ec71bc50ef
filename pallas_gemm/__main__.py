"""`python -m pallas_gemm doctor`: what this computer makes of a product, and if it is right."""

import argparse
import sys


def main(arguments: list[str] | None = None) -> int:
    """Runs a command and returns the exit status.

    Args:
        arguments: The command line without the program; that of the process if None.
    """
    parser = argparse.ArgumentParser(prog="python -m pallas_gemm", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="devices, what computes a product and why, a self-check")
    parser.parse_args(arguments)
    from pallas_gemm.api import doctor

    text, fine = doctor.report()
    sys.stdout.write(text)
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
