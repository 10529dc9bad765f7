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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedkeel.core.naming import visible
from fedkeel.errors import FedkeelError
from fedkeel.files import explained

CONTROLLER = "fedkeel.deploy.controller.FedkeelController"
EXECUTOR = "fedkeel.deploy.executor.FedkeelExecutor"
ADMIN = "admin@fedkeel.org"
PROJECT = "fedkeel"
LARGEST = 2 * 2**30  # bytes of a message that the server takes in
FORBIDDEN = ("byoc", "shell_commands")  # code that comes with a job, and commands of the system


class Settings:
    """`fedkeel.json` in a kit's `local/`: what a job of NVFlare's finds there, and cannot change."""

    FILE = "fedkeel.json"

    @staticmethod
    def write(local: Path, settings: Mapping[str, Any]) -> None:
        with explained(local / Settings.FILE, ""):
            (local / Settings.FILE).write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")

    @staticmethod
    def read(local: Path) -> dict[str, Any]:
        return read_json(local / Settings.FILE)


def read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FedkeelError(f"'{path}' cannot be read ({type(error).__name__}): take the kit from a copy.") from error
    if not isinstance(found, dict):
        raise FedkeelError(f"'{path}' is not a table: take the kit from a copy.")
    return found


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
    known = (folder / "server").exists()
    new = [name for name in sites if not (folder / "sites" / name).exists()]
    if known:
        refuse_other_address(folder, host, port)
    if known and not new:
        return []
    authority = folder / "authority"
    if known and not authority.exists():
        raise FedkeelError(f"'{folder}' has no kit for {new[0]}, and no 'authority' to make one: put that folder back.")
    with explained(folder, ""):
        authority.mkdir(parents=True, exist_ok=True)
        authority.chmod(0o700)
        (authority / "project.yml").write_text(json.dumps(project(host, port, sites)))  # JSON is YAML
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
    tighten(folder / "server", CONTROLLER)
    for name in new:
        tighten(folder / "sites" / name, EXECUTOR)
    return new


def project(host: str, port: int, sites: Sequence[str]) -> dict[str, Any]:
    """What NVFlare's provisioning reads."""
    server = {"name": host, "type": "server", "org": PROJECT, "fed_learn_port": port, "admin_port": port}
    clients = [{"name": name, "type": "client", "org": PROJECT} for name in sites]
    admin = {"name": ADMIN, "type": "admin", "org": PROJECT, "role": "project_admin"}
    builders = "nvflare.lighter.impl"
    return {
        "api_version": 3,
        "name": PROJECT,
        "participants": [server, *clients, admin],
        "builders": [
            {"path": f"{builders}.workspace.WorkspaceBuilder", "args": {"template_file": ["master_template.yml"]}},
            {"path": f"{builders}.static_file.StaticFileBuilder", "args": {"config_folder": "config"}},
            {"path": f"{builders}.cert.CertBuilder", "args": {"root_valid_days": 3650}},
            {"path": f"{builders}.signature.SignatureBuilder", "args": {}},
        ],
    }


def refuse_other_address(folder: Path, host: str, port: int) -> None:
    """Sites were given the address, and the certificate is made out to it."""
    (server,) = read_json(folder / "server" / "startup" / "fed_server.json")["servers"]
    target = server["service"]["target"]
    if target != f"{host}:{port}":
        raise FedkeelError(f"The kits in '{folder}' are of the server '{target}': give that address, or other kits.")


# -- how strict a kit is ----------------------------------------------------------------------------------------------
def tighten(kit: Path, only: str) -> None:
    """Write the `local/` of a kit: one class, no code that comes with a job, no commands, no logs that travel."""
    local = kit / "local"
    resources = read_json(local / "resources.json.default")
    resources["class_list_enforcement_mode"] = "enforce"
    resources["class_allow_list"] = [only]
    resources["allow_log_streaming"] = False
    resources["components"] = [one for one in resources["components"] if "log" not in one["id"]]
    place_storage(resources, kit)
    authorization = read_json(local / "authorization.json.default")
    rights = ("submit_job", "clone_job", "manage_job", "download_job", "view", "operate")
    authorization["permissions"] = {
        "project_admin": dict.fromkeys(rights, "any") | dict.fromkeys(FORBIDDEN, "none"),
    }
    for name, table in (("resources.json", resources), ("authorization.json", authorization)):
        (local / name).write_text(json.dumps(table, indent=1) + "\n")
    (local / "comm_config.json").write_text(json.dumps({"streaming_max_blob_size": LARGEST}, indent=1) + "\n")


def place_storage(resources: dict[str, Any], kit: Path) -> None:
    """Of a server: what it stores lies in its kit, not in a temporary folder that others could write."""
    storage = kit.absolute() / "storage"
    for one in resources["components"]:
        if one["id"] == "job_manager":
            one["args"]["uri_root"] = str(storage / "jobs")
        if one["id"] == "job_scheduler":
            one["args"] |= {"max_jobs": 1, "min_schedule_interval": 1.0, "max_schedule_interval": 5.0}
    if "snapshot_persistor" in resources:
        resources["snapshot_persistor"]["args"]["storage"]["args"]["root_dir"] = str(storage / "snapshots")


def verify(kit: Path) -> None:
    """Refuse a kit that lets a server do more than Fedkeel needs."""
    for problem in looseness(kit):
        raise FedkeelError(f"The kit '{kit}' is not strict: {problem}. Take its 'local' from a copy.")


def looseness(kit: Path) -> Iterator[str]:
    """What of a kit's `local/` is looser than `tighten` made it."""
    local = kit / "local"
    resources, rights = read_json(local / "resources.json"), read_json(local / "authorization.json").get("permissions")
    if resources.get("class_list_enforcement_mode") != "enforce":
        yield "'resources.json' does not enforce its list of classes"
    if strange := [one for one in resources.get("class_allow_list", ["*"]) if one not in (CONTROLLER, EXECUTOR)]:
        yield f"'resources.json' allows the class {visible(str(strange[0]))}"
    if resources.get("allow_log_streaming") is not False:
        yield "'resources.json' lets logs travel to the server"
    known = [one.get("path") for one in read_json(local / "resources.json.default").get("components", ())]
    if added := [one.get("path") for one in resources.get("components", ()) if one.get("path") not in known]:
        yield f"'resources.json' has the component {visible(str(added[0]))}"
    for role, given in rights.items() if isinstance(rights, dict) else [("nobody", "any")]:
        for right in FORBIDDEN:
            if (given if isinstance(given, str) else given.get(right, "none")) != "none":
                yield f"'authorization.json' gives '{role}' the right '{right}'"
    with suppress(OSError):
        if (local / "custom").exists() and any((local / "custom").iterdir()):
            yield "there is code in 'local/custom'"
