"""DDP no longer looks for parameters without a gradient"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diagnose.actions._ddp import ReducerAction, wrapped
from diagnose.actions.base import CannotApply
from diagnose.core.job import Job
from diagnose.core.trial import Safety


class FindUnusedOff(ReducerAction):
    """
    ## What it does
    Gives DDP a fresh reducer without `find_unused_parameters`: no walk through the graph before each
    backward pass, no averaged map of what was used, and buckets in the order in which gradients come.

    ## When it takes effect
    With the next step. In the second one torch orders the buckets anew.

    ## When it cannot help
    A step in which the backward pass hides all of that.

    ## Hazards
    It is a promise that every parameter gets a gradient in all steps to come. Where one does not, the ranks
    wait for each other in vain, or torch ends the script. Only you can make that promise, hence
    `--allow training`.
    """

    safety = Safety.TRAINING
    excludes = frozenset({"static-graph"})

    def check(self, job: Job) -> None:
        models = wrapped(job)
        if not any(model.find_unused_parameters for model in models):
            raise CannotApply("find_unused_parameters is off already")
        if any(model.static_graph for model in models):
            raise CannotApply("with static_graph nothing is looked for")
        if any(model._get_ddp_logging_data().get("unused_parameter_size") for model in models):
            raise CannotApply("some parameters got no gradient in the last step")

    def change(self, model: Any, prepared: Any) -> None:
        model.find_unused_parameters = False

    def settings(self, job: Job, value: int | None) -> Mapping[str, str]:
        return {"DistributedDataParallel.find_unused_parameters": "False"}
