"""`--mirror_checkpoints`: checkpoints are copied to an object store, and a start on an empty machine loads the newest.

The mirror has the layout of the folder: step_00000255/FILE. The manifest of a checkpoint, with the digests of its
files, is written last and removed first, and a checkpoint without a manifest does not count: it is complete or absent.
"""

import contextlib
import json
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from shared.checkpoints import folders, resuming
from shared.checkpoints.folders import ALGORITHM, Line
from shared.checkpoints.saving import lower_priority
from shared.disk import remedy, replace_file
from shared.errors import UserError, about, complain, count_of
from shared.monitoring.hooks import Hook
from shared.processes import folder_lock
from shared.processes.collectives import agree, on_main_process, on_writers
from shared.remote.object_store import RemoteFolder, failure_in_words
from shared.run.resume import refuse_another_run

FLAG = "--mirror_checkpoints"
MANIFEST, METRICS, PROBE = "manifest.json", "metrics.jsonl", ".writable"
PIECE_READ, PIECE_WRITTEN = 1 << 26, 1 << 22  # bytes of a request, and bytes that are given to the client at once
FILES_AT_ONCE = 2  # each may take the memory of two parts of an upload, of 50 MB in s3fs
POLL, BETWEEN_ATTEMPTS = 0.5, 10.0  # seconds between two looks at the folder, and between two attempts
PATIENCE_AT_END, PATIENCE_AT_SIGNAL = 300.0, 30.0  # seconds that a run waits for its last upload ...
SLOWEST = 10e6  # ... besides one second for so many bytes


class Damaged(Exception):
    """A checkpoint, here or in the mirror, is not what its manifest says."""


class Mirror(Hook):
    """Copies checkpoints to --mirror_checkpoints and back.

    The main process writes the mirror: with --save_on_each_node all machines have the same checkpoints. Each process
    that writes checkpoints loads them.

    A thread copies the newest complete checkpoint whenever the mirror lacks it. It looks at the folder, so nothing in
    the training waits for it. If a checkpoint is complete while an older one is being copied, it comes next; those in
    between are left out.
    """

    thread: threading.Thread | None = None  # of the main process, once training begins

    def opened(self, run: Any) -> None:
        """Refuse a URL with a password."""
        self.run, self.url = run, run.config.mirror_checkpoints
        self.store, self.where = RemoteFolder(self.url, FLAG), f"{FLAG} {self.url}"
        self.complete: set[int] = set()  # steps, in the mirror; known to the main process
        self.problem = ""  # of the attempts since the last success
        self.finished = threading.Event()  # no checkpoint follows

    def folder_locked(self) -> None:
        """Refuse a mirror that cannot be used; copy its newest checkpoint if it is newer than those of the folder.

        Raises:
            UserError: the mirror cannot be used, --resume_from_checkpoint rejects what it holds, or the disk is full.
        """
        self.data = on_main_process(self.run.accelerator, self._check)
        if self.run.config.resume_from_checkpoint == "auto" or resuming.started_again():
            on_writers(self.run.accelerator, self.run.config, self._restore)

    def prepared(self, run: Any) -> None:
        """Refuse the mirror of a run with other data, and name the mirror on the launch card."""
        if self.data not in (None, run.progress.data):
            raise UserError(f"{self.where} holds a run with other data: name another URL for a new run")
        run.card["mirror"] = f"{self.url}, with {count_of(len(self.complete), 'checkpoint')}"

    def begun(self, run: Any) -> None:
        if run.accelerator.is_main_process:
            self.thread = threading.Thread(target=self._work, name="mirror", daemon=True)
            self.thread.start()

    def exported(self, folder: Path) -> None:
        """Wait for the last checkpoint.

        Raises:
            UserError: it could not be copied; the run does not count as finished, so that a new start tries again.
        """
        problem = self._wait(PATIENCE_AT_END)
        message = f"{self.where}: {problem}: start again to retry, or leave the flag out; {folder} has the model"
        agree(self.run.accelerator, UserError(message) if problem else None)

    def closed(self) -> None:
        """Wait for the last checkpoint of a run that a signal ends."""
        if problem := self._wait(PATIENCE_AT_SIGNAL):
            complain(f"warning: {self.where}: {problem}; it is in {self.run.config.output_dir}")

    def _check(self) -> list[str] | None:
        """Refuse a mirror that cannot be used; the digests of the data of the run in it, if there are any."""
        with about(f"{self.where} cannot be used (check the URL, the credentials and the network)"):
            self.store.write(PROBE, [b"written by a recipe at each start"])
            sizes = self.store.sizes()
            self.store.remove(PROBE)
        if PROBE not in sizes:  # no checkpoint would be found
            raise UserError(f"{self.where} does not list what is written there: write one / between names in the URL")
        config = self.run.config
        self.complete |= complete_steps(sizes)
        newest = sorted(self.complete, reverse=True)
        if newest and config.resume_from_checkpoint == "never" and not resuming.started_again():
            raise UserError(
                f"--resume_from_checkpoint never, but {self.where} holds checkpoints up to step {newest[0]}: name "
                "another URL, or remove them"
            )
        for step in newest:
            try:
                _, state = self._read(step, sizes)
            except Damaged:  # `_restore` says so, if it needs this checkpoint
                continue
            config = config.settled(self.run.accelerator, state["config"])
            elsewhere = config.moved(state, config.model_digest())
            refuse_another_run(state["config"], config, self.where, elsewhere)
            return state["data"]
        return None

    def _restore(self) -> None:
        """Copy the newest intact checkpoint of the mirror into the folder, if the folder has none that is as new."""
        config = self.run.config
        with about(f"{self.where} cannot be listed (check the URL, the credentials and the network)"):
            sizes = self.store.sizes()
        here, there = resuming.checkpoints_of(config.output_dir), complete_steps(sizes)
        for step in sorted({*here, *there}, reverse=True):
            if step in here and not resuming.problem_with(here[step]):
                return
            if step in there and (state := self._copied(step, sizes)):
                best = state["best_step"] if config.load_best_model_at_end else None
                if best in there and (best not in here or resuming.problem_with(here[best])):
                    self._copied(best, sizes)
                return

    def _copied(self, step: int, sizes: Mapping[str, int]) -> dict[str, Any] | None:
        """Copy a checkpoint, complete or not at all, into the folder; its state. None if it is damaged, as printed."""
        final, began = folders.path_of(self.run.config.output_dir, step), time.monotonic()
        partial = folders.partial_of(final)
        try:
            manifest, state = self._read(step, sizes)
            if METRICS in sizes:  # has the lines up to this checkpoint, unlike that of a machine that the run had left
                replace_file(final.parent.parent / METRICS, self.store.read(METRICS).decode(errors="replace"))
            size = sum(line["bytes"] for line in manifest.values())
            folders.create(partial, size)
            with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
                [*pool.map(lambda name: self._copy_file(partial, name, manifest[name]), manifest)]
            folders.commit(partial, final, manifest)
        except Damaged as error:
            self.complete.discard(step)  # so that it is written again
            complain(f"checkpoint {self.url}/{final.name} is skipped: {error}")
            return None
        except OSError as error:
            raise UserError(f"{self.where}: {final} cannot be written ({error}): {remedy(error)}") from None
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        print(f"copied {self.url}/{final.name}, {size / 1e6:,.1f} MB, in {time.monotonic() - began:.1f} s")
        return state

    def _copy_file(self, partial: Path, name: str, line: Line) -> None:
        """Copy a file of a checkpoint to its place in `partial`."""
        pieces = (range(at, min(at + PIECE_READ, line["bytes"])) for at in range(0, line["bytes"], PIECE_READ))
        source = f"{partial.name.partition('.')[0]}/{name}"
        (partial / name).parent.mkdir(parents=True, exist_ok=True)
        if folders.write_file(partial / name, (self.store.read(source, span) for span in pieces)) != line:
            raise Damaged(f"{name} is damaged")

    def _read(self, step: int, sizes: Mapping[str, int]) -> tuple[dict[str, Line], dict[str, Any]]:
        """The manifest of a checkpoint in the mirror, whose files have the right sizes, and its state.json."""
        name = folders.path_of("", step).name
        try:
            manifest = json.loads(self.store.read(f"{name}/{MANIFEST}"))
            for file, line in manifest.items():
                if sizes.get(f"{name}/{file}") != line["bytes"] or ".." in Path(file).parts or Path(file).is_absolute():
                    raise Damaged(f"{file} is missing or damaged")
            state = self.store.read(f"{name}/state.json")
            if folders.new_digest(state).hexdigest() != manifest["state.json"][ALGORITHM]:
                raise Damaged("state.json is damaged")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Damaged(f"its manifest cannot be read ({error})") from None
        return manifest, json.loads(state)

    def _wait(self, patience: float) -> str:
        """Wait for the thread to copy the last checkpoint, for a time that grows with it; "" or why it is missing."""
        found = resuming.checkpoints_of(self.run.config.output_dir)
        if not found or not self.thread:
            return ""
        newest = max(found)
        size = sum(file.stat().st_size for file in found[newest].rglob("*"))
        self.finished.set()
        self.thread.join(patience + size / SLOWEST)
        if newest in self.complete:
            return ""
        return f"{found[newest].name} could not be copied ({self.problem or 'it takes too long'})"

    def _work(self) -> None:
        """Copy until the mirror has the last checkpoint, or the folder is no longer locked."""
        lower_priority()
        lock = Path(self.run.config.output_dir) / folder_lock.NAME
        while lock.exists():
            is_last = self.finished.is_set()
            try:
                self._copy_missing()
            except Exception as error:  # each client library has its own; the training goes on
                if not self.problem:
                    complain(
                        f"warning: {self.where} cannot be written ({failure_in_words(error)}): the training goes on, "
                        f"and the newest checkpoint is tried again every {BETWEEN_ATTEMPTS:.0f} s"
                    )
                self.problem = failure_in_words(error)
                self.store.reopen()
            else:
                if is_last:
                    return
            time.sleep(BETWEEN_ATTEMPTS if self.problem else POLL)

    def _copy_missing(self) -> None:
        """Copy the newest checkpoint, and before it the best one, if the mirror lacks them; remove old ones."""
        config = self.run.config
        found = resuming.checkpoints_of(config.output_dir)
        newest = max(found, default=None)
        if newest is None or newest in self.complete:
            return
        best = resuming.read_state(found[newest])["best_step"] if config.load_best_model_at_end else None
        if best in found and best not in {newest, *self.complete}:
            with contextlib.suppress(Damaged):  # the end of the run says so
                self._copy(best, found[best])
        self._copy(newest, found[newest])
        self._rotate(newest, best)
        if self.problem:
            complain(f"{self.where} has {found[newest].name}: it can be written again")
        self.problem = ""

    def _copy(self, step: int, path: Path) -> None:
        """Write the files of a checkpoint, then the log so far, then the manifest."""
        manifest = (path / MANIFEST).read_bytes()
        lines = json.loads(manifest)

        def send(name: str) -> None:
            self.store.write(f"{path.name}/{name}", verified_pieces(path, name, lines[name]))

        with ThreadPoolExecutor(FILES_AT_ONCE, initializer=lower_priority) as pool:
            [*pool.map(send, lines)]
        if (log := path.parent.parent / METRICS).exists():
            self.store.write(METRICS, [log.read_bytes()])
        self.store.write(f"{path.name}/{MANIFEST}", [manifest])
        self.complete.add(step)

    def _rotate(self, newest: int, best: int | None) -> None:
        """Remove what is older than the newest checkpoint and not among those to keep, also unfinished uploads."""
        sizes = self.store.sizes()
        older = sorted(step for step in self.complete if step <= newest)
        keep = {*older[-(self.run.config.save_total_limit or len(older)) :], best}
        for name in {name.partition("/")[0] for name in sizes if "/" in name}:
            match = folders.COMPLETE.fullmatch(name)
            if match and int(match[1]) < newest and int(match[1]) not in keep:
                self.complete.discard(int(match[1]))
                if f"{name}/{MANIFEST}" in sizes:
                    self.store.remove(f"{name}/{MANIFEST}")
                self.store.remove(name)


def complete_steps(sizes: Mapping[str, int]) -> set[int]:
    """The steps of the complete checkpoints of a mirror with these files."""
    found = (folders.COMPLETE.fullmatch(name.removesuffix(f"/{MANIFEST}")) for name in sizes if name.endswith(MANIFEST))
    return {int(match[1]) for match in found if match}


def verified_pieces(path: Path, name: str, line: Line) -> Iterator[bytes]:
    """The content of a checkpoint's file in pieces.

    Raises:
        Damaged: it differs from its line of the manifest, or is gone.
    """
    found = folders.new_digest()
    try:
        with (path / name).open("rb") as file:
            while piece := file.read(PIECE_WRITTEN):
                found.update(piece)
                yield piece
    except OSError as error:
        raise Damaged(
            f"{name} cannot be read ({error.strerror}); if newer checkpoints replaced it during its upload, raise "
            "--save_total_limit or --checkpointing_steps"
        ) from None
    if found.hexdigest() != line[ALGORITHM]:
        raise Damaged(f"{name} is damaged")
