"""The embedded set: the same bits everywhere, balanced, without overlap, and shifted."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from fedkeel.data import contact_sheet, load
from fedkeel.data.readers.digits_shift import read_glyphs

PIXELS = "d169c543c1934bdb73fc6711f763fec4f0011217e2c47ad913d9b1e91e45c93e"


def test_the_pixels_and_labels_are_the_same_bits_on_every_machine() -> None:
    federation = load("digits-shift")
    content = federation.images.numpy().tobytes() + federation.labels.numpy().astype("<i8").tobytes()
    for client in federation.clients:
        for part in (client.train, client.validation, client.test):
            content += part.numpy().astype("<i8").tobytes()
    assert hashlib.sha256(content).hexdigest() == PIXELS


def test_the_digits_are_those_of_scikit_learn() -> None:
    from sklearn.datasets import load_digits

    glyphs, labels = read_glyphs()
    assert (glyphs == load_digits().images).all()
    assert (labels == load_digits().target).all()


def test_every_digit_is_in_one_part_of_one_domain() -> None:
    parts = [part for c in load("digits-shift").clients for part in (c.train, c.validation, c.test)]
    assert torch.cat(parts).sort().values.equal(torch.arange(1797))


def test_test_and_validation_sets_are_balanced() -> None:
    federation = load("digits-shift")
    assert [client.name for client in federation.clients] == ["scan", "paper", "texture", "stroke", "street"]
    for client in federation.clients:
        assert federation.labels[client.test].bincount().tolist() == [9] * 10
        assert federation.labels[client.validation].bincount().tolist() == [5] * 10
        assert federation.labels[client.train].bincount(minlength=10).min() >= 20


def test_digits_has_all_of_them_in_one_look() -> None:
    federation = load("digits", partition="shards(clients=10, classes_per_client=2)")
    assert {client.domain for client in federation.clients} == {"scan"}
    first, trained = federation.clients[0], torch.cat([client.train for client in federation.clients])
    assert torch.cat([trained, first.validation, first.test]).sort().values.equal(torch.arange(1797))
    assert federation.labels[first.test].bincount().tolist() == [45] * 10
    assert federation.labels[first.validation].bincount().tolist() == [25] * 10
    assert all(len(federation.labels[client.train].unique()) == 2 for client in federation.clients)
    shifted = load("digits-shift")
    scans = shifted.clients[0].test
    assert looks(federation.images)[scans].mean(0).allclose(looks(shifted.images)[scans].mean(0), rtol=0.02)


def test_domains_look_different() -> None:
    """For any two domains, a line through a few numbers per image tells which one a test image is from."""
    federation = load("digits-shift")
    seen = looks(federation.images)
    for one in federation.clients:
        for other in federation.clients:
            if one.name < other.name:
                target = torch.cat([torch.ones(one.samples), -torch.ones(other.samples)]).double()
                numbers = seen[torch.cat([one.train, other.train])]  # grey images: some say the same
                fit = torch.linalg.lstsq(numbers, target[:, None], driver="gelsd").solution
                right = torch.cat([seen[one.test] @ fit > 0, seen[other.test] @ fit < 0])
                assert right.double().mean() > 0.85, (one.name, other.name)


def looks(images: torch.Tensor) -> torch.Tensor:
    """Mean brightness, contrast, colourfulness and roughness of each image, with a constant."""
    x = images.double() / 255
    grey = x.mean(1)
    numbers = [grey.mean((1, 2)), grey.std((1, 2)), x.std(1).mean((1, 2)), x.diff(dim=3).abs().mean((1, 2, 3))]
    return torch.stack([*numbers, torch.ones(len(x)).double()], 1)


def test_a_digit_is_still_read_from_its_picture() -> None:
    """Nearest neighbours in brightness, within a domain, are right far more often than one in ten."""
    federation = load("digits-shift")
    grey = federation.images.float().mean(1).flatten(1)
    grey = (grey - grey.mean(1, keepdim=True)) / grey.std(1, keepdim=True)
    for client in federation.clients:
        # Ink may be darker or lighter than its ground: likeness up to the sign.
        likeness = (grey[client.test] @ grey[client.train].T).abs()
        read = federation.labels[client.train][likeness.argmax(1)]
        assert (read == federation.labels[client.test]).float().mean() > 0.35, client.name


def test_the_contact_sheet_has_a_block_per_domain_and_a_column_per_class(tmp_path: Path) -> None:
    federation = load("digits-shift", partition="even(clients=2)")
    path = contact_sheet(federation, tmp_path / "sheet.png", per_class=2, cell=34)
    with Image.open(path) as sheet:
        pixels = np.asarray(sheet)
        assert sheet.format == "PNG"
        assert pixels.shape[0] == 30 + 5 * (2 * 34 + 10)
    scan = load("digits-shift")["scan"]
    members = torch.cat([scan.train, scan.validation, scan.test]).sort().values
    first = federation.images[members[federation.labels[members] == 0][0]]
    # The first zero of the first domain is at the top left, pixel for pixel (cells of 34 have a gap of 2).
    left = pixels.shape[1] - 10 - 10 * 34
    assert (pixels[30:62, left : left + 32] == first.permute(1, 2, 0).numpy()).all()
