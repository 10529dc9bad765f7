"""Real federations of a server and three sites on loopback, with TLS."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest

from fedkeel.runs.run import Run
from tests.blocks.pages import ROOT, blocks_of
from tests.deploy.real import CLASSES, PROCESSES, SITES, Loopback, draw_images
from tests.engine.executors.sites.test_executor import assert_same

pytestmark = PROCESSES


@pytest.fixture
def loopback(tmp_path: Path) -> Iterator[Loopback]:
    draw_images(tmp_path / "images")
    with Loopback(tmp_path) as network:
        yield network


def begin(loopback: Loopback, out: str, method: str, rounds: int, *words: str) -> None:
    loopback.server(out, method=method, rounds=rounds)
    loopback.until(lambda: (loopback.place / "kits/sites/west/local/comm_config.json").exists())
    for site in SITES:
        if site not in loopback.processes:
            loopback.site(site, *words)


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "hbn", "fedbn"])
def test_a_federation_gives_what_one_process_gives(loopback: Loopback, method: str) -> None:
    begin(loopback, "run", method, 2, "--calibrate")
    assert loopback.finish() == 0, loopback.log("server")
    assert_same(Run(loopback.place / "run"), loopback.serial("serial", method=method))
    for site in SITES:
        assert f"carry 'kits/sites/{site}' to the site {site}" in loopback.log("server")
        assert len(list((loopback.place / "state" / site / "models").glob("*/model.safetensors"))) == 1


def test_the_page_of_the_whole_way_works_as_it_is_written(loopback: Loopback) -> None:
    """From images at three sites over TLS to a calibrated ONNX file at each; the port alone is another."""
    onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    page = blocks_of((ROOT / "docs/guides/network.md").read_text(), "network.md")
    ours = [block for block in page if block.kind == "run by"]
    (config, server, sites, after) = (block.text for block in ours)
    (loopback.place / "fed.toml").write_text(config)
    loopback.start("server", *shlex.split(server)[1:], "--port", str(loopback.port))
    loopback.until(lambda: (loopback.place / "kits/sites/west/local/comm_config.json").exists())
    for name, line in zip(SITES, sites.splitlines(), strict=True):
        loopback.start(name, *shlex.split(line)[1:])
    assert loopback.finish() == 0, loopback.log("server")
    fedkeel = shlex.join([sys.executable, "-m", "fedkeel"])
    script = "set -e\n" + re.sub("^fedkeel", fedkeel, after, flags=re.MULTILINE)
    done = subprocess.run(["bash", "-c", script], cwd=loopback.place, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    images = np.full((2, 3, 16, 16), 99, dtype=np.uint8)
    logits = [
        onnxruntime.InferenceSession(loopback.place / f"{name}.onnx").run(None, {"images": images})[0]
        for name in ("fed", *SITES)
    ]
    assert all(found.shape == (2, len(CLASSES)) for found in logits)
    assert not np.allclose(logits[1], logits[2]), "each has its own statistics"


def test_a_federation_whose_server_and_a_site_are_killed_ends_as_if_nothing_had_happened(loopback: Loopback) -> None:
    """SCAFFOLD's control variates are at the sites, and the server's at the server."""
    begin(loopback, "run", "scaffold", 60)
    loopback.until(loopback.checkpointed("run", 3))
    loopback.kill("server")
    loopback.kill("south")
    begin(loopback, "run", "scaffold", 60)  # the same commands once more
    assert loopback.finish() == 0, loopback.log("server")
    run = Run(loopback.place / "run")
    missed = {record["client"] for record in run.records("dropped")}
    assert missed <= {"south"}
    if not missed:
        assert_same(run, loopback.serial("serial", method="scaffold", rounds=60))


def test_a_site_that_is_killed_is_missed_and_is_back_with_the_next_job(loopback: Loopback) -> None:
    begin(loopback, "run", "fedavg", 400)
    loopback.until(loopback.checkpointed("run", 3))
    loopback.kill("south")
    loopback.site("south")
    loopback.until(lambda: "south came: the next job goes on" in loopback.log("server"), 120)
    rounds = Run(loopback.place / "run").rounds_done
    loopback.until(loopback.checkpointed("run", rounds + 3))
    loopback.stop("server")
    assert "fedkeel: stopped; continue with: fedkeel server" in loopback.log("server")
    assert Run(loopback.place / "run").rounds_done > 3


def test_a_site_that_ends_every_job_is_left_out_after_three(loopback: Loopback) -> None:
    begin(loopback, "run", "fedavg", 10_000)

    def left_out() -> bool:
        for process in map(psutil.Process, loopback.family("west")):
            with suppress(psutil.Error):
                if any("worker_process" in word for word in process.cmdline()):
                    process.kill()
        return "'west' did not last in 3 jobs in a row: they go on without it" in loopback.log("server")

    loopback.until(left_out, 240)
    loopback.until(loopback.checkpointed("run", 3))


def test_a_kit_that_was_loosened_by_hand_is_refused(loopback: Loopback) -> None:
    loopback.server("run")
    local = loopback.place / "kits/sites/west/local"
    loopback.until(lambda: (local / "comm_config.json").exists())
    resources = (local / "resources.json").read_text()
    (local / "resources.json").write_text(
        resources.replace('"allow_log_streaming": false', '"allow_log_streaming": true')
    )
    loopback.site("west")
    assert loopback.processes["west"].wait(timeout=60) == 2
    assert "'resources.json' in" in loopback.log("west")
