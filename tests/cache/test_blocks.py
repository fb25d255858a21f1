"""A folder of the cache that is made from blocks has the same bytes with any number of processes, after any kill.

Tests with images are in images/test_image_blocks.py.
"""

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import runs

from shared.cache import blocks, prepared
from shared.cache.blocks import Blocks
from shared.cache.prepared import Unfinished, each_share, only_task
from shared.errors import UserError

COUNT, SIZE = 23, 4


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("ACCELERATE_RECIPES_CACHE", str(tmp_path / "cache"))


def begin(shared):
    (shared / "title").write_text("squares:")


def write(shared, folder, items):
    (folder / "lines").write_text("".join(f" {item**2}" for item in items))


def join(shared, folder, parts):
    lines = "".join((part / "lines").read_text() for part in parts)
    (folder / "squares").write_text((shared / "title").read_text() + lines)


SQUARES = Blocks("squares", COUNT, SIZE, write, join, "squaring", "numbers", "here", begin)
RESULT = "squares:" + "".join(f" {i**2}" for i in range(COUNT))


def check_result():
    """The folder is complete, and nothing else is left."""
    assert (SQUARES.build() / "squares").read_text() == RESULT
    assert {path.name for path in prepared.cache_dir().iterdir()} == {"squares", "squares.lock"}


def complete_blocks():
    return [int(path.name) for path in sorted(SQUARES.shared.glob("?" * blocks.DIGITS)) if prepared.is_complete(path)]


def in_another_process(rank, cache, processes, kill_at=None):
    """Build in a forked process. The first one is killed by the item `kill_at`, after it wrote half of a block."""
    os.environ |= {"ACCELERATE_RECIPES_CACHE": str(cache), "RANK": str(rank), "WORLD_SIZE": str(processes)}
    os.environ["LOCAL_WORLD_SIZE"] = "1000"  # one thread
    while rank and kill_at is not None and not cache.with_name("dying").exists():
        time.sleep(0.01)  # the first process has to get the block in which it is killed

    def write_or_die(shared, folder, items):
        write(shared, folder, items)
        if rank == 0 and kill_at in items:
            cache.with_name("dying").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    replace(SQUARES, write=write_or_die).build()


def test_one_process_writes_all_blocks_and_leaves_only_the_folder():
    assert SQUARES.build() == SQUARES.folder
    check_result()


@pytest.mark.parametrize("processes", [2, 3])
def test_any_number_of_processes_write_the_same_bytes(processes):
    runs.fork(in_another_process, (prepared.cache_dir(), processes), processes)
    check_result()


def test_after_a_kill_only_the_missing_blocks_are_written():
    context = runs.begin_fork(in_another_process, (prepared.cache_dir(), 1, 9), 1)
    context.processes[0].join(60)
    assert context.processes[0].exitcode == -signal.SIGKILL
    assert complete_blocks() == [0, 4]
    written = []
    replace(SQUARES, write=lambda *args: written.append(args[-1].start) or write(*args)).build()
    assert sorted(written) == [8, 12, 16, 20]
    check_result()


def test_the_other_processes_write_the_blocks_of_a_killed_one():
    context = runs.begin_fork(in_another_process, (prepared.cache_dir(), 2, 1), 2)
    for process in context.processes:
        process.join(60)
    assert [process.exitcode for process in context.processes] == [-signal.SIGKILL, 0]
    check_result()


def test_blocks_are_joined_in_their_order_whatever_the_order_of_writing(monkeypatch):
    """The last of several processes begins with the last blocks."""
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    written, joined = [], []
    squares = replace(
        SQUARES,
        write=lambda *args: written.append(args[-1].start) or write(*args),
        join=lambda *args: joined.extend(args[-1]) or join(*args),
        most_threads=1,
    )
    squares.build()
    assert written == [16, 20, 0, 4, 8, 12]
    assert [int(Path(part).name) for part in joined] == sorted(written)
    check_result()


def test_an_error_of_begin_leaves_nothing():
    def refuse(shared):
        (shared / "half").touch()
        raise UserError("row 3 has no text")

    for _ in range(2):
        with pytest.raises(UserError, match=r"^row 3 has no text$"):
            replace(SQUARES, begin=refuse).build()
        assert not [path for path in prepared.cache_dir().iterdir() if path.is_dir()]
    check_result()


def test_after_an_error_in_a_block_the_complete_blocks_are_kept():
    def refuse(shared, folder, items):
        if 9 in items:
            raise UserError("item 9 is bad")
        write(shared, folder, items)

    with pytest.raises(UserError, match=r"^item 9 is bad$"):
        replace(SQUARES, write=refuse, most_threads=1).build()
    assert complete_blocks()[:2] == [0, 4]
    assert 8 not in complete_blocks()
    check_result()


def test_a_task_of_an_array_writes_its_share_of_several_folders():
    cubes = replace(SQUARES, name="cubes")
    for task in (0, 1):
        with only_task(task, 3), pytest.raises(Unfinished) as unfinished:
            each_share(Blocks.build, [SQUARES, cubes])
        left = (COUNT - 8, COUNT - 16)[task]
        one = f"{left} of {COUNT} numbers of here are left to other tasks"
        assert str(unfinished.value) == f"{one}; {one}"
    with only_task(2, 3):
        assert each_share(Blocks.build, [SQUARES, cubes]) == [SQUARES.folder, cubes.folder]


def test_many_items_make_larger_blocks():
    assert SQUARES.size == SIZE
    assert replace(SQUARES, count=SIZE * blocks.MOST_BLOCKS).size == SIZE
    many = replace(SQUARES, count=SIZE * blocks.MOST_BLOCKS + 1)
    assert many.size == SIZE + 1
    assert many.shared != SQUARES.shared, "blocks of another size are not reused"
