"""The cache of decoded images."""

import numpy as np
from PIL import Image
from small_images import config, encoded, folders

from shared.images import cache as image_cache
from shared.images.decoding import Square, decode
from shared.images.images import prepare
from shared.images.sources import class_folders


def test_the_cache_has_the_same_pixels_and_is_rebuilt_only_if_its_files_change(tmp_path, monkeypatch):
    root = folders(tmp_path / "train")
    source = class_folders(str(root), "--train_dir")
    plain = prepare(source, config(), Square(8))
    cached = prepare(source, config(cache="uint8"), Square(8))
    for i in range(len(source)):
        assert np.array_equal(plain[i][0], cached[i][0])
        assert plain[i][1:] == cached[i][1:]
    assert isinstance(cached.pixels, np.memmap)
    decoded = []
    monkeypatch.setattr(image_cache, "decode", lambda *args: decoded.append(args) or decode(*args))
    prepare(source, config(cache="uint8"), Square(8))
    assert not decoded
    (root / "cat/0.png").write_bytes(encoded(Image.new("RGB", (20, 16), (1, 2, 3))))
    source = class_folders(str(root), "--train_dir")
    changed = prepare(source, config(cache="uint8"), Square(8))
    assert len(decoded) == 20
    assert changed[0][0][0, 0].tolist() == [1, 2, 3]
    other_size = prepare(source, config(cache="uint8"), Square(4))
    assert other_size[0][0].shape == (4, 4, 3)
