"""Show a run, a comparison or a federation over a network in the browser as it grows: curves, how far it is, the time
left, notes. The page is made by a small server that only this machine can reach; Ctrl-C ends it, and not the run.

examples:
  fedkeel watch runs/demo
  fedkeel watch runs/fed --no-browser --port 8400      on another machine: ssh -L 8400:127.0.0.1:8400 HOST
  fedkeel watch runs/demo --json                       how it is at this moment, for a script
"""

import json
import os
import sys
import webbrowser
from contextlib import suppress

from fedkeel.cli.terminal.parsing import Arguments, Parser, whole
from fedkeel.core.naming import visible
from fedkeel.errors import FedkeelError

HELP = "a run, or a comparison, in the browser as it grows"
USAGE = "DIR [options]"


def add_arguments(parser: Parser) -> None:
    add = parser.add_argument
    add("directory", metavar="DIR", help="a run directory, a folder of them, or one where a run will begin")
    add("--port", type=whole("port", 1), metavar="N", help="(default: 8350, or any that is free)")
    add("--no-browser", action="store_true", help="only print the address")
    add("--json", action="store_true", help="print how it is at this moment as one JSON document, and end")


def run(arguments: Arguments) -> int:
    from fedkeel.files import plain
    from fedkeel.options import as_path
    from fedkeel.report.moment import checked, look
    from fedkeel.report.watch import Server

    if arguments.json:
        for given, flag in ((arguments.port, "--port"), (arguments.no_browser, "--no-browser")):
            if given:
                raise FedkeelError(f"'{flag}' is of the page, and '--json' shows none: leave one of them out.")
        print(json.dumps(plain(look(checked(as_path(arguments.directory)))[0]), indent=1))
        return 0
    place = visible(arguments.directory)
    with Server(arguments.directory, arguments.port) as server:
        print(f"Watching {place} at {server.address} (Ctrl-C ends it)", flush=True)
        # Without a screen it would be a browser in this terminal.
        seen = sys.platform in ("darwin", "win32") or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
        if seen and sys.stdout.isatty() and not arguments.no_browser:
            with suppress(webbrowser.Error):
                webbrowser.open(server.address)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print(f"\nfedkeel: no longer watching {place}; what runs there goes on", file=sys.stderr)
    return 0
