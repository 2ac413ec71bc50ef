"""Kept compilations: only what is the same in all respects is not compiled again."""

import pathlib

import pytest

from tests import compilations


class Compiler:
    """Counts what it compiles."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, program: bytearray, target: str) -> str:
        self.count += 1
        return f"{program.decode()} for {target}, number {self.count}"


@pytest.fixture
def compiler() -> Compiler:
    return Compiler()


def test_the_same_is_compiled_once(compiler: Compiler, tmp_path: pathlib.Path) -> None:
    said = [compilations.kept(compiler, tmp_path)(bytearray(b"x"), "h200") for _ in range(3)]
    assert said == ["x for h200, number 1"] * 3
    assert len(list(tmp_path.iterdir())) == 1


def test_whatever_differs_is_compiled_anew(
    compiler: Compiler, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = compilations.kept(compiler, tmp_path)
    compiled(bytearray(b"x"), "h200")
    compiled(bytearray(b"y"), "h200")
    compiled(bytearray(b"x"), "h100")
    assert compiler.count == 3
    with monkeypatch.context() as patch:
        patch.setenv("XLA_FLAGS", "--xla_of_another_kind")
        compiled(bytearray(b"x"), "h200")
    with monkeypatch.context() as patch:
        patch.setattr(compilations, "_version", lambda _: "another")
        compiled(bytearray(b"x"), "h200")
    assert compiler.count == 5
    compiled(bytearray(b"x"), "h200")
    assert compiler.count == 5


@pytest.mark.parametrize("length", [0, 5, -4])
def test_a_file_that_is_not_whole_is_as_none(
    length: int, compiler: Compiler, tmp_path: pathlib.Path
) -> None:
    compiled = compilations.kept(compiler, tmp_path)
    compiled(bytearray(b"x"), "h200")
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:length])
    assert compiled(bytearray(b"x"), "h200").endswith("number 2")
    assert compiled(bytearray(b"x"), "h200").endswith("number 2")


def test_what_the_compiler_refuses_is_not_kept(tmp_path: pathlib.Path) -> None:
    def refuses(program: bytearray, target: str) -> str:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        compilations.kept(refuses, tmp_path)(bytearray(b"x"), "h200")
    assert list(tmp_path.iterdir()) == []
