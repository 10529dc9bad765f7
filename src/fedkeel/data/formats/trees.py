"""Trees of images with known domains and classes: PACS, VLCS, Office-Caltech-10, DomainNet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from fedkeel.data.formats.split_lists import read_lists
from fedkeel.data.listing import Domain, Findings, Listing, Parts, class_files, image_files, visible_folders

# (domain, positions of its images by their path below the root, their labels) -> its official split, if it has one.
Lists = Callable[[str, Mapping[str, int], Sequence[int]], Parts | None]


def scan_tree(
    name: str,
    root: Path,
    domains: Sequence[str],
    classes: Sequence[str],
    findings: Findings,
    *,
    aliases: Mapping[str, str] | None = None,
    lists: Lists | None = None,
    beside: Sequence[str] = (),
    all_classes: Sequence[str] = (),
) -> Listing:
    """List the tree; each domain's split is what its lists say, those of `splits/` unless others are given.

    `aliases` are other names for the folder of a domain, `beside` folders that may lie next to them, and `all_classes`
    those that a domain may have although they are not read.
    """
    known = {domain: domain for domain in domains} | dict(aliases or {})
    present = visible_folders(root)
    found = {known[folder.name]: folder for folder in present if folder.name in known}
    for folder in present:
        if folder.name not in known and folder.name not in ("splits", *beside):
            findings.extra(f"The folder '{folder}' is no domain of {name} and is not used.")
    if not found:
        findings.missing(
            f"'{root}' has the domains {', '.join(folder.name for folder in present) or '(none)'}, but {name} has "
            f"{', '.join(domains)}: give the root of that data set, or read other trees with folder(root=PATH)."
        )
    listed: dict[str, Domain] = {}
    for domain in domains:
        if domain not in found:
            if found:
                findings.missing(f"The domain '{domain}' of {name} is missing: put its images into '{root / domain}'.")
            continue
        files, labels = class_files(name, found[domain], classes, findings, ignored=all_classes)
        paths = {file.relative_to(root).as_posix(): position for position, file in enumerate(files)}
        official = None
        with findings.part():
            official = lists(domain, paths, labels) if lists else read_lists(root, domain, paths)
        listed[domain] = Domain([image_files(files, labels)], official)
    return Listing(name, root, tuple(classes), listed)
