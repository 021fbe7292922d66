"""Models whose samples do not know of each other."""

from __future__ import annotations

from torch import nn

from diagnose.actions.base import CannotApply


def refuse_coupled(model: nn.Module) -> None:
    """Raises `CannotApply` if a part of the batch gives another result than the batch does.

    Only modules of known kinds are found so; the numerics check sees the rest.
    """
    for name, module in model.named_modules():
        if not module.training:
            continue
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise CannotApply(f"{name or 'the model'} is a batch norm: its statistics are of all samples")
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            raise CannotApply(f"{name or 'the model'} is a dropout: pieces would draw other masks")
        if isinstance(module, nn.MultiheadAttention) and module.dropout > 0:
            raise CannotApply(f"{name or 'the model'} has a dropout: pieces would draw other masks")


def refuse_sharded(model: nn.Module) -> None:
    """Raises `CannotApply` if a wrapper that must see the whole call spreads it over devices."""
    for module in model.modules():
        if isinstance(module, nn.DataParallel) or "FullyShardedDataParallel" in type(module).__name__:
            raise CannotApply(f"{type(module).__name__} spreads each call over devices itself")
    if any(hasattr(parameter, "_local_tensor") for parameter in model.parameters()):
        raise CannotApply("the parameters are spread over ranks")
