"""Flags of timm, transformers' Trainer and its example scripts that people often give, with those of the recipes."""

from collections.abc import Container

LEAVE_OUT = ": leave it out"
PREDICT = "after training, python -m shared.predict OUTPUT_DIR FILE predicts a file and computes its scores" + LEAVE_OUT
NEVER_DROPPED = "every sample is trained on" + LEAVE_OUT
SIMILAR_LENGTH = "micro-batches always hold rows of similar length" + LEAVE_OUT
LIMITS = "evaluation uses the batch limits of training" + LEAVE_OUT
LAUNCHER = "give it to accelerate launch, as in accelerate_configs" + LEAVE_OUT

# {foreign name: advice, as our flag or as a sentence}. The first advice whose flags the recipe has is printed.
EQUIVALENTS: dict[str, tuple[str, ...]] = {
    # Data
    **dict.fromkeys(("data", "data_dir", "train_path", "train_data"), ("--train_dir FOLDER", "--train_file FILE")),
    **dict.fromkeys(("val_file", "eval_file"), ("--validation_file FILE",)),
    **dict.fromkeys(("test_file", "predict_file", "do_predict", "evaluate_only", "eval_only"), (PREDICT,)),
    "task_name": ("--dataset_name nyu-mll/glue --dataset_config_name NAME",),
    "val_split": ("--validation_split_percentage N",),
    **dict.fromkeys(("max_seq_length", "block_size"), ("--max_length N",)),
    **dict.fromkeys(("workers", "num_workers"), ("--dataloader_num_workers N",)),
    # Batches
    **dict.fromkeys(
        ("batch_size", "train_batch_size"), ("--global_batch_size N, the samples per step on all processes together",)
    ),
    **dict.fromkeys(("grad_accum_steps", "accum_steps"), ("--gradient_accumulation_steps N",)),
    **dict.fromkeys(("per_device_eval_batch_size", "eval_batch_size", "validation_batch_size"), (LIMITS,)),
    "auto_find_batch_size": ("--auto_micro_batch",),
    "group_by_length": (SIMILAR_LENGTH,),
    **dict.fromkeys(("drop_last", "dataloader_drop_last"), (NEVER_DROPPED,)),
    # Optimization
    **dict.fromkeys(("epochs", "num_epochs"), ("--num_train_epochs N",)),
    **dict.fromkeys(("max_steps", "num_steps"), ("--max_train_steps N",)),
    **dict.fromkeys(("opt", "optimizer"), ("--optim NAME",)),
    **dict.fromkeys(("lr", "lr_base"), ("--learning_rate RATE",)),
    "wd": ("--weight_decay SHARE",),
    **dict.fromkeys(("sched", "scheduler", "lr_scheduler"), ("--lr_scheduler_type NAME",)),
    "num_warmup_steps": ("--warmup_steps N",),
    **dict.fromkeys(("clip_grad", "grad_clip"), ("--max_grad_norm NORM",)),
    **dict.fromkeys(("smoothing", "label_smoothing_factor"), ("--label_smoothing SHARE",)),
    # Images and adapters
    **dict.fromkeys(("aa", "auto_augment"), ("--rand_augment N, or --trivial_augment",)),
    "reprob": ("--random_erasing SHARE",),
    **dict.fromkeys(("img_size", "input_size"), ("--image_size N",)),
    **dict.fromkeys(("model_ema", "model_ema_decay"), ("--ema_decay SHARE",)),
    **dict.fromkeys(("layer_decay", "llrd"), ("--layer_lr_decay FACTOR",)),
    **dict.fromkeys(("use_peft", "use_lora", "lora_r"), ("--lora_rank N",)),
    # Models and precision
    **dict.fromkeys(("model", "model_name", "pretrained"), ("--model_name_or_path NAME",)),
    "tokenizer_name": ("the tokenizer is that of --model_name_or_path" + LEAVE_OUT,),
    **dict.fromkeys(("bf16", "fp16", "amp", "precision"), ("--mixed_precision bf16, fp16 or no",)),
    "compile": ("--torch_compile",),
    # The run
    **dict.fromkeys(("output", "out_dir", "save_dir"), ("--output_dir FOLDER",)),
    "overwrite_output_dir": ("the run of an existing folder is resumed, never overwritten: name another --output_dir",),
    "resume": ("the same command resumes its run; --resume_from_checkpoint PATH resumes from a certain checkpoint",),
    **dict.fromkeys(("do_train", "do_eval"), ("a recipe trains and evaluates" + LEAVE_OUT,)),
    **dict.fromkeys(("save_steps", "save_strategy"), ("--checkpointing_steps N, epoch or no",)),
    **dict.fromkeys(("eval_strategy", "evaluation_strategy", "eval_interval"), ("--eval_steps N",)),
    "log_interval": ("--logging_steps N",),
    **dict.fromkeys(("wandb", "log_wandb", "with_tracking"), ("--report_to wandb",)),
    "patience": ("--early_stopping_patience N --metric_for_best_model NAME",),
    **dict.fromkeys(("use_cpu", "no_cuda", "local_rank", "deepspeed", "fsdp"), (LAUNCHER,)),
}


def equivalent(name: str, fields: Container[str]) -> str | None:
    """Advice on flag `name` of another program for a recipe with these fields; None if the flag is unknown."""
    for text in EQUIVALENTS.get(name, ()):
        words = {word.strip(",.:;").removeprefix("--") for word in text.split() if word.startswith("--")}
        if all(word in fields for word in words):
            return f"use {text}" if text.startswith("--") else text
    return None
