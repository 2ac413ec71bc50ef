"""A headless browser, for pages that only a browser can judge.

Chromium reads commands from file descriptor 3 and writes answers and events to 4, each a JSON
object with a zero byte behind it, so that no package is needed to drive it.
"""

import base64
import contextlib
import itertools
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def found() -> str | None:
    """Returns the browser of this computer, if it has one."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """One page in the browser.

    Attributes:
        complaints: What the page logged as an error, and exceptions that nothing caught.
    """

    def __init__(self, commands: int, answers: int) -> None:
        self.complaints: list[str] = []
        self._commands, self._answers = commands, answers
        self._numbers = itertools.count(1)
        self._rest = b""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Runtime", "Log"):
            self._ask(f"{domain}.enable")

    def open(
        self, file: Path | str, width: int = 1400, height: int = 1000, query: str = ""
    ) -> None:
        """Loads a file in a window of that size, and waits until it is there.

        Args:
            file: What to load, or its address.
            width: Of the window, in pixels.
            height: The same.
            query: What follows the file's name in the address.
        """
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._ask("Emulation.setDeviceMetricsOverride", **size)
        url = file if isinstance(file, str) else file.absolute().as_uri()
        self._ask("Page.navigate", url=url + (query and f"?{query}"))
        self.wait_for("document.readyState === 'complete'")

    def value(self, expression: str, *, wait: bool = False) -> Any:
        """Returns what a JavaScript expression is, on the page, or what it promises."""
        settings = {"returnByValue": True, "awaitPromise": wait}
        answer = self._ask("Runtime.evaluate", expression=expression, **settings)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_for(self, expression: str, seconds: float = 60) -> None:
        """Waits until an expression is true, or fails."""
        end = time.monotonic() + seconds
        while not self.value(expression):
            assert time.monotonic() < end, f"{expression} is still false after {seconds} s"
            time.sleep(0.05)

    def click(self, selector: str) -> None:
        """Clicks into the middle of the first element that a CSS selector finds."""
        script = (
            f"(b => ({{x: b.x + b.width / 2, y: b.y + b.height / 2}}))"
            f"(document.querySelector({json.dumps(selector)}).getBoundingClientRect())"
        )
        where = self.value(script)
        for kind in ("mousePressed", "mouseReleased"):
            event = {"type": kind, "button": "left", "clickCount": 1}
            self._ask("Input.dispatchMouseEvent", **event, **where)

    def press(self, key: str, code: int) -> None:
        """Presses a key of the keyboard: its name, and the number that Windows gives it."""
        for kind in ("rawKeyDown", "char", "keyUp") if key == " " else ("rawKeyDown", "keyUp"):
            event = {"type": kind, "key": key, "windowsVirtualKeyCode": code}
            self._ask(
                "Input.dispatchKeyEvent", **event, **({"text": key} if kind == "char" else {})
            )

    def prefer(self, scheme: str) -> None:
        """Makes the browser prefer a colour scheme, "light" or "dark"."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._ask("Emulation.setEmulatedMedia", features=features)

    def picture(self) -> bytes:
        """Returns the whole page as a PNG."""
        shot = self._ask("Page.captureScreenshot", captureBeyondViewport=True)
        return base64.b64decode(shot["data"])

    def _ask(self, method: str, **parameters: Any) -> Any:
        return self._call(method, self._session, **parameters)

    def _call(self, method: str, session: dict[str, str] | None = None, **parameters: Any) -> Any:
        number = next(self._numbers)
        command = {"id": number, "method": method, "params": parameters, **(session or {})}
        os.write(self._commands, json.dumps(command).encode() + b"\0")
        while True:
            message = self._next_message()
            if message.get("id") == number:
                assert "error" not in message, message
                return message["result"]
            self._note(message)

    def _next_message(self) -> Any:
        while b"\0" not in self._rest:
            more = os.read(self._answers, 65536)
            assert more, "the browser has ended"
            self._rest += more
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def _note(self, message: Any) -> None:
        parameters = message.get("params", {})
        match message.get("method"):
            case "Runtime.exceptionThrown":
                self.complaints.append(str(parameters["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if parameters["type"] in ("error", "assert"):
                self.complaints.append(str(parameters["args"]))
            case "Log.entryAdded" if parameters["entry"]["level"] == "error":
                self.complaints.append(parameters["entry"]["text"])


@contextlib.contextmanager
def page(browser: str, folder: Path) -> Iterator[Page]:
    """A page of a browser that is started for it, with its profile in `folder`."""
    for_browser, commands = os.pipe()
    answers, from_browser = os.pipe()
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
    # The shell puts the pipe where the browser looks for it.
    script = f'exec "$@" 3<&{for_browser} 4>&{from_browser}'
    with (
        (folder / "browser.log").open("wb") as log,
        subprocess.Popen(
            ["/bin/bash", "-c", script, "browser", browser, *options, f"--user-data-dir={folder}"],
            pass_fds=(for_browser, from_browser),
            stdout=log,
            stderr=log,
        ) as process,
    ):
        os.close(for_browser)
        os.close(from_browser)
        try:
            yield Page(commands, answers)
        finally:
            process.terminate()
            os.close(commands)
            os.close(answers)
