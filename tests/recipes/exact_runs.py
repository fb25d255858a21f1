"""The runs that give the numbers in docs/exactness.md: their flags, and reference implementations for tests."""

from types import SimpleNamespace

import call_recipe
import runs
import torch
from torch.nn import functional as F
from toy_data import write_numbered, write_tuples

from shared.images.images import collate
from shared.optimization.optimizers import make_schedule
from shared.plan.batches import Plan
from shared.plan.draws import seed_dropout

BUDGETS = (48, 96, 576)  # rows x longest row, at most 12 x 48: a step has twelve, eight or one micro-batches
TWENTY_STEPS = ["--max_train_steps", 20, "--eval_steps", 20, "--logging_steps", 1, "--checkpointing_steps", "no"]
# The first step of SGD with Nesterov momentum moves the weights by 1.9 x learning rate x gradient; at this
# rate the move is so much larger than the weights that it gives nearly all digits of the gradient.
SGD_RATE = 100.0
ONE_STEP = [
    *("--optim", "sgd", "--learning_rate", SGD_RATE, "--weight_decay", 0, "--max_grad_norm", 0, "--warmup_steps", 0),
    *("--lr_scheduler_type", "constant", "--max_train_steps", 1, "--checkpointing_steps", "no"),
]
CLASS_WEIGHTS = (0.5, 2.5, 1.0, 3.7)
EPOCHS_ROWS, EPOCHS_BATCH = 23, 5  # on any number of processes, two epochs are nine steps of 5 rows and one of 1 row
IMAGE_STEPS = 20
# Crops, mirroring and mixing are on: their random draws must not depend on the number of processes either.
IMAGES = [
    *(*runs.TINY_IMAGES, "--max_train_steps", IMAGE_STEPS, "--eval_steps", IMAGE_STEPS, "--logging_steps", 1),
    *("--horizontal_flip", "--mixup", 0.2, "--cutmix", 1, "--max_grad_norm", 0),
]
GROWS = [
    *(*runs.TINY_IMAGES, "--lr_scheduler_type", "constant", "--warmup_steps", 2, "--logging_steps", 1),
    *("--ema_decay", 0.9, "--optim", "adamw", "--learning_rate", 0.002),
    *("--binary_cross_entropy", "--label_smoothing", 0.1, "--mixup", 0.2, "--train_image_size", 12),
    *("--stochastic_depth", 0.5, "--depths", 2, 1, "--repeated_augmentation", 2),
]


ALONE = SimpleNamespace(num_processes=1, process_index=0, is_fsdp2=False)  # stands in for an Accelerator


def nlp_runs(texts, folder):
    """The command lines of the NLP recipe's runs, by name."""
    tiny = [*texts, *runs.TINY]
    epochs = write_numbered("nlp", folder, EPOCHS_ROWS)
    # With 1e-3, some steps enlarge rounding errors a thousand times.
    bert = ["--model_name_or_path", runs.write_bert_with_dropout(folder / "bert", texts), "--learning_rate", 1e-4]
    return {
        **{f"gradient-{budget}": [*tiny, *ONE_STEP, "--max_tokens_per_micro_batch", budget] for budget in BUDGETS},
        **{f"adam-{budget}": [*tiny, *TWENTY_STEPS, "--max_tokens_per_micro_batch", budget] for budget in BUDGETS},
        "weighted": [*tiny, *ONE_STEP, "--class_weights", *CLASS_WEIGHTS, "--label_smoothing", 0.1],
        "dropout": [*tiny, *TWENTY_STEPS, *bert],
        "rows": [*tiny, *TWENTY_STEPS, "--no_packing"],
        "rows-dropout": [*tiny, *TWENTY_STEPS, *bert, "--no_packing"],
        "dropout-cut-otherwise": [*tiny, *TWENTY_STEPS, *bert, "--max_tokens_per_micro_batch", 48],
        "epochs": [
            *(*epochs, *runs.TINY, "--max_train_steps", "None", "--num_train_epochs", 2, "--eval_steps", "None"),
            # On some CPUs, Adam's default enlarges the rounding error of one embedding's gradient ten thousand times.
            *("--global_batch_size", EPOCHS_BATCH, "--logging_steps", 1, "--adam_epsilon", 1e-6),
        ],
        "evaluation": [*tiny, *bert, "--metric_name", *["accuracy", "macro_f1", "matthews_correlation", "roc_auc"]],
    }


def mlm_runs(texts):
    """The command lines of the MLM recipe's runs, by name. Those of many steps evaluate and export an average."""
    tiny = [*texts, *runs.TINY]
    average = [*tiny, *TWENTY_STEPS, "--ema_decay", 0.5]
    found = {"gradient": [*tiny, *ONE_STEP], "adam": average, "rows": [*average, "--no_packing"]}
    return found | {"one-micro-batch": [*average, "--max_tokens_per_micro_batch", 8192]}


def embedding_runs(texts, folder):
    """The command lines of the embeddings recipe's runs, by name."""
    files = write_tuples(texts, folder)
    bert = ["--model_name_or_path", runs.write_bert_with_dropout(folder / "bert", texts), "--learning_rate", 1e-3]
    pairs = [*files, *runs.TINY, "--text_column_names", "anchor", "positive"]
    tuples = [*files, *runs.TINY, "--text_column_names", "anchor", "positive", "negative", "negative_2"]
    tuples += ["--prompts", "find: ", "", "", "", "--max_length", 24, 48, 40, 32]
    every = ["--false_negative_margin", 0.1, "--symmetric", "--matryoshka_dims", 32, 8]
    every += ["--max_tokens_per_micro_batch", 144, "--kept_micro_batches", 2]
    scored = ["--label_column_name", "score", "--matryoshka_dims", 32, 8, "--kept_micro_batches", 2]
    return {
        "scored": [*pairs, *TWENTY_STEPS, *scored],
        "scored-in-one-pass": [*pairs, *TWENTY_STEPS, *scored, "--max_tokens_per_micro_batch", 100_000],
        "gradient": [*pairs, *ONE_STEP],
        "adam": [*pairs, *TWENTY_STEPS, "--corpus_file", files[1]],
        "static": [*pairs, *TWENTY_STEPS, "--static"],
        "rows": [*pairs, *TWENTY_STEPS, "--no_packing", "--max_tokens_per_micro_batch", 576],
        "dropout": [*tuples, *bert, *every, "--max_train_steps", 8, "--eval_steps", 8, "--logging_steps", 1],
    }


def vector(tensors):
    """All tensors by name as one vector, without the decoder's weight, which is tied to the embedding."""
    return torch.cat([t.flatten().double() for name, t in sorted(tensors.items()) if name != "decoder.weight"])


def gradient_of(model):
    return vector({name: p.grad for name, p in model.named_parameters()})


def assert_moved_by(outputs, before, expected):
    """Assert that the only step of each run, by its processes, has moved the weights `before` by this gradient."""
    for world, output in outputs.items():
        moved = runs.weights(output) - before
        assert runs.distance(moved / (-1.9 * SGD_RATE), expected) < 1e-6, f"{world} processes"


def train_images_in_one_process():
    """A second implementation of the image recipe, for one process: ({name: parameter}, {name: running statistic})."""
    recipe = runs.load_recipe("image_classification")
    config, train, _, augmentation = runs.prepared(recipe, IMAGES)
    model = call_recipe.with_dropout(recipe.build_model)(config, train.names).train()
    plan = Plan(
        num_samples=len(train), seed=0, global_batch_size=48, max_steps=IMAGE_STEPS, max_samples=12, num_epochs=None
    )
    decays = [p for p in model.parameters() if p.ndim > 1], [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": p, "weight_decay": decay} for p, decay in zip(decays, (5e-4, 0.0), strict=True)]
    optimizer = torch.optim.SGD(groups, lr=1.0, momentum=0.9, nesterov=True)
    schedule = make_schedule(config, IMAGE_STEPS)
    norms = [m for m in model.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    seen = {norm: [] for norm in norms}
    for norm in norms:
        norm.track_running_stats = False  # only the hook measures
        norm.register_forward_pre_hook(lambda norm, args: seen[norm].append(torch.var_mean(args[0], (0, 2, 3))))
    running = {norm: [norm.running_mean.clone(), norm.running_var.clone()] for norm in norms}
    for step in range(IMAGE_STEPS):
        assert len(plan.cut(step)) == 4
        for piece in plan.cut(step):
            batch = collate([train[i] for i in piece.samples])
            images, share = augmentation.training(piece, batch)
            own = F.one_hot(batch["labels"], 10)
            probabilities = share[:, None] * own + (1 - share[:, None]) * own.roll(1, 0)
            seed_dropout(torch.device("cpu"), 0, step, piece.index)
            logits = model(pixel_values=images).logits
            (F.cross_entropy(logits, probabilities, reduction="sum") / 48).backward()
        for norm, found in seen.items():
            for i, place in ((0, 1), (1, 0)):  # var_mean gives the variance first
                mean = torch.stack([statistic[place] for statistic in found]).mean(0).detach()  # equal micro-batches
                running[norm][i] = 0.9 * running[norm][i] + 0.1 * mean
            found.clear()
        for group in optimizer.param_groups:
            group["lr"] = schedule(step)
        optimizer.step()
        optimizer.zero_grad()
    names = {norm: name for name, norm in model.named_modules()}
    statistics = {
        f"{names[norm]}.running_{what}": pair[i]
        for norm, pair in running.items()
        for i, what in enumerate(("mean", "var"))
    }
    return dict(model.named_parameters()), statistics
