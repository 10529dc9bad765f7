"""NVFlare's processes of a kit, and the lines that they leave in files."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from filelock import FileLock, Timeout

from fedkeel.errors import FedkeelError

LEAVE = 15.0  # seconds for them to end


@contextmanager
def running(kit: Path) -> Iterator[subprocess.Popen[bytes]]:
    """NVFlare's server or client, started by the kit's own script, and all that it starts, until the block ends."""
    environment = {**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    environment.pop("NVFL_WORKSPACE", None)  # the kit is the workspace
    try:
        with FileLock(kit / ".lock", timeout=0), open(kit / "console.log", "wb") as output:
            end_all(kit)  # that a killed one left
            process = subprocess.Popen(
                ["bash", str(kit / "startup" / "sub_start.sh"), "--once"],
                cwd=kit,
                env=environment,
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for this process, which ends the others in order
            )
            try:
                yield process
            finally:
                end_all(kit)
                process.wait()
    except Timeout:
        raise FedkeelError(f"The kit '{kit}' is in use: stop what runs with it first.") from None


def end_all(kit: Path) -> None:
    """NVFlare's processes of this kit."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            words = process.cmdline()
            if str(kit) in words and any("nvflare." in word for word in words):
                process.terminate()
                found.append(process)
    for process in psutil.wait_procs(found, timeout=LEAVE)[1]:
        with suppress(psutil.Error):
            process.kill()


@dataclass
class Tail:
    """The lines that came into a file since the last look."""

    path: Path
    position: int = 0

    def lines(self) -> list[str]:
        with suppress(OSError), open(self.path, "rb") as file:
            file.seek(self.position)
            text = file.read()
            whole = text[: text.rfind(b"\n") + 1]
            self.position += len(whole)
            return whole.decode(errors="replace").splitlines()
        return []
