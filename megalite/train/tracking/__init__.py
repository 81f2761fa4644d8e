"""Trackers: TensorBoard, Weights & Biases, mlflow and Prometheus behind one interface."""
