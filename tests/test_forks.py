"""Code in a fork: it prints, ends, and is surrounded as it would be in a process of its own."""

import contextlib
import os
import subprocess
import sys

from tests import forks

CODE = """
import json, os, sys
assert not sys.stdin.read()
print(sys.argv, os.environ["COLOUR"], os.environ.get("SHAPE"), hasattr(json, "seen"))
json.seen = True
print("said", file=sys.stderr)
os.write(1, b"unbuffered")
sys.exit(int(sys.argv[1]))
"""
LATE = """
import atexit, threading, time
atexit.register(print, "ended")
threading.Thread(target=lambda: (time.sleep(0.2), print("late"))).start()
print("begun")
"""


def test_a_fork_does_what_a_process_does() -> None:
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(forks.ROOT), "JAX_PLATFORMS": "cpu"}
    with contextlib.closing(forks.Forks()) as processes:

        def run(code: str, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
            command = [sys.executable, "-c", code, *arguments]
            given = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
            forked = processes.run(command, env=env | more, **given)
            alone = subprocess.run(command, env=env | more, check=False, **given)
            assert (forked.returncode, forked.stdout) == (alone.returncode, alone.stdout)
            assert forked.stderr.splitlines()[-1:] == alone.stderr.splitlines()[-1:]
            return forked

        # What the first one leaves behind in its process, and its variables, the next does not see.
        assert run(CODE, "0", COLOUR="red", SHAPE="round").returncode == 0
        assert run(CODE, "3", COLOUR="blue").stdout.startswith(
            "unbuffered['-c', '3'] blue None False"
        )
        assert "ZeroDivisionError" in run("1 / 0").stderr
        assert run("import os; os.kill(os.getpid(), 9)").returncode == -9
        assert run("import sys; sys.exit('no')").stderr == "no\n"
        assert run("import sys; sys.exit()").returncode == 0
        assert run(LATE).stdout == "begun\nlate\nended\n"
        # What is read when JAX is imported is what the variables say now.
        wide = [sys.executable, "-c", "import jax; print(jax.config.jax_enable_x64)"]
        assert processes.run(wide, env=env).stdout == "False\n"
        assert processes.run(wide, env=env | {"JAX_ENABLE_X64": "1"}).stdout == "True\n"
