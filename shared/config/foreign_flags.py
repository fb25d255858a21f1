"""Flags of timm, transformers' Trainer and its example scripts, with the equivalent flags of the recipes."""

from collections.abc import Container

from shared.config.removed import FORMER_DEFAULTS

# For recipes whose models shared/predict.py accepts: classifiers and taggers, and encoders of embeddings.
PREDICT = (
    "after training, python -m shared.predict OUTPUT_DIR FILE predicts a file and scores it by --label_column_name: "
    "leave it out",
    "after training, python -m shared.predict OUTPUT_DIR FILE computes the embeddings of --text_column_names: "
    "leave it out",
)
EVALUATE = (
    "python -m shared.predict OUTPUT_DIR evaluates a trained model by --label_column_name: leave it out",
    "python -m shared.predict OUTPUT_DIR evaluates the embeddings of --text_column_names: leave it out",
)

# {foreign name: advice, as our flag or as a sentence}. The first advice whose flags the recipe has is printed.
EQUIVALENTS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(FORMER_DEFAULTS, ("this setting was removed: leave it out",)),
    # Data
    "data": ("--dataset_name NAME, or --train_dir FOLDER", "--dataset_name NAME, or --train_file FILE"),
    "data_dir": ("--train_dir FOLDER", "--train_file FILE, or --dataset_name FOLDER"),
    "dataset": ("--dataset_name NAME",),
    "dataset_config": ("--dataset_config_name NAME",),
    "task_name": ("--dataset_name nyu-mll/glue --dataset_config_name NAME",),
    "train_path": ("--train_dir FOLDER", "--train_file FILE"),
    "train_data": ("--train_dir FOLDER", "--train_file FILE"),
    "val_file": ("--validation_file FILE",),
    "eval_file": ("--validation_file FILE",),
    "test_file": (*PREDICT, "--validation_file FILE"),
    "predict_file": PREDICT,
    "val_dir": ("--validation_dir FOLDER",),
    "val_split": ("--validation_split_percentage N",),
    "text_column": ("--text_column_names COLUMN", "--text_column_name COLUMN"),
    "label_column": ("--label_column_name COLUMN",),
    "image_column": ("--image_column_name COLUMN",),
    "max_seq_length": ("--max_length N",),
    "block_size": ("--max_length N",),
    "pad_to_max_length": (
        "rows are padded to the longest row of their micro-batch, and --max_length N truncates them: leave it out",
    ),
    "num_workers": ("--dataloader_num_workers N",),
    "workers": ("--dataloader_num_workers N",),
    "preprocessing_num_workers": ("prepared data is cached: leave it out",),
    "overwrite_cache": ("outdated prepared data is never used: leave it out",),
    # Batches
    "batch_size": ("--global_batch_size N, the samples per step on all processes together",),
    "train_batch_size": ("--global_batch_size N, the samples per step on all processes together",),
    "per_gpu_train_batch_size": ("--per_device_train_batch_size N",),
    "grad_accum_steps": ("--gradient_accumulation_steps N",),
    "accum_steps": ("--gradient_accumulation_steps N",),
    "auto_find_batch_size": ("--auto_micro_batch",),
    **dict.fromkeys(
        ("per_device_eval_batch_size", "per_gpu_eval_batch_size", "eval_batch_size", "validation_batch_size"),
        (
            "evaluation uses the batch limits of training, --max_tokens_per_micro_batch and "
            "--per_device_train_batch_size: leave it out",
            "evaluation uses the batch limit of training, --per_device_train_batch_size: leave it out",
        ),
    ),
    "eval_accumulation_steps": ("evaluation stores predictions, not logits: leave it out",),
    "group_by_length": ("micro-batches always hold rows of similar length: leave it out",),
    "length_column_name": ("micro-batches always hold rows of similar length: leave it out",),
    "drop_last": ("every sample is trained on: leave it out",),
    "dataloader_drop_last": ("every sample is trained on: leave it out",),
    # Optimization
    "epochs": ("--num_train_epochs N",),
    "num_epochs": ("--num_train_epochs N",),
    "max_steps": ("--max_train_steps N",),
    "num_steps": ("--max_train_steps N",),
    "opt": ("--optim NAME",),
    "optimizer": ("--optim NAME",),
    "lr": ("--learning_rate RATE",),
    "lr_base": ("--learning_rate RATE",),
    "wd": ("--weight_decay SHARE",),
    "momentum": ("sgd and lars have a momentum of 0.9, muon of 0.95: leave it out",),
    "beta1": ("--adam_beta1 SHARE",),
    "beta2": ("--adam_beta2 SHARE",),
    "opt_betas": ("--adam_beta1 SHARE --adam_beta2 SHARE",),
    "opt_eps": ("--adam_epsilon NUMBER",),
    "adam_eps": ("--adam_epsilon NUMBER",),
    "sched": ("--lr_scheduler_type NAME",),
    "scheduler": ("--lr_scheduler_type NAME",),
    "lr_scheduler": ("--lr_scheduler_type NAME",),
    "num_warmup_steps": ("--warmup_steps N",),
    "warmup_epochs": ("--warmup_ratio SHARE",),
    "clip_grad": ("--max_grad_norm NORM",),
    "grad_clip": ("--max_grad_norm NORM",),
    "label_smoothing_factor": ("--label_smoothing SHARE",),
    "smoothing": ("--label_smoothing SHARE",),
    # Images
    "hflip": ("--horizontal_flip",),
    "aa": ("--rand_augment N, or --trivial_augment",),
    "auto_augment": ("--rand_augment N, or --trivial_augment",),
    "reprob": ("--random_erasing SHARE",),
    "mixup_alpha": ("--mixup ALPHA",),
    "cutmix_alpha": ("--cutmix ALPHA",),
    "img_size": ("--image_size N",),
    "input_size": ("--image_size N",),
    "scale": ("--min_crop_area SHARE",),
    "model_ema": ("--ema_decay SHARE",),
    "model_ema_decay": ("--ema_decay SHARE",),
    "sync_bn": ("--sync_batchnorm",),
    "pretrained": (
        "--model_name_or_path NAME, which is pretrained without --from_scratch",
        "--model_name_or_path NAME",
    ),
    "linear_probe": ("--freeze_backbone",),
    "freeze_layers": ("--freeze NAMES",),
    "layer_decay": ("--layer_lr_decay FACTOR",),
    "llrd": ("--layer_lr_decay FACTOR",),
    "use_peft": ("--lora_rank N",),
    "use_lora": ("--lora_rank N",),
    "lora_r": ("--lora_rank N",),
    "lora_target_modules": ("--lora_targets NAMES",),
    "ignore_mismatched_sizes": ("a head of another size is always replaced by a new one: leave it out",),
    # Models
    "model": ("--model_name_or_path NAME",),
    "model_name": ("--model_name_or_path NAME",),
    "tokenizer_name": ("the tokenizer is that of --model_name_or_path: leave it out",),
    "config_name": ("the sizes of a new model have flags of their own, see --help",),
    # Precision
    "bf16": ("--mixed_precision bf16",),
    "fp16": ("--mixed_precision fp16",),
    "amp": ("--mixed_precision bf16, or fp16",),
    "amp_dtype": ("--mixed_precision bf16, or fp16",),
    "precision": ("--mixed_precision bf16, fp16 or no",),
    "tf32": ("matrix products on a GPU use TF32, except with --deterministic: leave it out",),
    "grad_checkpointing": ("--gradient_checkpointing",),
    "torchcompile": ("--torch_compile",),
    "compile": ("--torch_compile",),
    "full_determinism": ("--deterministic",),
    "data_seed": ("--seed N",),
    # The run
    "output": ("--output_dir FOLDER",),
    "out_dir": ("--output_dir FOLDER",),
    "save_dir": ("--output_dir FOLDER",),
    "overwrite_output_dir": ("the run of an existing folder is resumed, never overwritten: name another --output_dir",),
    "resume": ("the same command resumes its run; --resume_from_checkpoint PATH resumes from a certain checkpoint",),
    "experiment": ("--run_name NAME",),
    "do_train": ("a recipe trains and evaluates: leave it out",),
    "do_eval": ("a recipe trains and evaluates: leave it out",),
    "do_predict": PREDICT,
    **dict.fromkeys(("evaluate_only", "eval_only", "predict_only"), EVALUATE),
    "save_steps": ("--checkpointing_steps N",),
    "save_strategy": ("--checkpointing_steps N, epoch or no",),
    "checkpoint_hist": ("--save_total_limit N",),
    "eval_strategy": ("--eval_steps N, or leave it out to evaluate every epoch",),
    "evaluation_strategy": ("--eval_steps N, or leave it out to evaluate every epoch",),
    "eval_interval": ("--eval_steps N",),
    "eval_metric": ("--metric_for_best_model NAME",),
    "metric": ("--metric_name NAME",),
    "log_interval": ("--logging_steps N",),
    "logging_strategy": ("--logging_steps N",),
    "logging_dir": ("trackers and metrics.jsonl are in --output_dir: leave it out",),
    "log_wandb": ("--report_to wandb",),
    "wandb": ("--report_to wandb",),
    "with_tracking": ("--report_to NAME",),
    "patience": ("--early_stopping_patience N --metric_for_best_model NAME",),
    "hub_token": ("set HF_TOKEN, or run `hf auth login`: leave it out",),
    "push_to_hub_model_id": ("--hub_model_id NAME",),
    # The launcher
    "use_cpu": ("give --cpu to accelerate launch, or use accelerate_configs/cpu.yaml: leave it out here",),
    "no_cuda": ("give --cpu to accelerate launch, or use accelerate_configs/cpu.yaml: leave it out here",),
    "local_rank": ("the launcher sets it for each process: leave it out",),
    "deepspeed": ("give accelerate_configs/fsdp.yaml to accelerate launch to shard the model: leave it out here",),
    "fsdp": ("give accelerate_configs/fsdp.yaml to accelerate launch: leave it out here",),
    "ddp_find_unused_parameters": ("it is not needed: leave it out",),
    "torch_compile_backend": ("--torch_compile",),
}
LAUNCHER_FLAGS = {"cpu", "config_file", "help"}


def equivalent(name: str, fields: Container[str]) -> str | None:
    """Advice on flag `name` of another program for a recipe with these fields; None if the flag is unknown."""
    for text in EQUIVALENTS.get(name, ()):
        words = {word.strip(",.:;").removeprefix("--") for word in text.split() if word.startswith("--")}
        if all(word in fields for word in words - LAUNCHER_FLAGS):
            return f"use {text}" if text.startswith("--") else text
    return None
