"""The commands about data sets on disk: data list, data check, data pack."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from fedkeel import spec
from fedkeel.cli.parsing import examples
from fedkeel.errors import FedkeelError


def add_commands(actions: Any) -> None:
    listing = actions.add_parser(
        "list",
        prog="fedkeel data list",
        usage="%(prog)s [NAME...] [options]",
        help="the published data sets: where to get them, how they must look, what is here",
        description="Each published data set that has a reader: what it is, where to get it, how its folder must look, "
        "and what was found of it in FEDKEEL_DATA.",
        epilog=examples(["fedkeel data list", "fedkeel data list pacs domainnet"]),
    )
    listing.add_argument("names", nargs="*", metavar="NAME", help="only these")
    listing.add_argument("--json", action="store_true", help="print one JSON document")
    listing.set_defaults(act=list_data)

    check = actions.add_parser(
        "check",
        prog="fedkeel data check",
        usage="%(prog)s NAME [options]",
        help="count a data set against its published sizes",
        description="Count the images of a data set against the published sizes and say what is missing. "
        "The exit code is 1 if anything is.",
        epilog=examples(["fedkeel data check pacs --root ./PACS", "fedkeel data check 'domainnet(classes=all)'"]),
    )
    check.add_argument("data", metavar="NAME", help="a data set of 'fedkeel data list'")
    check.add_argument("--root", metavar="DIR", help="where it lies (default: in FEDKEEL_DATA)")
    check.add_argument("--decode", action="store_true", help="open every image file too")
    check.add_argument("--json", action="store_true", help="print one JSON document")
    check.set_defaults(act=check_data)

    packing = actions.add_parser(
        "pack",
        prog="fedkeel data pack",
        usage="%(prog)s NAME --out FILE.npz|DIR [options]",
        help="write it as one .npz file, or as a tree of small images",
        description="Read a data set and write its images, labels and splits as one .npz file, or as a folder "
        "DIR/DOMAIN/CLASS/ with lists in DIR/splits.",
        epilog=examples(
            [
                "fedkeel data pack pacs --size 64 --out pacs-64.npz",
                "fedkeel data pack 'domainnet(classes=top-100)' --root ./DomainNet --size 128 --out ./domainnet-128",
            ]
        ),
    )
    packing.add_argument("data", metavar="NAME", help="data set, with options: 'pacs(subset=greg)'")
    packing.add_argument("--root", metavar="DIR", help="where it lies (default: in FEDKEEL_DATA)")
    packing.add_argument("--out", required=True, metavar="FILE.npz|DIR", help="what to write")
    packing.add_argument("--size", type=int, metavar="N", help="pixels of a side (default: the data set's)")
    packing.set_defaults(act=pack_data)


def list_data(arguments: argparse.Namespace) -> int:
    from fedkeel.cli.console import console
    from fedkeel.data.check import standings

    found = standings(arguments.names)
    if arguments.json:
        document = [
            {
                "name": standing.reader.name,
                "what": standing.reader.what,
                "home": standing.reader.home,
                "licence": standing.reader.licence,
                "layout": standing.reader.layout.splitlines(),
                "classes": standing.reader.num_classes,
                "images": standing.reader.total(),
                "sizes": standing.reader.published_sizes(),
                "found": standing.check is not None,
                "complete": standing.check is not None and standing.check.complete,
                "root": standing.check.root if standing.check else None,
            }
            for standing in found
        ]
        print(json.dumps(document, indent=1))
        return 0
    out = console(sys.stdout)
    for standing in found:
        entry = standing.reader
        out.print(entry.name, style="bold")
        lines = [
            ("what", entry.what),
            ("size", f"{entry.total():,} images, {entry.num_classes} classes, {len(entry.sizes)} domain(s)"),
            ("get", f"{entry.home}   (licence: {entry.licence})"),
            *(("looks" if number == 0 else "", line) for number, line in enumerate(entry.layout.splitlines())),
            ("found", standing.found),
        ]
        for head, text in lines:
            out.print(f"  {head:7}{text}", soft_wrap=True)
    if not arguments.names:
        out.print(
            "Your own images are read by 'folder' and 'npz', and digits-shift is built in: see fedkeel list data."
        )
    return 0


def check_data(arguments: argparse.Namespace) -> int:
    from fedkeel.cli.console import console, plain_table
    from fedkeel.data.check import check

    result = check(arguments.data, arguments.root, decode_images=arguments.decode)
    if arguments.json:
        counts = [
            {"domain": count.domain, "use": count.use, "found": count.found, "published": count.published}
            for count in result.counts
        ]
        document = {"name": result.name, "root": result.root, "complete": result.complete, "counts": counts}
        print(json.dumps({**document, "problems": result.problems}, indent=1))
        return 0 if result.complete else 1
    rows = [
        (count.domain, count.use, f"{count.found:,}", " or ".join(f"{n:,}" for n in count.published))
        for count in result.counts
    ]
    out = console(sys.stdout)
    out.print(f"{result.name} in {result.root}", soft_wrap=True)
    out.print(plain_table(["domain", "for", "found", "published"], rows))
    for sentence in result.problems:
        out.print(f"- {sentence}", soft_wrap=True)
    if result.complete and any(count.published for count in result.counts):
        out.print("Complete: everything is as published.")
    elif result.complete:
        out.print("Nothing is missing; there are no published sizes of this choice to compare with.")
    return 0 if result.complete else 1


def pack_data(arguments: argparse.Namespace) -> int:
    from fedkeel.data import DATASETS
    from fedkeel.data.formats.writing import write

    parsed = spec.parse(arguments.data)
    options = dict(parsed.options)
    for option, value in (("root", arguments.root), ("size", arguments.size)):
        if value is None:
            continue
        if option in options:
            raise FedkeelError(f"The {option} is given twice, in '{arguments.data}' and as '{value}': keep one.")
        options[option] = value
    dataset = DATASETS.build(parsed.name, **options)
    target = write(dataset, arguments.out)
    size = "" if target.suffix == ".npz" else f", size={dataset.images.shape[-1]}"
    held = "" if any(len(split.validation) for split in dataset.domains.values()) else ", validation=0"
    kind = "npz" if target.suffix == ".npz" else "folder"
    print(target)
    print(f"Read it with --data '{kind}(root={target}{size}{held})'.", file=sys.stderr)
    return 0
