"""A trained model in other programs: transformers' classes, and exports to torch and ONNX."""
