"""Loggers of the rlhf framework: TensorBoard, Weights & Biases."""
