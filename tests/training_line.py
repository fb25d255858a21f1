"""The figures of one training line of metrics.jsonl, for tests."""

TRAINING = {
    "loss": 0.43211,
    "learning_rate": 1.2e-4,
    "grad_norm": 1.5,
    "samples": "00ff",
    "samples_per_second": 512.2,
    "tokens_per_second": 5643.0,
    "data_wait": 0.01,
}
