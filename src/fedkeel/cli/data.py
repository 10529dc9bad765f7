"""Look at a data set before training on it.

examples:
  fedkeel data list                               what there is, and what of it is here
  fedkeel data describe folder --root ./images
  fedkeel data show digits-shift -o digits.png
  fedkeel data pack pacs --size 64 --out ./pacs-64
"""

import sys
from dataclasses import asdict
from itertools import zip_longest
from pathlib import Path
from typing import Any

import fedkeel
from fedkeel.cli.terminal.output import Table, show
from fedkeel.cli.terminal.parsing import Arguments, Parser, given_options, with_options
from fedkeel.config import from_dict
from fedkeel.core.naming import file_name
from fedkeel.options import Count, checked

HELP = "look at a data set"
USAGE = "COMMAND NAME [options]"
MOST_ROWS = 100  # of a table of clients that a person reads


def add_arguments(parser: Parser) -> None:
    parser.begin_commands(required=True)

    def add(name: str, run: Any, help: str, *, usage: str = "NAME [options]") -> Parser:
        return parser.add_command(name, run, help=help, page=run.__doc__, usage=usage)

    show = add("show", show_data, "write a picture of its domains and classes")
    show.add_argument(
        "-o", "--out", "--output", dest="output", metavar="FILE", help="the PNG to write (default: NAME.png)"
    )
    describe = add("describe", describe_data, "a table of its clients")
    describe.add_shared("--json")
    clients = f"show the first N clients that train (default: {MOST_ROWS}; with --json, all)"
    describe.add_argument("--clients", type=int, metavar="N", help=clients)
    for federated in (show, describe):
        text = "data set, with options: 'folder(root=./images, size=64)'"
        federated.add_argument("data", metavar="NAME", help=text)
        federated.add_shared("--root", "--tolerate", "--import")
        federated.add_options(("partition", "unseen", "subsample", "seed"))

    summary = "the published data sets: where to get them, how they must look, what is here"
    listing = add("list", list_data, summary, usage="[NAME...] [options]")
    listing.add_argument("names", nargs="*", metavar="NAME", help="only these")
    listing.add_shared("--json", "--import")
    packing = add("pack", pack_data, "write it as a tree of small images", usage="NAME --out DIR [options]")
    packing.add_argument("data", metavar="NAME", help="data set, with options: 'pacs(subset=greg)'")
    packing.add_argument("--root", metavar="DIR", help="where it lies (default: in FEDKEEL_DATA)")
    packing.add_shared("--import")
    packing.add_argument("--out", required=True, metavar="DIR", help="the folder to write")
    packing.add_argument("--size", type=int, metavar="N", help="pixels of a side (default: the data set's)")


def show_data(arguments: Arguments) -> int:
    """Write a PNG with a block of rows for each domain and a column for each class.

    examples:
      fedkeel data show digits-shift -o digits.png
    """
    config = from_dict(given_options(arguments))

    from fedkeel.engine.setup import load_federation

    federation = load_federation(config)
    print(fedkeel.data.contact_sheet(federation, arguments.output or Path(f"{file_name(federation.name)}.png")))
    return 0


def describe_data(arguments: Arguments) -> int:
    """A table of the clients: their domain and how many images they have.

    examples:
      fedkeel data describe digits-shift --partition 'dirichlet(alpha=0.3, clients=4)'
      fedkeel data describe folder --root ./images --unseen sketch
    """
    config = from_dict(given_options(arguments))

    from fedkeel.data.federation import called
    from fedkeel.engine.setup import load_federation

    checked(arguments.clients, Count | None, "--clients")
    federation = load_federation(config)
    most = arguments.clients or (None if arguments.json else MOST_ROWS)
    clients = [asdict(row) for row in fedkeel.data.describe(federation, most)]
    document = {
        "name": federation.name,
        "classes": federation.classes,
        "image": dict(zip(("channels", "height", "width"), federation.image_shape, strict=False)),
        "training_clients": len(federation.clients),
        "clients": clients,
    }
    shape = "x".join(map(str, federation.image_shape))
    caption = f"{federation.name}: {federation.num_classes} classes, {called(federation.image_shape)}s of {shape}."
    if most is not None and most < len(federation.clients):
        caption += f" The first {most:,} of {len(federation.clients):,} clients."
    headings = ["client", "domain", "train", "validation", "test", "classes"]
    rows = [[*(row[name] for name in headings), "unseen" if row["unseen"] else ""] for row in clients]
    show([Table([*headings, ""], rows, caption)], document, as_json=arguments.json)
    return 0


def list_data(arguments: Arguments) -> int:
    """Each published data set that has a reader: what it is, where to get it, how its folder must look,
    and what was found of it in FEDKEEL_DATA.

    examples:
      fedkeel data list
      fedkeel data list pacs domainnet
    """
    from rich.text import Text

    from fedkeel.data.reader import PUBLISHED, standing

    documents, lines = [], list[Any]()
    for found in [standing(name) for name in arguments.names or sorted(PUBLISHED)]:
        entry, layout = found.reader, found.reader.layout.splitlines()
        what = fedkeel.data.DATASETS.entry(entry.name).summary
        document = {name: getattr(entry, name) for name in ("name", "home", "licence", "sizes")}
        document |= {"what": what, "layout": layout, "images": found.images}
        document |= {"root": found.root, "problems": found.problems, "complete": not found.problems}
        documents.append(document)
        here = (
            [f"{found.root}, as published"]
            if not found.problems
            else [*([found.root] if found.root else []), *found.problems]
        )
        rows = [("what", what), ("size", f"{found.images:,} images in {len(entry.sizes)} domain(s)")]
        rows += [("get", f"{entry.home}   (licence: {entry.licence})")]
        rows += [*zip_longest(["looks"], layout, fillvalue=""), *zip_longest(["found"], here, fillvalue="")]
        lines += [Text(entry.name, style="bold"), *(f"  {head:7}{text}" for head, text in rows)]
    if not arguments.names:
        lines.append(
            "Your own images are read by 'folder', 'table' and 'npz'; digits-shift is built in: see fedkeel list data."
        )
    show(lines, documents, as_json=arguments.json, soft_wrap=True)
    return 0


def pack_data(arguments: Arguments) -> int:
    """Read a data set and write its images as PNG files, DIR/DOMAIN/CLASS/, with lists in DIR/splits.

    examples:
      fedkeel data pack pacs --size 64 --out ./pacs-64
      fedkeel data pack 'domainnet(classes=top-100)' --root ./DomainNet --size 128 --out ./domainnet-128
    """
    from fedkeel.data.show import write_tree

    given = with_options(arguments.data, root=arguments.root, size=arguments.size)
    dataset = fedkeel.data.DATASETS.build(given.name, **given.options)
    target = write_tree(dataset, arguments.out)
    held = "" if any(len(split.validation) for split in dataset.domains.values()) else ", validation=0"
    print(target)
    print(f"Read it with --data 'folder(root={target}, size={dataset.images.shape[-1]}{held})'.", file=sys.stderr)
    return 0
