"""A model of transformers as an ONNX graph, of any number of rows and, for texts, of any length."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shared.contrastive.models import Pooling, embeddings
from shared.errors import UserError, about, first_line
from shared.onnx_models.runtime import require

BATCH, LENGTH = "batch", "length"  # the names of the dynamic dimensions
OPSET = 23  # the first with an operator of attention; earlier ones take six operators, and more time
# Tables of embeddings and matrices. onnxruntime is slower with convolutions of 8 bits than in float32, and has no
# attention of 8 bits.
OPERATORS_OF_INT8 = ["Gather", "Gemm", "MatMul"]


class Graph(nn.Module):
    """The function of tensors that an ONNX file computes: the logits of a model, or normalized embeddings.

    Args:
        model: of transformers, as `from_pretrained` returns it.
        names: the names of the tensors, as the model's forward pass has them.
        pooling: computes the embeddings of a model without a head; None for a model with logits.
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
    """The `torch.onnx.ONNXProgram` of a model.

    Args:
        model: see `Graph`.
        inputs: a batch by name: whole numbers [rows, length], or images [rows, channels, height, width].
        pooling: see `Graph`.

    Raises:
        UserError: torch's exporter cannot express the model.
    """
    graph = Graph(model, tuple(inputs), pooling).eval()
    two_rows = tuple(torch.cat((tensor, tensor))[:2] for tensor in inputs.values())  # the exporter takes 1 as fixed
    shapes = tuple({0: BATCH} if tensor.is_floating_point() else {0: BATCH, 1: LENGTH} for tensor in two_rows)
    try:
        with quiet():
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
    with quiet(), about("--int8"):
        quantization.quantize_dynamic(
            proto,
            file,
            op_types_to_quantize=OPERATORS_OF_INT8,
            per_channel=True,
            reduce_range=True,
            weight_type=quantization.QuantType.QInt8,
        )


@contextmanager
def quiet() -> Iterator[None]:
    """Silence what exporters print about their own work; their errors are exceptions."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
