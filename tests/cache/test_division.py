"""A folder of the cache that is made from blocks has the same bytes with any number of processes, after any kill."""

import os
import signal
import time
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import runs

from shared.cache import division, prepared
from shared.cache.division import Division, parts_of
from shared.cache.prepared import Unfinished, each_share, only_task
from shared.errors import UserError

pytestmark = pytest.mark.usefixtures("own_cache")

COUNT, SIZE = 23, 4


def nothing(_):
    """Called with each item that is read."""


def make(items, note=nothing):
    for item in items:
        note(item)
        yield {"squares": np.full(item % 3, item**2), "offsets": np.array([item % 3])}


def squares(note=nothing, **changes):
    how = {"places": {"offsets": "squares"}, "first": {"offsets": np.zeros(1, np.int64)}}
    made = Division("squares", parts_of(COUNT, SIZE), partial(make, note=note), "squaring numbers", **how)
    return replace(made, **changes)


def check_result(folder=None):
    """The folder is complete, and nothing else is left."""
    folder = folder or squares().build()
    expected = [item**2 for item in range(COUNT) for _ in range(item % 3)]
    assert prepared.read_array(folder / "squares.npy").tolist() == expected
    offsets = prepared.read_array(folder / "offsets.npy").tolist()
    assert offsets == [0, *np.cumsum([item % 3 for item in range(COUNT)])]
    assert {path.name for path in prepared.cache_dir().iterdir() if path.suffix != ".lock"} == {folder.name}


def in_another_process(rank, cache, processes, kill_at=None):
    """Build in a forked process. The first one is killed by the item `kill_at`, after it wrote half of a block."""
    os.environ |= {"ACCELERATE_RECIPES_CACHE": str(cache), "RANK": str(rank), "WORLD_SIZE": str(processes)}
    while rank and kill_at is not None and not cache.with_name("dying").exists():
        time.sleep(0.01)  # the first process has to get the block in which it is killed

    def die(item):
        with cache.with_name("read").open("a") as file:
            file.write(f"{item}\n")
        if rank == 0 and item == kill_at:
            cache.with_name("dying").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    squares(die).build()


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_any_number_of_processes_write_the_same_arrays_and_read_each_item_once(processes):
    runs.fork(in_another_process, (prepared.cache_dir(), processes), processes)
    check_result()
    read = prepared.cache_dir().with_name("read").read_text().split()
    assert sorted(map(int, read)) == [*range(COUNT)]


def test_after_a_kill_only_the_missing_blocks_are_written():
    context = runs.begin_fork(in_another_process, (prepared.cache_dir(), 1, 9), 1)
    context.processes[0].join(60)
    assert context.processes[0].exitcode == -signal.SIGKILL
    read = []
    folder = squares(read.append).build()
    assert sorted(read) == [*range(8, COUNT)]
    check_result(folder)


def test_the_other_processes_write_the_blocks_of_a_killed_one():
    context = runs.begin_fork(in_another_process, (prepared.cache_dir(), 2, 1), 2)
    for process in context.processes:
        process.join(60)
    assert [process.exitcode for process in context.processes] == [-signal.SIGKILL, 0]
    check_result()


@pytest.mark.parametrize("damage", ["removed", "cut short"])
def test_a_damaged_block_is_written_again_and_no_other(damage):
    def refuse(item):
        if item == 20:
            raise UserError("item 20 is bad")

    with pytest.raises(UserError, match=r"^item 20 is bad$"):
        squares(refuse).build()
    block = prepared.cache_dir() / f"squares.blocks/{4:012}-{8:012}"
    if damage == "cut short":
        runs.truncate(block / "squares.npy")
    else:
        prepared.shutil.rmtree(block)
    read = []
    folder = squares(read.append).build()
    assert sorted(read) == [4, 5, 6, 7, 20, 21, 22]
    check_result(folder)


def test_a_block_that_is_damaged_before_the_join_is_never_left_out(monkeypatch):
    build_once = division.build_once

    def damage(name, build):
        prepared.shutil.rmtree(prepared.cache_dir() / f"squares.blocks/{4:012}-{8:012}")
        return build_once(name, build)

    monkeypatch.setattr(division, "build_once", damage)
    with pytest.raises(UserError, match="is damaged: start again"):
        squares().build()
    monkeypatch.undo()


def test_a_task_of_an_array_writes_its_share_of_several_folders():
    both = [squares(), squares(name="others", title="again")]
    for task in (0, 1):
        with only_task(task, 3), pytest.raises(Unfinished) as unfinished:
            each_share(Division.build, both)
        left = f"{4 - 2 * task} of 6 parts are left to other tasks"
        assert str(unfinished.value) == f"squaring numbers: {left}; again: {left}"
    with only_task(2, 3):
        assert each_share(Division.build, both) == [division.folder for division in both]
    with only_task(500, 501), pytest.raises(Unfinished):
        squares(name="third").build()


def test_many_items_make_larger_parts():
    most = division.MOST_PARTS
    assert len(parts_of(SIZE * most, SIZE)) == most
    many = parts_of(SIZE * most + 1, SIZE)
    assert len(many) <= most
    assert not {*many} & {*parts_of(SIZE * most, SIZE)}
