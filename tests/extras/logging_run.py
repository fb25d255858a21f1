"""A run that only logs, for tests of trackers, curves and the time report."""

from types import SimpleNamespace

from shared.extras.trackers import Trackers
from shared.monitoring.log import Log, cut_metrics
from shared.options.extra_options import ExtraOptions


class LoggingRun(SimpleNamespace):
    """A stand-in for a `TrainingRun` that has begun at `step`."""

    def __init__(self, accelerator, folder, step=0, run_id=None, hooks=(), **settings):
        cut_metrics(folder / "metrics.jsonl", step)
        config = ExtraOptions(output_dir=str(folder), **settings)
        progress = SimpleNamespace(run_id=run_id, step=step)
        super().__init__(accelerator=accelerator, config=config, progress=progress, hooks=[*hooks, Trackers()], card={})
        for hook in self.hooks:
            hook.loaded(self)
        self.recorder = Log(accelerator, folder, step, 1000)

    def log(self, step, values):
        self.recorder.write(step, values)
        for hook in self.hooks:
            hook.logged(step, values)

    def finish(self, step, summary):
        self.log(step, summary)
        for hook in self.hooks:
            hook.ended(self)
        self.close()

    def close(self):
        self.recorder.close()
        for hook in self.hooks:
            hook.closed()
