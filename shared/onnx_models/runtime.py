"""A model in the ONNX format, which onnxruntime computes on the CPU; called like the PyTorch model."""

import importlib
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from shared.errors import UserError, about

FOLDER, FILE = "onnx", "model.onnx"  # in the folder of a model, where transformers.js looks, too
# On CPUs a sum and a layer normalization take less time than the operator of both: BERT-base in int8 is 10 % faster.
SLOW = ["SkipLayerNormFusion"]
PACKAGES = ("onnx", "onnxscript", "onnxruntime")


def require(package: str) -> ModuleType:
    """Import one of the packages for the export in pyproject.toml.

    Raises:
        UserError: it is not installed.
    """
    try:
        return importlib.import_module(package)
    except ImportError:
        raise UserError(
            f"{package} is not installed: pip install {' '.join(PACKAGES)}, in the versions of pyproject.toml"
        ) from None


class OnnxModel(nn.Module):
    """Computes the model in an ONNX file, with as many threads as torch.

    Raises:
        UserError: the file does not exist or cannot be loaded, or onnxruntime is not installed.
    """

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file, onnxruntime = file, require("onnxruntime")
        if not file.is_file():
            raise UserError(f"{file} does not exist: python -m shared.export writes it")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        with about(str(file)):
            self.session = onnxruntime.InferenceSession(
                file, options, providers=["CPUExecutionProvider"], disabled_optimizers=SLOW
            )
        self.inputs = [each.name for each in self.session.get_inputs()]

    def forward(self, masked: Tensor | None = None, **batch: Tensor) -> Any:
        """An object with the `logits` of a batch [rows, ...] or of its `masked` tokens [n, tags], on the same device.

        Args:
            masked: indices [n] of tokens in the flattened rows. None: the model does not compute tokens.
            batch: the inputs by name, such as input_ids [rows, length].

        Raises:
            UserError: the file was exported for other inputs, or onnxruntime cannot compute the batch.
        """
        if batch.keys() != {*self.inputs}:
            raise UserError(
                f"{self.file} was exported for the inputs {', '.join(self.inputs)}, and this batch has "
                f"{', '.join(batch)}: export the model again, with such data as FILE"
            )
        with about(str(self.file)):
            (found,) = self.session.run(None, {name: tensor.cpu().numpy() for name, tensor in batch.items()})
        logits = torch.from_numpy(found).to(next(iter(batch.values())).device)
        return SimpleNamespace(logits=logits if masked is None else logits.flatten(0, 1).index_select(0, masked))
