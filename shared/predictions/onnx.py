"""A model of transformers as an ONNX file, and its computation by onnxruntime on the CPU.

The file computes any number of rows and, for texts, any length. `OnnxModel` is called like the PyTorch model.
"""

import importlib
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shared.contrastive.models import Pooling, embeddings
from shared.errors import UserError, about, first_line

FOLDER, FILE = "onnx", "model.onnx"  # in the folder of a model, where transformers.js looks, too
# On CPUs a sum and a layer normalization take less time than the operator of both: BERT-base in int8 is 10 % faster.
SLOW = ["SkipLayerNormFusion"]
PACKAGES = ("onnx", "onnxscript", "onnxruntime")
BATCH, LENGTH = "batch", "length"  # the names of the dynamic dimensions
OPSET = 23  # the first with an operator of attention; earlier ones take six operators, and more time
# Tables of embeddings and matrices. onnxruntime is slower with convolutions of 8 bits than in float32, and has no
# attention of 8 bits.
OPERATORS_OF_INT8 = ["Gather", "Gemm", "MatMul"]


def require(package: str) -> ModuleType:
    """Import one of the packages for the export in pyproject.toml; UserError if it is not installed."""
    with about(f"ONNX needs pip install {' '.join(PACKAGES)}"):
        return importlib.import_module(package)


class OnnxModel(nn.Module):
    """Computes the model in an ONNX file, with as many threads as torch.

    Raises:
        UserError: the file does not exist or cannot be loaded, or onnxruntime is not installed.
    """

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file, onnxruntime = file, require("onnxruntime")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        with about(f"{file} (python -m shared.export writes it)"):
            self.session = onnxruntime.InferenceSession(
                file, options, providers=["CPUExecutionProvider"], disabled_optimizers=SLOW
            )

    def forward(self, masked: Tensor | None = None, **batch: Tensor) -> Any:
        """An object with the `logits` of a batch of inputs by name, [rows, ...], on the same device.

        With `masked`, indices [n] of tokens in the flattened rows, they are those of these tokens, [n, tags].

        Raises:
            UserError: the file was exported for other inputs, such as one text instead of two.
        """
        with about(str(self.file)):
            (found,) = self.session.run(None, {name: tensor.cpu().numpy() for name, tensor in batch.items()})
        logits = torch.from_numpy(found).to(next(iter(batch.values())).device)
        return SimpleNamespace(logits=logits if masked is None else logits.flatten(0, 1).index_select(0, masked))


class Graph(nn.Module):
    """The function of tensors that an ONNX file computes: the logits of a model of transformers, or with a pooling,
    normalized embeddings. `names` are those of the tensors in the model's forward pass.
    """

    def __init__(self, model: nn.Module, names: tuple[str, ...], pooling: Pooling | None) -> None:
        super().__init__()
        self.model, self.names, self.pooling = model, names, pooling

    def forward(self, *tensors: Tensor) -> Tensor:
        """The logits [rows, labels] or [rows, length, tags], or embeddings [rows, width], in float32."""
        inputs = dict(zip(self.names, tensors, strict=True))
        output = self.model(**inputs)
        if self.pooling is None:
            return output.logits
        return F.normalize(embeddings(output.last_hidden_state, inputs.get("attention_mask"), self.pooling), dim=1)


def to_onnx(model: nn.Module, inputs: dict[str, Tensor], pooling: Pooling | None) -> Any:
    """The `torch.onnx.ONNXProgram` of a `Graph`, for inputs by name such as those of a batch.

    They are whole numbers [rows, length], or images [rows, channels, height, width].

    Raises:
        UserError: torch's exporter cannot express the model.
    """
    graph = Graph(model, tuple(inputs), pooling).eval()
    two_rows = tuple(torch.cat((tensor, tensor))[:2] for tensor in inputs.values())  # the exporter takes 1 as fixed
    shapes = tuple({0: BATCH} if tensor.is_floating_point() else {0: BATCH, 1: LENGTH} for tensor in two_rows)
    try:
        program = torch.onnx.export(
            graph,
            two_rows,
            input_names=graph.names,
            output_names=["logits" if pooling is None else "sentence_embedding"],
            opset_version=OPSET,
            optimize=False,  # it would also fuse rotary embeddings into an operator that rejects several rows
            dynamic_shapes=(shapes,),
            dynamo=True,
            verbose=False,
        )
        assert program is not None
        program.model = require("onnxscript.optimizer").optimize(program.model)
        return program
    except torch.onnx.OnnxExporterError as error:
        kind, reason = type(model).__name__, first_line(error.__cause__ or error)
        raise UserError(f"ONNX cannot express a {kind} ({reason}): nothing was written; use PyTorch") from error


def write_int8(program: Any, file: Path) -> None:
    """Write a program with weights in int8, and activations that onnxruntime rounds to 8 bits in each forward pass.

    Weights have 7 bits, because kernels of x86 processors without VNNI would saturate sums of products of 8 bits. Each
    column of a matrix has its own scale.

    Raises:
        UserError: onnxruntime cannot quantize the program.
    """
    quantization = require("onnxruntime.quantization")
    proto = program.model_proto
    del proto.graph.value_info[:]  # the exporter keeps the shapes of weights that it has transposed
    with about("--int8"):
        quantization.quantize_dynamic(
            proto,
            file,
            op_types_to_quantize=OPERATORS_OF_INT8,
            per_channel=True,
            reduce_range=True,
            weight_type=quantization.QuantType.QInt8,
        )
