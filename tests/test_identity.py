"""A target's identity: equal for copies, another for other weights, and read from a small part of them.

Run alone: python -m pytest tests/test_identity.py
"""

import numpy as np
import pytest

from dflash_nb.model.identity import BLOCK, BLOCKS, HEAD, target_identity

SIZES = (0, 10, HEAD, HEAD + BLOCK * BLOCKS, HEAD + BLOCK * BLOCKS + 1, 8 << 20)


def target(folder, size, seed=0):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "notes.txt").write_text(str(folder))
    (folder / "model.safetensors").write_bytes(np.random.default_rng(seed).bytes(size))
    return folder


@pytest.mark.parametrize("size", SIZES)
def test_copies_are_the_same_and_other_weights_are_not(tmp_path, size):
    first = target_identity(target(tmp_path / "a", size))
    assert list(first) == ["config.json", "model.safetensors"] and first["model.safetensors"]["bytes"] == size
    assert target_identity(target(tmp_path / "b", size)) == first
    other = target_identity(target(tmp_path / "c", size, seed=1))
    assert (other == first) == (size == 0) and other["config.json"] == first["config.json"]


@pytest.mark.parametrize("size", SIZES[1:])
@pytest.mark.parametrize("at", [0, -1])
def test_the_first_and_the_last_byte_count(tmp_path, size, at):
    folder = target(tmp_path / "a", size)
    first = target_identity(folder)
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[at] ^= 1
    (folder / "model.safetensors").write_bytes(content)
    assert target_identity(folder) != first


def test_a_sparse_file_of_four_gigabytes_is_hardly_read(tmp_path, monkeypatch):
    folder, read = target(tmp_path / "a", 0), []
    with (folder / "model.safetensors").open("wb") as file:
        file.truncate(4 << 30)
    monkeypatch.setattr(
        "hashlib.sha256", lambda: type("Counter", (), {"update": lambda _, part: read.append(len(part)), "hexdigest": str})()
    )
    monkeypatch.setattr("hashlib.file_digest", lambda file, _: type("Whole", (), {"hexdigest": lambda _: ""})())
    target_identity(folder)
    assert sum(read) == HEAD + BLOCK * BLOCKS
