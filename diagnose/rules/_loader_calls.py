"""What to write about a loader: the call that makes it, and what can be changed of how it is served."""

from __future__ import annotations

from diagnose.core.profile import Profile
from diagnose.core.program import Loader
from diagnose.rules._lines import under_trainer
from diagnose.source.calls import with_arguments

KEEP_ITERATOR = (
    "Keep the iterator: `batches = iter(loader)` before the loop, `next(batches)` in it, and a new one when"
    " it ends"
)
"""What to do about `next(iter(loader))` in every step."""


DIVIDE = (
    "Divide the stream among workers by torch.utils.data.get_worker_info(), unless it does so itself: else"
    " each yields every sample. Then give"
)

OF_TRAINING_ARGUMENTS = {
    "num_workers": "dataloader_num_workers",
    "persistent_workers": "dataloader_persistent_workers",
    "prefetch_factor": "dataloader_prefetch_factor",
    "pin_memory": "dataloader_pin_memory",
}
"""What Hugging Face's `TrainingArguments` call the arguments of the loaders that the `Trainer` makes."""


def with_loader_arguments(profile: Profile, loader: Loader | None, **arguments: int | bool | None) -> str:
    """Returns the call that makes a loader, with arguments changed: see `with_arguments`."""
    call = loader.call if loader is not None else ""
    if call or not under_trainer(profile) or not arguments.keys() <= OF_TRAINING_ARGUMENTS.keys():
        return with_arguments(call, "DataLoader", **arguments)
    named = {OF_TRAINING_ARGUMENTS[name]: value for name, value in arguments.items()}
    return with_arguments("", "TrainingArguments", **named)


def applicable(actions: tuple[str, ...], loader: Loader | None) -> tuple[str, ...]:
    """Returns actions that change how a loader is served, or none: nothing divides a stream, and no worker
    can use tensors on a device."""
    return (
        ()
        if loader is not None and (loader.iterable or loader.on_device or loader.moves_batches)
        else actions
    )
