"""Serve a classifier with one label per text, exported by `shared.export`, with LitServe: a text in, its label out.

    pip install litserve onnxruntime transformers
    python docs/examples/serve.py OUTPUT_DIR/model

It needs no torch and nothing of this project: the folder of the model has the tokenizer, the labels and the ONNX file.
"""

import argparse
from pathlib import Path
from typing import Any

import litserve
import numpy as np
import onnxruntime
from transformers import AutoConfig, AutoTokenizer

MOST_TEXTS, LONGEST_WAIT = 32, 0.005  # in a forward pass; seconds to wait for more requests


class Classifier(litserve.LitAPI):
    """Answers {"text": ...} with {"label": ..., "probability": ...}. Requests that arrive together share a pass."""

    def __init__(self, model: Path) -> None:
        super().__init__(max_batch_size=MOST_TEXTS, batch_timeout=LONGEST_WAIT)
        self.model = model

    def setup(self, device: str) -> None:
        """Load the files of the model, once in each worker."""
        self.tokenizer = AutoTokenizer.from_pretrained(self.model)
        self.names = AutoConfig.from_pretrained(self.model).id2label
        self.session = onnxruntime.InferenceSession(self.model / "onnx/model.onnx", providers=["CPUExecutionProvider"])
        self.inputs = [each.name for each in self.session.get_inputs()]

    def decode_request(self, request: dict[str, str]) -> str:
        """The text of a request."""
        return request["text"]

    def predict(self, texts: list[str]) -> list[dict[str, Any]]:
        """The answers to some requests. Texts longer than the model was trained with are cut off."""
        encoded = self.tokenizer(texts, truncation=True, padding=True, return_tensors="np")
        (logits,) = self.session.run(None, {name: encoded[name].astype(np.int64) for name in self.inputs})
        shares = np.exp(logits - logits.max(1, keepdims=True))
        shares /= shares.sum(1, keepdims=True)
        best = shares.argmax(1)
        return [
            {"label": self.names[int(i)], "probability": float(row[i])} for i, row in zip(best, shares, strict=True)
        ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="the folder of the model")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    given = parser.parse_args()
    if AutoConfig.from_pretrained(given.model).problem_type not in (None, "single_label_classification"):
        parser.error(f"{given.model} predicts numbers or several labels: change `predict`, which gives one label")
    server = litserve.LitServer(Classifier(given.model), accelerator="cpu")
    server.run(host=given.host, port=given.port, generate_client_file=False)
