"""Programs that measure and show; each says with `--help` what it does."""

import importlib.util
import pathlib
import sys

NEEDED = {"bench": ("rich", "bench"), "examples": ("flax", "flax")}
"""The package that the programs of a folder need, and the extra that has it."""


def _need_the_extra() -> None:
    """Ends a program in one line, or with its help, where its extra is not installed."""
    main = sys.modules["__main__"]
    started = pathlib.Path(getattr(main, "__file__", None) or "")
    folder = started.resolve().parent
    if folder.parent != pathlib.Path(__file__).resolve().parent.parent:
        return
    package, extra = NEEDED.get(folder.name, ("", ""))
    if not package or importlib.util.find_spec(package) is not None:
        return
    if {"-h", "-help", "--help"}.intersection(sys.argv):
        print(main.__doc__)
        sys.exit(0)
    print(f"{started.stem}: this needs {package}: pip install '.[{extra}]'", file=sys.stderr)
    sys.exit(2)


_need_the_extra()
