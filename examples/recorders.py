"""Trackers for ``pipesgd.train --recorder recorders:WeightsAndBiases``, and for MLflow and TensorBoard.

The command calls the class without arguments on rank 0, and the object after every iteration. Values are floats by
name, such as "train/loss"; the object's ``close`` is called at the end.
"""

from collections.abc import Mapping


class WeightsAndBiases:
    """Log to Weights & Biases; with WANDB_MODE=offline, into the folder wandb, for ``wandb sync`` later."""

    def __init__(self) -> None:
        import wandb

        self.run = wandb.init(project="pipesgd")

    def __call__(self, iteration: int, values: Mapping[str, float]) -> None:
        self.run.log(values, step=iteration)

    def close(self) -> None:
        self.run.finish()


class MLflow:
    """Log to MLflow; MLFLOW_TRACKING_URI names the server or a database, such as sqlite:///mlflow.db."""

    def __init__(self) -> None:
        import mlflow

        self.mlflow = mlflow
        mlflow.set_experiment("pipesgd")
        mlflow.start_run()

    def __call__(self, iteration: int, values: Mapping[str, float]) -> None:
        self.mlflow.log_metrics(dict(values), step=iteration)

    def close(self) -> None:
        self.mlflow.end_run()


class TensorBoard:
    """Log to TensorBoard, into a folder of its own below runs, as in other programs of yours."""

    def __init__(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter()

    def __call__(self, iteration: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, iteration)

    def close(self) -> None:
        self.writer.close()
