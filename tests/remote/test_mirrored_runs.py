"""Runs with a mirror in S3 survive the loss of their machine during uploads."""

import json
import random
import shutil
import signal

import pytest
import runs
import xxhash
from s3_server import S3Server

RECIPE = runs.ROOT / "tests/remote/mirrored_recipe.py"
STEPS = 8  # of the tiny runs
FLAGS = [*runs.TINY, "--logging_steps", 1, "--checkpointing_steps", 1]
MIRROR = ["--mirror_checkpoints", "s3://bucket/run"]


def require_intact(server):
    """Check that each checkpoint that has a manifest is complete; return the steps of these."""
    names, client, steps = server.names("bucket"), server.client(), []
    for name in sorted(name for name in names if name.endswith("manifest.json")):
        folder = name.removesuffix("manifest.json")
        manifest = json.loads(client.get_object(Bucket="bucket", Key=name)["Body"].read())
        for file, line in manifest.items():
            content = client.get_object(Bucket="bucket", Key=folder + file)["Body"].read()
            assert {"bytes": len(content), "xxh3_128": xxhash.xxh3_128_hexdigest(content)} == line
        steps.append(int(folder.rpartition("step_")[2].strip("/")))
    return steps


class Killing:
    """Answers of a server that kills a run at its Nth upload, before or after the server has stored the file."""

    def __init__(self):
        self.processes, self.left, self.before, self.kills = [], 0, False, 0

    def begun(self, processes):
        self.processes = processes

    def __call__(self, method, path, key):
        if not (method == "PUT" and "/step_" in path and self.left):
            return None
        self.left -= 1
        if self.left:
            return None
        self.kills += 1
        for process in self.processes:
            process.kill()
        return (503, "SlowDown") if self.before else None


def survive(processes, expected, texts, folder, numbers, rng, keep):
    """Kill a run at the uploads with these numbers, each time with the loss of its folder; require the right end.

    Returns the number of kills, and how many starts continued from the mirror.
    """
    output, killing, resumed, before = folder / "run", Killing(), 0, []
    flags = [*texts, *FLAGS, *MIRROR, "--save_total_limit", keep, "--output_dir", output]
    with S3Server("bucket", answer=killing) as server:
        for number in (*numbers, 0):
            killing.left, killing.before, kills = number, rng.random() < 0.5, killing.kills
            codes, text = runs.run_forked(processes, RECIPE, flags, folder, begun=killing.begun, **server.environment)
            killed = killing.kills > kills
            assert codes == [-signal.SIGKILL if killed else 0] * processes, text
            if before:
                assert f"resumed from step_{before[-1]:08d}" in text or killed, text
                resumed += f"copied s3://bucket/run/step_{before[-1]:08d}" in text
            now = require_intact(server)
            assert max(now, default=0) >= max(before, default=0), "the newest complete one is never lost"
            before = now
            if not killed:
                assert runs.exported(output) == expected
                assert [line["step"] for line in runs.training_lines(output)] == [*range(1, STEPS + 1)]
                assert len(now) <= keep
                assert now[-1] == STEPS
            shutil.rmtree(output)
    return killing.kills, resumed


@pytest.fixture(scope="module")
def expected(texts, alone, tmp_path_factory):
    """The weights of an uninterrupted run without a mirror: {processes: bytes}."""
    whole = runs.run_many(2, {"whole": [*texts, *FLAGS]}, tmp_path_factory.mktemp("whole"))["whole"]
    return {1: runs.exported(alone), 2: runs.exported(whole)}


@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_killed_in_an_upload_without_its_folder_ends_with_the_bytes_of_an_uninterrupted_one(
    texts, expected, tmp_path, processes
):
    rng = random.Random(processes)
    number = rng.randint(5, 8)  # an upload has four files besides the log, so one checkpoint is complete
    assert survive(processes, expected[processes], texts, tmp_path, [number], rng, keep=STEPS) == (1, 1)


@pytest.mark.campaign
@pytest.mark.parametrize("processes", [1, 2])
def test_runs_killed_in_uploads_many_times(texts, expected, tmp_path, processes):
    rng, kills = random.Random(processes), 0
    for count in range(5):
        (folder := tmp_path / f"{count}").mkdir()
        numbers = [rng.randint(1, 12) for _ in range(4)]
        kills += survive(processes, expected[processes], texts, folder, numbers, rng, keep=2)[0]
    assert kills > 10
