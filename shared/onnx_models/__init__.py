"""Models in the ONNX format: their export, and their computation by onnxruntime."""
