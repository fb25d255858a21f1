"""A folder of the cache that is made from blocks has the same bytes with any number of processes, after any kill."""

import errno
import itertools
import os
import signal
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import runs
from filelock import Timeout
from hypothesis import given
from hypothesis import strategies as st

from shared.cache import division, prepared
from shared.cache.division import Division, parts_by_size, parts_of
from shared.cache.prepared import Unfinished, each_share, only_task
from shared.errors import UserError

pytestmark = pytest.mark.usefixtures("own_cache")

COUNT, SIZE = 23, 4


@given(st.lists(st.integers(0, 9), max_size=20), st.integers(1, 12))
def test_parts_by_size_have_all_items_and_are_larger_than_the_size_by_one_item_at_most(sizes, most):
    parts = parts_by_size(sizes, most)
    assert [i for part in parts for i in part] == list(range(len(sizes)))
    assert all(sum(sizes[i] for i in part[1:]) < most for part in parts)


def make(items, note):
    for item in items:
        note(item)
        yield {"squares": np.full(item % 3, item**2), "offsets": np.array([item % 3])}


def squares(note=lambda _: None, name="squares", **changes):
    """`note` is called with each item that is read."""
    how = {"places": {"offsets": "squares"}, "first": {"offsets": np.zeros(1, np.int64)}}
    made = Division(name, parts_of(COUNT, SIZE), partial(make, note=note), "squaring numbers", **how)
    return replace(made, **changes)


def check_result():
    """The folder is complete without another item to be read, and nothing else is left."""
    read = []
    folder = squares(read.append).build()
    assert not read
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


def read_to_the_end():
    """The items that one more build reads; its result is checked."""
    read = []
    squares(read.append).build()
    check_result()
    return sorted(read)


@pytest.mark.parametrize(("processes", "kill_at", "left"), [(1, 9, [*range(8, COUNT)]), (2, 1, [])])
def test_after_a_kill_this_or_another_process_writes_the_missing_blocks_only(processes, kill_at, left):
    context = runs.begin_fork(in_another_process, (prepared.cache_dir(), processes, kill_at), processes)
    for process in context.processes:
        process.join(60)
    assert [process.exitcode for process in context.processes] == [-signal.SIGKILL, 0][:processes]
    assert read_to_the_end() == left


@pytest.mark.parametrize("damage", ["removed", "cut short"])
def test_a_damaged_block_is_written_again_and_no_other(damage):
    def refuse(item):
        if item == 20:
            raise UserError("item 20 is bad")

    assert runs.refusal(squares(refuse).build) == "item 20 is bad"
    block = prepared.cache_dir() / f"squares.blocks/{4:012}-{8:012}"
    if damage == "cut short":
        runs.truncate(block / "squares.npy")
    else:
        prepared.shutil.rmtree(block)
    assert read_to_the_end() == [4, 5, 6, 7, 20, 21, 22]


def test_a_block_that_is_damaged_before_the_join_is_never_left_out(monkeypatch):
    build_once = division.build_once

    def damage(name, build):
        prepared.shutil.rmtree(prepared.cache_dir() / f"squares.blocks/{4:012}-{8:012}")
        return build_once(name, build)

    monkeypatch.setattr(division, "build_once", damage)
    assert "is damaged: start again" in runs.refusal(squares().build)
    monkeypatch.undo()


def test_after_an_interrupted_join_no_item_is_read_again(monkeypatch):
    build_once = division.build_once

    def interrupted(folder, join):
        join(folder)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(division, "build_once", lambda name, join: build_once(name, lambda it: interrupted(it, join)))
        with pytest.raises(KeyboardInterrupt):
            squares().build()
    check_result()


def test_after_a_full_disk_only_the_missing_blocks_are_written(monkeypatch):
    fsync, calls = os.fsync, []

    def fill_up(descriptor):
        calls.append(descriptor)
        if len(calls) > 20:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fill_up)
        with pytest.raises(UserError, match=r"cannot write prepared data to .* \(No space left on device\): set ACC"):
            squares().build()
    complete = [*prepared.cache_dir().glob("squares.blocks/*/complete.json")]
    assert complete
    assert len(read_to_the_end()) == COUNT - SIZE * len(complete)


def test_blocks_that_are_not_joined_stay_and_a_damaged_one_is_written_again():
    read = []
    first, second, *others = folders = squares(read.append).blocks()
    assert [*range(COUNT)] == read
    runs.truncate(second / "squares.npy")
    assert squares(read.append).blocks() == folders
    assert read[COUNT:] == [4, 5, 6, 7]
    found = np.concatenate([prepared.read_array(block / "squares.npy") for block in (first, second, *others)])
    assert found.tolist() == [item**2 for item in range(COUNT) for _ in range(item % 3)]


def is_free(folder):
    with suppress(Timeout), prepared.locked(folder, wait=False):
        return True
    return False


def test_at_any_moment_another_process_may_join_all_blocks_and_remove_them(monkeypatch, tmp_path):
    """It does so right after this process has found the folder incomplete for the first, second, ... time."""
    is_complete = division.is_complete
    for moment in itertools.count():
        monkeypatch.setenv("ACCELERATE_RECIPES_CACHE", str(tmp_path / str(moment)))
        looks = []

        def then_others_finish(folder, moment=moment, looks=looks):
            complete = is_complete(folder)
            if folder.parent == prepared.cache_dir() and not complete:
                looks.append(folder)
                if len(looks) == moment + 1 and is_free(folder):  # else this process holds the lock
                    squares().build()
            return complete

        with monkeypatch.context() as patch:
            patch.setattr(division, "is_complete", then_others_finish)
            squares().build()
        check_result()
        if len(looks) <= moment:  # this moment does not exist
            break
    assert moment > 8


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


@pytest.mark.parametrize(("processes", "cores"), [(1, 16), (4, 4), (64, 1)])
def test_the_processes_of_a_machine_share_its_cores(monkeypatch, processes, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    assert division.cores_of_process() == cores
