"""Resume with other numbers of processes within an epoch: each sample is used once, the weights equal one process's.

    python tests/campaigns/worlds.py --walks 3 --recipe nlp

A run of two epochs begins with 2 processes and resumes with 1, 3 and 2, all in the first epoch, after SIGTERM to one
process or SIGKILL to all. The samples are counted by the rows that enter the model. Dropout is on.
"""

import itertools
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import runs
import toy_data
from disturbed import STEPS, Launch, Table, flags_of, run_as_script

from shared.config import options

WORLDS = (2, 1, 3, 2)
GLOBAL_BATCH, EPOCHS = 12, 2
EPOCH = STEPS // EPOCHS  # steps
WAYS = ("SIGTERM", "SIGKILL")
ROWS = {  # recipe: the token ids of the rows of the model for a sample of its data
    "nlp": lambda text: [text[0]],
    "token_classification": lambda window: [window],
    "embeddings": lambda texts: [ids for ids, *_ in texts],
}


def changes():
    """Random steps of the first epoch at which the number of processes changes.

    A run stops up to two steps after a signal, so the last change leaves two steps, and one more for the last launch.
    """
    while True:
        found = sorted(random.sample(range(2, EPOCH - 2), len(WORLDS) - 1))
        if all(later - earlier > 2 for earlier, later in itertools.pairwise(found)):
            return found


def walk(way, recipe, flags, output, folder, row):
    """Run on each number of processes in WORLDS; return {step: [(launch, rows)]}, from its last launch."""
    fed = {}
    for number, (world, step) in enumerate(zip(WORLDS, [*changes(), None], strict=True)):
        with Launch(world, flags, output, folder / f"launch-{number}", [f"step-{step}"], recipe=recipe) as launch:
            if step is None:
                launch.succeed(row)
            else:
                launch.wait_for(f"step-{step}")
                if way == "SIGTERM":
                    # Not to the launcher: it passes the signal on too late, because steps take milliseconds.
                    [*launch.trainers(), launch.process][0].send_signal(signal.SIGTERM)
                    time.sleep(0.5)  # for the thread that receives the signal
                    launch.go(f"step-{step}")
                    launch.end()
                else:
                    runs.power_off(launch.process)
                if number:
                    launch.count(row)
            notes = launch.notes("step")
        fed |= {step: [] for step in {note["step"] for note in notes}}  # a repeated step counts once
        for note in notes:
            fed[note["step"]].append((number, note["rows"]))
    return fed


def assert_each_once(fed, expected):
    """Assert that each expected row entered the model once per epoch, and each launch trained in the first epoch."""
    assert sorted(fed) == list(range(1, STEPS + 1)), f"steps {sorted(fed)}"
    by = {number for step in range(1, EPOCH + 1) for number, _ in fed[step]}
    assert by == set(range(len(WORLDS))), f"only launches {by} trained in the first epoch"
    for epoch in range(EPOCHS):
        steps = range(epoch * EPOCH + 1, (epoch + 1) * EPOCH + 1)
        entered = Counter(tuple(ids) for step in steps for _, rows in fed[step] for ids in rows)
        assert entered == Counter(dict.fromkeys(expected, 1)), f"samples were repeated or missing in epoch {epoch}"


def campaign(folder, walks, recipe="nlp", ways=WAYS, seed=0):
    """Take `walks` walks with each way to end a launch."""
    random.seed(seed)
    data = toy_data.write_numbered(recipe, folder, GLOBAL_BATCH * EPOCH)
    bert = toy_data.write_encoder_with_dropout(folder / "bert", recipe, data)
    # With fewer micro-batches than processes, dropout would depend on the number of processes.
    flags = [*flags_of(data, bert), "--no_packing", "--micro_batches_per_step", 4]
    module = runs.load_recipe(recipe)
    train, *_ = module.load_data(options.parse(module.Config, list(map(str, flags))))
    assert len(train) == GLOBAL_BATCH * EPOCH
    of_samples = [[tuple(ids.tolist()) for ids in ROWS[recipe](train[i])] for i in range(len(train))]
    rows = {ids for sample in of_samples for ids in sample}
    assert len(rows) == sum(map(len, of_samples))
    with Launch(1, flags, folder / "alone", folder / "notes", recipe=recipe) as alone:
        alone.succeed()
    one = runs.weights_that_learn(folder / "alone")
    table, farthest = Table(f"{' → '.join(map(str, WORLDS))} processes, changed by"), 0.0
    for number in range(walks):
        for way in ways:
            output = folder / f"{way}-{number}"
            often = [*flags, "--checkpointing_steps", 1]
            with table.case(way) as row:
                fed = walk(way, recipe, often, output, folder / f"{way}-{number}-notes", row)
                assert_each_once(fed, rows)
                distance = runs.distance(runs.weights_that_learn(output), one)
                farthest = max(farthest, distance)
                assert distance < 1e-5, f"the weights differ by {distance:.1e}"
    table.remark = f"After {STEPS} steps the weights were at most {farthest:.1e} from those of one process, relative."
    return table


if __name__ == "__main__":
    run_as_script(__doc__, campaign, walks=3, recipe="nlp", seed=0)
