"""What the server and each site need to trust each other, made by NVFlare's own provisioning, and how strict a kit is.

    kits/authority    signs: keep it offline, and give it back to let another site in
    kits/server       for the server; its `local/` is written anew at each start
    kits/admin        for who starts and stops runs: `fedkeel server`, and NVFlare's console
    kits/sites/NAME   for each site: carry it there, and nowhere else

A kit works with NVFlare's own start scripts and containers too. `fedkeel.json` in its `local/` says what the end is.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedkeel.core.naming import visible
from fedkeel.errors import FedkeelError
from fedkeel.files import explained

CONTROLLER = "fedkeel.deploy.controller.FedkeelController"
EXECUTOR = "fedkeel.deploy.executor.FedkeelExecutor"
SETTINGS = "fedkeel.json"  # in a kit's `local/`: what a job of NVFlare's finds there, and cannot change
ADMIN = "admin@fedkeel.org"
PROJECT = "fedkeel"
LARGEST = 2 * 2**30  # bytes of a message that the server takes in
RIGHTS = ("submit_job", "clone_job", "manage_job", "download_job", "view", "operate")
FORBIDDEN = ("byoc", "shell_commands")  # code that comes with a job, and commands of the system


def read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FedkeelError(f"'{path}' cannot be read ({type(error).__name__}): take the kit from a copy.") from error
    if not isinstance(found, dict):
        raise FedkeelError(f"'{path}' is not a table: take the kit from a copy.")
    return found


def write_json(path: Path, table: dict[str, Any]) -> None:
    with explained(path, ""):
        path.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


def name_of(kit: Path) -> str:
    """Of a site, as its certificate has it."""
    if not (kit / "startup" / "fed_client.json").exists():
        raise FedkeelError(f"'{kit}' is not the kit of a site: give a folder 'kits/sites/NAME' that the server made.")
    return str(read_json(kit / "startup" / "fed_client.json")["client"]["fqsn"])


# -- provisioning -----------------------------------------------------------------------------------------------------
def make(folder: Path, host: str, port: int, sites: Sequence[str]) -> list[str]:
    """Kits for the server and for those sites that have none; the names of the new ones."""
    for name in sites:
        if not name or not all(c.isalnum() or c in "-_" for c in name) or len(name) > 60:
            raise FedkeelError(f"A site is called '{visible(name)}': give letters, digits, '-' and '_' alone.")
    known, authority = (folder / "server").exists(), folder / "authority"
    new = [name for name in sites if not (folder / "sites" / name).exists()]
    if known:
        (server,) = read_json(folder / "server" / "startup" / "fed_server.json")["servers"]
        target = server["service"]["target"]
        if target != f"{host}:{port}":  # sites were given the address, and the certificate is made out to it
            raise FedkeelError(
                f"The kits in '{folder}' are of the server '{target}': give that address, or other kits."
            )
    if known and not new:
        return []
    if known and not authority.exists():
        raise FedkeelError(f"'{folder}' has no kit for {new[0]}, and no 'authority' to make one: put that folder back.")
    with explained(folder, ""):
        authority.mkdir(parents=True, exist_ok=True)
        authority.chmod(0o700)
    write_json(authority / "project.yml", project(host, port, sites))  # JSON is YAML
    command = [sys.executable, "-m", "nvflare.cli", "provision", "-p", "project.yml", "-w", ".", "--force"]
    done = subprocess.run(command, cwd=authority, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL)
    made = sorted((authority / PROJECT).glob("prod_*"))
    if done.returncode or not made:
        raise FedkeelError(f"NVFlare could not make the kits: {visible((done.stderr or done.stdout)[-300:])}")
    places = {"server": made[-1] / host, "admin": made[-1] / ADMIN} if not known else {}
    places |= {f"sites/{name}": made[-1] / name for name in new}
    for place, source in places.items():
        shutil.copytree(source, folder / place)
        (folder / place).chmod(0o700)
    for old in made:
        shutil.rmtree(old)
    for place in places.keys() - {"admin"}:
        tighten(folder / place)
    return new


def project(host: str, port: int, sites: Sequence[str]) -> dict[str, Any]:
    """What NVFlare's provisioning reads."""
    server = {"name": host, "type": "server", "org": PROJECT, "fed_learn_port": port, "admin_port": port}
    clients = [{"name": name, "type": "client", "org": PROJECT} for name in sites]
    admin = {"name": ADMIN, "type": "admin", "org": PROJECT, "role": "project_admin"}
    builders = {
        "workspace.WorkspaceBuilder": {"template_file": ["master_template.yml"]},
        "static_file.StaticFileBuilder": {"config_folder": "config"},
        "cert.CertBuilder": {"root_valid_days": 3650},
        "signature.SignatureBuilder": {},
    }
    return {
        "api_version": 3,
        "name": PROJECT,
        "participants": [server, *clients, admin],
        "builders": [{"path": f"nvflare.lighter.impl.{name}", "args": args} for name, args in builders.items()],
    }


# -- how strict a kit is ----------------------------------------------------------------------------------------------
def strict(kit: Path) -> dict[str, dict[str, Any]]:
    """The files of a kit's `local/`: one class, no code that comes with a job, no commands, no logs that travel."""
    resources = read_json(kit / "local" / "resources.json.default")
    resources["class_list_enforcement_mode"] = "enforce"
    resources["class_allow_list"] = [CONTROLLER if (kit / "startup" / "fed_server.json").exists() else EXECUTOR]
    resources["allow_log_streaming"] = False
    resources["components"] = [one for one in resources["components"] if "log" not in one["id"]]
    # What a server stores lies in its kit, not in a temporary folder that others could write.
    storage = kit.absolute() / "storage"
    for one in resources["components"]:
        if one["id"] == "job_manager":
            one["args"]["uri_root"] = str(storage / "jobs")
        if one["id"] == "job_scheduler":
            one["args"] |= {"max_jobs": 1, "min_schedule_interval": 1.0, "max_schedule_interval": 5.0}
    if "snapshot_persistor" in resources:
        resources["snapshot_persistor"]["args"]["storage"]["args"]["root_dir"] = str(storage / "snapshots")
    authorization = read_json(kit / "local" / "authorization.json.default")
    authorization["permissions"] = {
        "project_admin": dict.fromkeys(RIGHTS, "any") | dict.fromkeys(FORBIDDEN, "none"),
    }
    return {
        "resources.json": resources,
        "authorization.json": authorization,
        "comm_config.json": {"streaming_max_blob_size": LARGEST},
    }


def tighten(kit: Path) -> None:
    for name, table in strict(kit).items():
        write_json(kit / "local" / name, table)


def verify(kit: Path) -> None:
    """Refuse the kit of a site that lets a server do more than Fedkeel needs."""
    changed = [name for name, table in strict(kit).items() if read_json(kit / "local" / name) != table]
    if (kit / "local" / "custom").exists():
        changed.append("custom")
    if changed:
        raise FedkeelError(f"'{changed[0]}' in '{kit / 'local'}' is not as it was made: take that folder from a copy.")
