"""How far long work is, and how long the rest will take."""

import io
import time

import pytest

from pallas_gemm.tuning import progress
from pallas_gemm.tuning.progress import Progress, left_text


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


class Clock:
    """Time passes when somebody says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(progress.time, "monotonic", made)
    return made


def test_lines_say_what_is_left(clock: Clock) -> None:
    stream = io.StringIO()
    with Progress(3, "tuning", stream) as shown:
        for name in ("first", "second", "third"):
            clock.now += 60
            shown.advance(name)
    assert stream.getvalue() == ("1/3 first (2 min left)\n2/3 second (60 s left)\n3/3 third\n")


def test_without_a_line_it_speaks_up_now_and_then(clock: Clock) -> None:
    stream = io.StringIO()
    with Progress(10, "timing", stream) as shown:
        for _ in range(10):
            clock.now += 2
            shown.advance()
    # After 6 and 12 and 18 seconds.
    assert stream.getvalue() == "3/10 (14 s left)\n6/10 (8 s left)\n9/10 (2 s left)\n"


def test_on_a_terminal_there_is_a_bar_under_the_lines() -> None:
    stream = Terminal()
    with Progress(2, "tuning", stream) as shown:
        shown.advance("found [1] for one")
        time.sleep(0.2)
        shown.advance("and for two")
    text = stream.getvalue()
    assert "found [1] for one\n" in text
    assert "and for two\n" in text
    assert "tuning" in text
    assert "1/2" in text


def test_without_rich_a_terminal_has_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress.importlib.util, "find_spec", lambda _: None)
    stream = Terminal()
    with Progress(1, "tuning", stream) as shown:
        shown.advance("found")
    assert stream.getvalue() == "1/1 found\n"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (99, "99 s"), (600, "10 min"), (9000, "2.5 h")]
)
def test_a_time_is_a_few_characters(seconds: float, text: str) -> None:
    assert left_text(seconds) == text
