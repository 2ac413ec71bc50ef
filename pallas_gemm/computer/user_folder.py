"""The folder in which this package keeps what one program finds out for the next."""

import os
import pathlib
import tempfile

FOLDER_VARIABLE = "PALLAS_GEMM_CACHE_DIR"
"""Names it; by default it is where the platform keeps caches."""


def user_folder() -> pathlib.Path:
    """Returns the folder, which need not exist.

    Raises:
        OSError: There is none, as where a user has no home.
    """
    folder = os.environ.get(FOLDER_VARIABLE)
    try:
        if not folder:
            import platformdirs

            folder = platformdirs.user_cache_dir("pallas_gemm", appauthor=False)
        return pathlib.Path(folder).expanduser()
    except (ImportError, RuntimeError) as error:
        raise OSError(
            f"there is no folder to keep anything in ({error}); {FOLDER_VARIABLE} names one"
        ) from None


def make(folder: pathlib.Path) -> None:
    """Makes a folder and those around it, which other users cannot write whatever the umask."""
    for each in (*reversed(folder.parents), folder):
        if not each.exists():
            each.mkdir(mode=0o755, exist_ok=True)


def write(path: str | os.PathLike[str], content: bytes) -> None:
    """Writes a file whole or not at all, even if others write it too or this process ends."""
    target = pathlib.Path(path)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        pathlib.Path(name).chmod(0o644)
        pathlib.Path(name).replace(target)
    except BaseException:
        pathlib.Path(name).unlink(missing_ok=True)
        raise
