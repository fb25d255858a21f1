"""Encoded images are checked before a run decodes any of them, and the cache of decoded images has the same pixels."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from small_images import EIGHT, config, encoded, folders, quarters

from shared.errors import UserError
from shared.images import cache as image_cache
from shared.images import decoding
from shared.images.decoding import Square, decode, inspect
from shared.images.images import with_square
from shared.images.sources import class_folders, load_images


@pytest.mark.parametrize("cache", ["none", "uint8"])
def test_headers_are_checked_before_the_run_and_once_per_machine(tmp_path, monkeypatch, cache):
    root = folders(tmp_path / "train")
    (root / "cat/0.png").write_bytes(b"")
    (root / "cat/1.png").write_bytes(b"no image")
    for name in ("2", "3", "4"):
        (root / f"cat/{name}.png").unlink()
    (root / "cat/2.jpg").write_bytes(encoded(quarters(), "JPEG")[:-200])
    given = config(train_dir=str(root), validation_dir=str(root), cache=cache)
    inspected = []
    monkeypatch.setattr(image_cache, "inspect", lambda *given: inspected.append(given) or inspect(*given))
    for _ in range(2):
        with pytest.raises(UserError, match=r"cat/0.png is corrupt \(0 bytes\): replace it"):
            load_images(given, EIGHT)
    assert len(inspected) == 18
    for name in ("0.png", "1.png", "2.jpg"):
        (root / f"cat/{name}").write_bytes(encoded(quarters(), "JPEG"))
    load_images(given, EIGHT)
    assert len(inspected) == 2 * 18


def test_a_file_that_cannot_be_read_is_not_called_corrupt(tmp_path, monkeypatch):
    root = folders(tmp_path / "train")
    whole = Path.open

    def fail(path, *args, **kwargs):
        if path.name == "7.png":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return whole(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", fail)
    with pytest.raises(UserError, match=r"the image .*/7\.png: .*Input/output error"):
        load_images(config(train_dir=str(root)), EIGHT)


def test_images_of_more_than_eight_bits_are_named(tmp_path, capsys):
    root = folders(tmp_path / "train")
    Image.fromarray(np.full((8, 8), 1000, np.uint16)).save(root / "cat/1.png")
    load_images(config(train_dir=str(root)), EIGHT)
    assert f"1 image with more than 8 bits per pixel and channel, such as --train_dir {root}: {root}/cat/1.png" in (
        capsys.readouterr().err
    )


def test_the_files_are_those_of_a_plain_loop_and_are_rebuilt_only_if_an_image_changes(tmp_path, monkeypatch):
    root = folders(tmp_path / "train")
    names = [root / kind / f"{i}.png" for kind in ("cat", "dog") for i in range(10)]
    corrupt = [5, 15, 16, 17]  # in the middle, so that only decoding finds them
    for i in corrupt:
        names[i].write_bytes(names[i].read_bytes().replace(b"IDAT", b"IDAT?"))
    monkeypatch.setattr(image_cache, "SMALLEST_BLOCK", 3)
    decoded = []  # without the corrupt ones, which each message reads again
    for module in (image_cache, decoding):
        monkeypatch.setattr(module, "decode", lambda *args: decoded.append(decode(*args)) or decoded[-1])

    def check(size, **changed):
        source = class_folders(str(root), "--train_dir")
        images = with_square(source, config(cache="uint8", skip_corrupt_images=True, **changed), Square(size))
        pixels, aspects = np.zeros((16, size, size, 3), np.uint8), np.ones(16, np.float32)
        for place, i in enumerate(sorted({*range(20)} - {*corrupt})):
            pixels[place], aspects[place] = decode(names[i], Square(size))
        assert np.array_equal(images.pixels[np.arange(16)], pixels)
        assert np.array_equal(images.aspects, aspects)
        open_files = {os.path.realpath(file) for file in Path("/proc/self/fd").iterdir()}
        assert not any("images-" in file for file in open_files)  # a data set has up to 2048 such files
        assert np.array_equal(images[15][0], pixels[15])

    with pytest.raises(UserError, match=r"cat/5\.png is corrupt \(.+\): .* --skip_corrupt_images, which lists"):
        with_square(class_folders(str(root), "--train_dir"), config(cache="uint8"), Square(8))
    check(8)  # with the images that were decoded before
    check(8)
    assert len(decoded) == 16
    names[0].write_bytes(encoded(Image.new("RGB", (20, 16), (1, 2, 3))))
    check(8)
    check(4)
    assert len(decoded) == 48
    source = class_folders(str(root), "--train_dir")
    found = image_cache.check_images(source.key, 20, source.stored, source.name, whole=True)
    assert found.corrupt.tolist() == corrupt
