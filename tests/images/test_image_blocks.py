"""Images are checked and decoded to the same bytes by any number of processes, after any interruption."""

import errno
import io
import os
from contextlib import suppress

import numpy as np
import pytest
import runs
from filelock import Timeout
from PIL import Image
from small_images import EIGHT, config, folders

from shared.cache import division, prepared
from shared.cache.prepared import Unfinished, only_task
from shared.errors import UserError
from shared.images import cache as image_cache
from shared.images.decoding import CorruptImage, Square, decode
from shared.images.images import load_images

SMALL = {"SMALLEST_BLOCK": 3, "SMALLEST_CHECKED": 5}
TRAINING, VALIDATION = 26, 6  # images


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    for name, value in SMALL.items():
        monkeypatch.setattr(image_cache, name, value)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """A folder of two classes with 16 images each. One is corrupt, and one has 16 bits."""
    root = folders(tmp_path_factory.mktemp("photos") / "train", count=16)
    (root / "cat/5.png").write_bytes((root / "cat/5.png").read_bytes()[:-40])
    Image.fromarray(np.full((8, 12), 1000, np.uint16)).save(root / "dog/7.png")
    return root


def load(photos):
    return load_images(config(train_dir=str(photos), cache="uint8", skip_corrupt_images=True), EIGHT)


def content():
    """{path: bytes} of the folders of images in the cache; there is nothing unfinished beside them."""
    here = prepared.cache_dir()
    assert not [*here.glob("*.blocks"), *here.glob("*.partial-*")]
    files = [path for kind in ("images-*/*", "checked-*/*") for path in here.glob(kind)]
    return {str(path.relative_to(here)): path.read_bytes() for path in files}


def in_another_process(rank, photos, cache, environment):
    """Load the images in a forked process."""
    os.environ.update({"ACCELERATE_RECIPES_CACHE": str(cache)} | environment | {"RANK": str(rank)})
    for name, value in SMALL.items():
        setattr(image_cache, name, value)
    load(photos)


@pytest.fixture(scope="module")
def alone(photos, tmp_path_factory):
    """What one process writes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_RECIPES_CACHE", str(tmp_path_factory.mktemp("alone")))
        for name, value in SMALL.items():
            patch.setattr(image_cache, name, value)
        load(photos)
        return content()


@pytest.fixture
def decoded(monkeypatch):
    """The images that are decoded from now on."""
    found = []
    monkeypatch.setattr(image_cache, "decode", lambda *args: found.append(args) or decode(*args))
    return found


def saved(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def test_the_files_are_those_of_a_plain_loop(photos):
    for images, count in zip(load(photos), (TRAINING, VALIDATION), strict=True):
        source, folder = images.source, prepared.mapped_file(images.aspects).parent
        pixels, aspects, corrupt = np.zeros((count, 8, 8, 3), np.uint8), np.ones(count, np.float32), []
        good = dict(zip(images.places.tolist(), range(len(source)), strict=True))
        for i in range(count):
            if i in good:
                pixels[i], aspects[i] = decode(source.stored(good[i]), Square(8))
            else:
                corrupt.append(i)
        assert (folder / "pixels.npy").read_bytes() == saved(pixels)
        assert (folder / "aspects.npy").read_bytes() == saved(aspects)
        assert [i for i, _ in image_cache.corrupt_images(folder)] == corrupt
    with pytest.raises(CorruptImage):
        decode(photos / "cat/5.png", Square(8))


@pytest.mark.parametrize(("processes", "launched"), [(2, True), (3, False)], ids=["one launch", "several launches"])
def test_any_number_of_processes_write_the_same_bytes(photos, alone, tmp_path, monkeypatch, processes, launched):
    """Processes of one launch know their rank; those of several launches do not."""
    environment = {"WORLD_SIZE": str(processes)}
    runs.fork(
        in_another_process if launched else in_one_of_several_launches, (photos, tmp_path, environment), processes
    )
    monkeypatch.setenv("ACCELERATE_RECIPES_CACHE", str(tmp_path))
    assert content() == alone
    names = {path.split("/")[1] for path in alone}
    assert names >= {"pixels.npy", "aspects.npy", "corrupt.npy", "prints.npy", "remarks.npy"}


def in_one_of_several_launches(_, photos, cache, environment):
    in_another_process(0, photos, cache, {"WORLD_SIZE": "1"})


@pytest.mark.parametrize(("processes", "cores"), [(1, 16), (4, 4), (64, 1)])
def test_the_processes_of_a_machine_share_its_cores(monkeypatch, processes, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    assert division.cores_of_process() == cores


# Interruptions


def test_after_an_interrupted_join_no_image_is_decoded_again(photos, alone, monkeypatch, decoded):
    move_or_link = division.move_or_link

    def interrupted(*args):
        move_or_link(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(division, "move_or_link", interrupted)
        with pytest.raises(KeyboardInterrupt):
            load(photos)
    assert len(decoded) == TRAINING
    load(photos)
    assert len(decoded) == TRAINING + VALIDATION
    assert content() == alone


def is_free(folder):
    with suppress(Timeout), prepared.locked(folder, wait=False):
        return True
    return False


@pytest.mark.parametrize("moment", range(29))
def test_at_any_moment_another_process_may_join_all_blocks_and_remove_them(photos, alone, monkeypatch, moment):
    """It does so right after this process has found the folder of the pixels incomplete."""
    is_complete, looks = division.is_complete, []

    def then_others_finish(folder):
        complete = is_complete(folder)
        if folder.parent == prepared.cache_dir() and not complete:
            looks.append(folder)
            if len(looks) == moment + 1 and is_free(folder):  # else this process holds the lock
                load(photos)
        return complete

    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000")  # with one thread, so that the moments are the same in each run
    monkeypatch.setattr(division, "is_complete", then_others_finish)
    load(photos)
    assert len(looks) > moment, "this moment does not exist"
    assert content() == alone


def test_after_a_full_disk_only_the_missing_blocks_are_decoded(photos, alone, monkeypatch, decoded):
    load_images(config(train_dir=str(photos), skip_corrupt_images=True), EIGHT)  # checks the headers
    decoded.clear()
    fsync, calls = os.fsync, []

    def fill_up(descriptor):
        calls.append(descriptor)
        if len(calls) > 20:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    with monkeypatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "1000")
        patch.setattr(os, "fsync", fill_up)
        with pytest.raises(UserError, match=r"cannot write prepared data to .* \(No space left on device\): set ACC"):
            load(photos)
    complete = [*prepared.cache_dir().glob("images-*.blocks/*/complete.json")]
    assert complete
    decoded.clear()
    load(photos)
    assert len(decoded) == TRAINING + VALIDATION - 3 * len(complete)
    assert {path: data for path, data in content().items() if path in alone} == alone


def test_without_the_file_of_all_pixels_the_blocks_are_decoded_again(photos, alone, decoded):
    with only_task(0, 3), pytest.raises(Unfinished):
        load(photos)
    for file in prepared.cache_dir().glob("images-*.blocks/pixels.npy"):
        file.unlink()
    decoded.clear()
    load(photos)
    assert len(decoded) == TRAINING + VALIDATION
    assert content() == alone
