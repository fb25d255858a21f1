"""Fine-tune with transformers' Trainer as its documentation shows; launch_to_first_step.py starts this script.

trainer_script.py MODEL TRAIN.parquet VALIDATION.parquet MAX_LENGTH --output_dir FOLDER
"""

import sys
from pathlib import Path

import evaluate
import numpy as np
from datasets import load_dataset
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
)


def main() -> None:
    model_name, train_file, validation_file, max_length, _, output_dir = sys.argv[1:]
    dataset = load_dataset("parquet", data_files={"train": train_file, "validation": validation_file})
    names = sorted(dataset["train"].unique("label"))
    tokenizer = AutoTokenizer.from_pretrained(model_name)
    model = AutoModelForSequenceClassification.from_pretrained(model_name, num_labels=len(names))
    accuracy = evaluate.load(str(Path(__file__).with_name("accuracy.py")))

    def prepare(rows: dict) -> dict:
        tokens = tokenizer(rows["text"], truncation=True, max_length=int(max_length))
        tokens["labels"] = [names.index(label) for label in rows["label"]]
        return tokens

    def compute_metrics(predicted: tuple) -> dict:
        logits, targets = predicted
        return accuracy.compute(predictions=np.argmax(logits, axis=1), references=targets)

    dataset = dataset.map(prepare, batched=True, remove_columns=dataset["train"].column_names)
    arguments = TrainingArguments(
        output_dir=output_dir,
        per_device_train_batch_size=16,  # with two processes: 32 samples per step
        learning_rate=1e-4,
        eval_strategy="epoch",
        ddp_backend="gloo",
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    Trainer(
        model=model,
        args=arguments,
        train_dataset=dataset["train"],
        eval_dataset=dataset["validation"],
        data_collator=DataCollatorWithPadding(tokenizer),
        processing_class=tokenizer,
        compute_metrics=compute_metrics,
    ).train()


if __name__ == "__main__":
    main()
