"""Lightning Trainers for the stages, all from the one ``trainer`` config group."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback, RichProgressBar
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from pipeline.config import Trainer
from pipeline.errors import PipelineError
from pipeline.noise import quieten
from speculative import pack


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


class WithTarget(L.LightningModule):
    """Work that a frozen target does on batches of Python lists; ``predict_step`` is the subclass's.

    Lightning moves every module that it knows of, and a target that transformers has spread over devices must stay there.
    So the target is held where Lightning does not see it, and moved and packed here. It is not handed to a process that is
    spawned, which calls ``load``: packed weights cannot be handed over, and shared memory may be small.
    """

    def __init__(self, model: PreTrainedModel, load: Callable[[], PreTrainedModel] | None = None) -> None:
        super().__init__()
        self._held, self._load = (model,), load

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_held": ()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        quieten()  # a process of its own has not heard it

    @property
    def target(self) -> PreTrainedModel:
        if not self._held:  # spawned
            self._held = (self._load(),)
        return self._held[0]

    def on_predict_start(self) -> None:
        if getattr(self.target, "hf_device_map", None) is None:
            self.target.to(self.device)
        pack(self.target)

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return batch


def predict(config: Trainer, folder: Path, module: WithTarget, work: Sequence[Any]) -> None:
    """Let ``module`` do each item of ``work``, divided over the devices of the trainer; what it writes is its own affair."""
    runner = make(config, folder)
    with interruptible(runner):
        runner.predict(module, DataLoader(work, batch_size=None, collate_fn=_as_it_is), return_predictions=False)


def _as_it_is(item: Any) -> Any:
    return item


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
