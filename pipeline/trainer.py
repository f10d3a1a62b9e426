"""Lightning Trainers for the stages, all from the one ``trainer`` config group."""

from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback, RichProgressBar
from lightning.pytorch.loggers import Logger

from pipeline.config import Trainer


def make(
    config: Trainer, folder: Path, *, logger: Logger | None = None, callbacks: list[Callback] | None = None, **options: Any
) -> L.Trainer:
    """A Trainer with a progress bar (rate and time left) that writes below ``folder`` only."""
    return L.Trainer(
        accelerator=config.accelerator,
        devices=config.devices,
        num_nodes=config.num_nodes,
        strategy=config.strategy,
        default_root_dir=folder,
        logger=logger or False,
        callbacks=[RichProgressBar(), *(callbacks or [])],
        enable_model_summary=False,
        **{"enable_checkpointing": False, **options},
    )


def stop_if_interrupted(trainer: L.Trainer) -> None:
    """Lightning swallows Ctrl-C after a graceful stop; a half-done stage must not go on as if it were whole."""
    if trainer.interrupted:
        raise KeyboardInterrupt
