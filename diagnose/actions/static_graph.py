"""DDP is told that the graph stays the same"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diagnose.actions._ddp import ReducerAction, wrapped
from diagnose.actions.base import CannotApply
from diagnose.core.job import Job
from diagnose.core.trial import Safety


class StaticGraph(ReducerAction):
    """
    ## What it does
    Gives DDP a fresh reducer with `static_graph=True`. It learns in one step which parameters get
    gradients, and neither walks the graph nor asks the other ranks for them any more.

    ## When it takes effect
    With the next step; the first one with it sends all gradients after the backward pass.

    ## When it cannot help
    A model without `find_unused_parameters`, save for what it is allowed to do with checkpointing.

    ## Hazards
    It is a promise about all steps to come. Where another parameter goes without a gradient later on, the
    ranks wait for each other in vain, or torch ends the script. Only you can make that promise, hence
    `--allow training`.
    """

    safety = Safety.TRAINING
    excludes = frozenset({"find-unused-off", "no-sync"})
    settle_steps = 3

    def check(self, job: Job) -> None:
        models = wrapped(job)
        if all(model.static_graph for model in models):
            raise CannotApply("the script has set static_graph itself")
        if any(model._get_ddp_logging_data().get("unused_parameter_size") for model in models):
            raise CannotApply("some parameters got no gradient in the last step")
        if (job.facts.get("ddp", {}).get("synced_share") or 1.0) < 1:
            raise CannotApply("the script leaves out averages itself, and a static graph begins with one")

    def change(self, model: Any, prepared: Any) -> None:
        model.find_unused_parameters = False  # the graph is looked at once, anyway
        model.static_graph = True

    def settings(self, job: Job, value: int | None) -> Mapping[str, str]:
        return {"DistributedDataParallel.static_graph": "True"}
