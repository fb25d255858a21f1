"""Everything around a recipe's loop: opening, resuming, logging, evaluating, saving and ending a run.

The methods of `TrainingRun` are in the order in which a recipe's `main` calls them.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Generic

import numpy as np
from torch import Tensor, nn

from shared.checkpoints.progress import BestBy
from shared.checkpoints.saving import Saver
from shared.config.options import AnyConfig
from shared.errors import Preempted, UserError, about
from shared.monitoring.evaluation import differing_scores
from shared.monitoring.hooks import Hook, Value
from shared.monitoring.log import Log
from shared.monitoring.monitor import Monitor
from shared.optimization.optimizers import inner, require_all
from shared.plan import draws
from shared.plan.batches import MicroBatch
from shared.plan.loading import Loader
from shared.processes import collectives, signals, starting
from shared.run.export import Export
from shared.run.launch_card import launch_card
from shared.run.resume import begin_run, clean_up, open_run, refuse_another_plan, refuse_changed_data
from shared.run.warm_up import check_loss, run_warm_up_pass

Results = dict[str, float]


class Ddp:
    """Each process has the whole model. A hook may give `run.strategy` a subclass when the run is `opened`."""

    name = "DDP"
    saver: type[Saver] = Saver
    equal_counts = False
    """Whether every process must compute the same number of micro-batches, because a forward pass communicates."""

    def place(self, accelerator: Any, model: nn.Module) -> None:
        """Move a model to the device, before its optimizer is made. Every process calls each of these methods."""
        model.to(accelerator.device)

    def wrap(self, accelerator: Any, model: nn.Module, optimizer: Any) -> tuple[Any, Any]:
        """The model and its optimizer as the loop uses them."""
        collectives.wait_for_all(accelerator)  # each machine prepares its data by itself
        return accelerator.prepare(model, optimizer)

    def weights(self, accelerator: Any, model: nn.Module) -> dict[str, Tensor]:
        """The whole state dict of the model, to export it."""
        return accelerator.get_state_dict(model)


class TrainingRun(Generic[AnyConfig]):
    """A run of a recipe; each process has one.

    As a context manager it connects the processes and locks the output folder. When the block ends, even by an error,
    the loader's workers end, the folder is unlocked, and the process can start another run. Attributes:

        accelerator: the `Accelerator`, created after all checks of the launch.
        config: the resolved settings, with precision and global batch size.
        progress: the position of the run.
        checkpoint: the one from which this start continues; None if the run begins.
        card: further rows of the launch card.
        hooks: those of the settings, and those given to `prepare`.
        closing: what a hook must do when the block ends, even by an error.
        strategy: how the processes hold the model.
        export: how the model is exported.
        plan, loader, model, optimizer, compute_loss: set by `prepare`, for hooks.
        evaluate: set by `start`; a hook may replace it when the run is `prepared`.
        launch_card: the printed summary of the run, set by `start`.
        notes: the paragraphs for the model card, set by `finish`.
        finished: whether the folder holds this run with its exported model; then only its data are left to check.

    Raises:
        UserError: a setting, the folder or the launch is wrong or would change the result of the run.
    """

    accelerator: Any
    config: AnyConfig

    def __init__(self, config: AnyConfig) -> None:
        self.config = config
        self.hooks: list[Hook] = config.hooks()
        self.strategy, self.export = Ddp(), Export()
        self.card: dict[str, str] = {}
        self.closing = contextlib.ExitStack()

    def __enter__(self) -> "TrainingRun[AnyConfig]":
        with self.closing as stack:
            stack.enter_context(starting.freed_after())
            self.accelerator = starting.start(self.config)
            stack.enter_context(draws.seeded(self.accelerator.device, self.config.seed))
            self._tell(Hook.opened, self)
            opened = open_run(self.accelerator, self.config, self.hooks)
            self.config, self.progress, self.checkpoint, self.finished = opened
            self.closing = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self.closing.__exit__(*error)

    @property
    def results(self) -> Results:
        """The results of the last evaluation; empty before the first one."""
        return self.progress.results

    def check_data(self, *datasets: Any) -> None:
        """Refuse data sets that differ between machines or have changed since the run began.

        Of a finished run, this prints the result, and does what an earlier start did not do after the export.

        Raises:
            UserError: names the difference.
        """
        refuse_changed_data(self.accelerator, self.progress, *datasets)
        if not self.finished:
            return
        folder = Path(self.config.output_dir)
        self.accelerator.print(f"{folder} holds this run, finished: {self.results}")
        if not self.config.dry_run:  # what an earlier start did not do, or was killed before
            collectives.on_writers(self.accelerator, self.config, lambda: clean_up(folder))
            self._tell(Hook.exported, folder / "model")
            if self.accelerator.is_main_process:
                self._tell(Hook.ended, self)

    def prepare(
        self,
        model: nn.Module,
        make_optimizer: Callable[[nn.Module, AnyConfig], Any],
        loader: Loader,
        compute_loss: Callable[[MicroBatch, Any], Tensor],
        *hooks: Hook,
    ) -> tuple[Any, Any, list[nn.Parameter]]:
        """Wrap the model for distributed training and make its optimizer; return both, and the model's parameters.

        Args:
            model: on any device. It is set to training mode; to train with a part in evaluation mode, set that
                afterwards.
            make_optimizer: called with the model, once `strategy` has placed it, and the settings. It returns an
                optimizer; several become one by `ChainedOptimizers` (shared/models/optimizers.py).
            loader: gives the micro-batches; its plan is the run's.
            compute_loss: returns a micro-batch's share of the mean loss of its global batch. It reads the model from
                the variable to which the recipe assigns the wrapped model, because it is called before and after that.
            hooks: those of the recipe's task, in addition to those of the run.

        Raises:
            UserError: see `refuse_another_plan`, `check_loss` and `require_all`.
        """
        self.plan, self.loader = loader.plan, loader
        refuse_another_plan(self.config, self.progress, self.plan, self.checkpoint)
        self.plan.first_processes = self.progress.first_processes
        self.plan.equal_counts |= self.strategy.equal_counts
        self.hooks += hooks
        self.closing.callback(loader.close)
        self.compute_loss = lambda micro_batch: compute_loss(*loader.one(micro_batch))
        model.train()
        self._tell(Hook.given, self, model)
        self.strategy.place(self.accelerator, model)
        averaged = [buffer for hook in self.hooks for buffer in hook.averaged_buffers(model)]
        check_loss(self.accelerator, model, self.plan, self.compute_loss, averaged)
        self._tell(Hook.placed, self, model)
        optimizer = make_optimizer(model, self.config)
        require_all(optimizer, model)
        self.model, self.optimizer = self.strategy.wrap(self.accelerator, model, optimizer)
        return self.model, self.optimizer, list(self.model.parameters())

    def start(
        self,
        evaluate: Callable[[], Results],
        best_by: BestBy,
        *,
        lengths: Any = None,
        card: Mapping[str, object],
    ) -> None:
        """Run the warm-up pass, load the checkpoint, print the launch card and start to log; call it after `prepare`.

        Args:
            evaluate: returns the scores on the validation data; {} if a signal interrupted it.
            best_by: the score that selects the best model.
            lengths: int [N], real tokens of each sample, or [N, k] if a sample has k sequences; None if samples are
                not sequences.
            card: the recipe's own rows of the launch card.

        Raises:
            UserError: the model does not fit the checkpoint or the memory, or the loss does not depend on all of its
                parameters.
        """
        plan, accelerator, model = self.plan, self.accelerator, self.model
        self.evaluate, self._best_by = evaluate, best_by
        self.lengths = lengths if lengths is None else np.asarray(lengths)
        self._tell(Hook.prepared, self)
        run_warm_up_pass(accelerator, model, lambda: self.compute_loss(plan.micro_batches(0)[0]))
        self.saver = self.strategy.saver(accelerator, self.config, plan)
        if self.checkpoint:
            self.saver.load(self.checkpoint)
        seed = partial(draws.seed_update, accelerator.device, self.config.seed)
        inner(self.optimizer).register_step_pre_hook(lambda *_: seed(self.progress.step))
        self._tell(Hook.loaded, self)
        self.launch_card = launch_card(self, {**card, **self.card})
        accelerator.print(self.launch_card)
        if self.config.dry_run:
            return
        begin_run(accelerator, self.config, self.progress)
        self._tell(Hook.begun, self)
        self._log = Log(accelerator, Path(self.config.output_dir), self.progress.step, plan.total_steps)
        self.monitor = Monitor(accelerator, self.lengths, self.progress.monitor, self.hooks)
        self._signals = signals.Exchange(accelerator)

    def steps(self) -> Iterator[int]:
        """The remaining steps, starting at the checkpoint's; fewer if the run stops early, none in a dry run.

        An evaluation that failed or was interrupted by a signal in an earlier start is made first.
        """
        if self.config.dry_run:
            return
        self.progress.evaluation_owed &= self.plan.due(self.config.eval_steps, self.progress.step - 1)
        if self.progress.evaluation_owed:
            self._record_evaluation()
        for step in range(self.progress.step, self.plan.total_steps):
            if self.progress.out_of_patience(self.config.early_stopping_patience):
                return
            yield step

    def count(self, micro_batch: MicroBatch, loss: Tensor, parts: Mapping[str, Tensor] | None = None) -> None:
        """Count a micro-batch that went through the model.

        Args:
            micro_batch: with its place in the step.
            loss: its share of the step's mean, on the device.
            parts: the same for parts of the loss; each is logged as `loss_NAME`. Every micro-batch has the same names.
        """
        self.monitor.add(micro_batch, loss, parts)
        self._tell(Hook.counted, micro_batch)

    def end_step(self, skipped: Tensor, grad_norm: Tensor, learning_rate: float) -> None:
        """Count a step, and log if --logging_steps is due.

        Args:
            skipped: 1.0 if the update was skipped, else 0.0; on the device.
            grad_norm: L2 norm of the gradients before clipping, on the device.
            learning_rate: the learning rate of this step.

        Raises:
            UserError: the gradients of ten steps in a row were not finite, or differ between the processes; or
                `set_learning_rate` was not called with this rate.
        """
        self._tell(Hook.updated, grad_norm)
        self.monitor.end_step(skipped)
        self._tell(Hook.step_ended)
        self.progress.step += 1
        self.progress.learning_rate = learning_rate
        if self.plan.due(self.config.logging_steps, self.progress.step - 1):
            of_groups = [(group["lr"], group.get("lr_scale", 1.0)) for group in self.optimizer.param_groups]
            is_set = "rates_set" in vars(inner(self.optimizer))
            if not is_set or any(rate != learning_rate * scale for rate, scale in of_groups):
                raise UserError(
                    f"run.end_step got a learning rate of {learning_rate}, and set_learning_rate did not set it: call "
                    "it with the same rate at the start of each step, after any change of lr_scale"
                )
            self._write(self.monitor.read(float(grad_norm)) | {"learning_rate": learning_rate})
            self.monitor.refuse_skipped_updates(self.config.output_dir)

    def evaluate_if_due(self) -> None:
        """Evaluate and log the scores if --eval_steps is due."""
        if self.plan.due(self.config.eval_steps, self.progress.step - 1):
            self._record_evaluation()

    def save_if_due(self) -> None:
        """Save a checkpoint if --checkpointing_steps is due, the run stops early, or a process received a signal.

        Raises:
            Preempted: after a signal, once the checkpoint is complete.
            UserError: the checkpoint could not be saved, and the run ends.
        """
        preempted = signals.must_end(self._signals)
        self.saver.poll()
        if preempted or self.saver.is_due(self.progress):
            self._save()
        if preempted:
            self.saver.finish()
            signals.mark_saved(self.accelerator, self.config.output_dir, self.progress.step)
            self._close()  # after the checkpoint, because an upload may take longer than the scheduler allows
            collectives.wait_for_all(self.accelerator)  # the launcher ends all processes after the first exit
            raise Preempted

    def finish(self, model: nn.Module, processor: Any = None, note: str = "") -> Results:
        """Wait for the last checkpoint, and export the model.

        Args:
            model: the model to export.
            processor: its tokenizer or image processor, which has `save_pretrained`; None: there is none.
            note: a paragraph for the model card, in addition to those of the hooks.

        Returns:
            The last evaluation; {} after a dry run.

        Raises:
            UserError: the checkpoint or the model could not be written.
        """
        if self.config.dry_run:
            return {}
        self.saver.finish()
        signals.all_saved()
        self.monitor.refuse_skipped_updates(self.config.output_dir, self.progress.step)
        self.saver.load_best(self.progress)
        self._tell(Hook.before_export, model)
        self.notes = [text for text in (note, *(hook.note for hook in self.hooks)) if text]
        self.export.write(self, model, processor)
        self._tell(Hook.exported, Path(self.config.output_dir) / "model")
        digests = {"data": " ".join(self.progress.data)} if self.progress.data else {}  # there may be no checkpoint
        self._write({**self.monitor.summary(self.progress.total_seconds()), **digests})
        if self.accelerator.is_main_process:
            self._tell(Hook.ended, self)
        self._close()
        return self.progress.results

    def _tell(self, moment: Callable[..., None], *values: object) -> None:
        """Call a method of `Hook` on each hook."""
        for hook in self.hooks:
            getattr(hook, moment.__name__)(*values)

    def _write(self, values: Mapping[str, Value]) -> None:
        self._log.write(self.progress.step, values)
        self._tell(Hook.logged, self.progress.step, values)

    def _close(self) -> None:
        self._log.bar.close()
        self._tell(Hook.closed)

    def _save(self) -> None:
        with self.monitor.timed("checkpoint"):
            self._tell(Hook.weights_are_read)
            self.saver.save(self.progress, self.monitor.state())

    def _record_evaluation(self) -> None:
        together = self.accelerator.num_processes == 1  # else others may be in a collective call of the evaluation
        try:
            with self.monitor.timed("evaluation"):
                self._tell(Hook.weights_are_read)
                found = self.evaluate()
                with about("evaluate must return numbers by their names, or {} after a signal"):
                    scores = {str(name): float(value) for name, value in found.items()}
                results, *others = collectives.gather(self.accelerator, scores)
            together = True
            if problem := self._best_by.missing(results) or differing_scores(self._best_by, results, others):
                kept = f"the checkpoint after step {self.progress.step} is kept"
                raise UserError(f"{problem}; {kept}: correct evaluate, and start again")
        except Exception:
            if together and not self.progress.evaluation_owed:  # after a resume, this checkpoint exists
                self.progress.evaluation_owed = True
                self._save()
                self.saver.finish()
            raise
        at_end = not self.plan.due_without_end(self.config.eval_steps, self.progress.step - 1)
        if self.progress.record(results, self._best_by, at_end):
            self._write(results)
