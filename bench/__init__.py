"""Programs that measure and show; each says with `--help` what it does."""

import importlib.util
import pathlib
import sys


def _need_the_extra() -> None:
    """Ends a program of this folder in one line where the extra `bench` is not installed."""
    main = sys.modules["__main__"]
    started = getattr(main, "__file__", None)
    if started is None or pathlib.Path(started).resolve().parent != pathlib.Path(__file__).parent:
        return
    if importlib.util.find_spec("rich") is not None:
        return
    if {"-h", "-help", "--help"}.intersection(sys.argv):
        print(main.__doc__)
        sys.exit(0)
    sys.exit(_in_one_line(pathlib.Path(started).stem))


def _in_one_line(program: str) -> int:
    print(f"{program}: this needs rich: pip install '.[bench]'", file=sys.stderr)
    return 2


_need_the_extra()
