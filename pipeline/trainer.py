"""Lightning Trainers for the stages, all from the one ``trainer`` config group."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback, RichProgressBar
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from pipeline.config import Trainer
from pipeline.errors import PipelineError


def make(
    config: Trainer, folder: Path, *, logger: Logger | None = None, callbacks: list[Callback] | None = None, **options: Any
) -> L.Trainer:
    """A Trainer with a progress bar (rate and time left) that writes below ``folder`` only."""
    try:
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
    except (MisconfigurationException, ValueError) as error:
        raise PipelineError(
            f"trainer.accelerator={config.accelerator}, trainer.devices={config.devices}, trainer.strategy={config.strategy}: "
            f"Lightning refuses these on this machine ({error}); try trainer=cpu"
        ) from error


@contextmanager
def interruptible(trainer: L.Trainer) -> Iterator[None]:
    """Let Ctrl-C out as what it is: Lightning stops gracefully and then exits, or returns as if the work were whole."""
    try:
        yield
    except SystemExit:
        if not trainer.interrupted:
            raise
    if trainer.interrupted:
        raise KeyboardInterrupt
