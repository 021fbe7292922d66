"""How an action gets between the loop and its models without touching them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import finalize

from torch.nn import DataParallel
from torch.nn.parallel import DistributedDataParallel

from diagnose.actions._gone import entered
from diagnose.actions._watch import Watch
from diagnose.actions.base import CannotApply
from diagnose.core.job import Job, Route

REPLAYED = "is a CUDA graph, which goes on with the kernels and the memory that it was captured with"


@contextmanager
def routed(job: Job, model: Any, route: Route) -> Iterator[None]:
    """Lets the outermost training-mode calls of a model go through `route`, inside the routes it has."""
    key, routes = id(model), list[Route]()
    gone = finalize(model, job.routes.pop, key, None)  # another model may get its number
    gone.atexit = False
    del model
    try:
        routes = job.routes.setdefault(key, routes)
        routes.append(route)
        yield
    finally:
        gone.detach()
        routes[:] = [other for other in routes if other is not route]
        if not routes and job.routes.get(key) is routes:
            del job.routes[key]


def routes_in_force(job: Job) -> dict[int, tuple[Route, ...]]:
    """Returns the routes of every model, for `Action.state`; one that only watches changes nothing."""
    found = {
        model: tuple(route for route in routes if not isinstance(route, Watch))
        for model, routes in job.routes.copy().items()  # from which a model may go meanwhile
    }
    return {model: routes for model, routes in found.items() if routes}


def models_with_weights(job: Job) -> list[Any]:
    """Returns the models that hold parameters: a loss is called outermost, too, and mostly holds none.

    Raises:
        CannotApply: If there is none, or one cannot be called in another way than it is.
    """
    models = [model for model in job.models if next(model.parameters(), None) is not None]
    if not models:
        raise CannotApply("no model with parameters has been called in training")
    for module in (module for model in models for module in model.modules()):
        if is_replayed(module):
            raise CannotApply(f"{type(module).__name__} {REPLAYED}")
    return models


@contextmanager
def all_routed(job: Job, route_of: Callable[[Any], Route]) -> Iterator[None]:
    """Lets the calls that `routed` means, of each model with weights, go through a route of its own.

    Raises:
        CannotApply: See `models_with_weights`.
    """
    with ExitStack() as stack:
        entered(stack, (routed(job, each, route_of(each)) for each in models_with_weights(job)))
        yield


def is_replayed(module: Any) -> bool:
    """Whether calls of a module replay what `torch.cuda.make_graphed_callables` has captured of it."""
    return getattr(vars(module).get("forward"), "__module__", "") == "torch.cuda.graphs"


def refuse_compiled(job: Job) -> None:
    """Raises `CannotApply` if the script compiles a model itself: its graphs are then the script's."""
    from torch._dynamo.eval_frame import OptimizedModule

    for model in job.models:
        for module in model.modules():
            if isinstance(module, OptimizedModule) or module._compiled_call_impl is not None:
                raise CannotApply(f"the script compiles {type(module).__name__} itself")


def refuse_wrapped(job: Job) -> None:
    """Raises `CannotApply` if a model is wrapped for several devices: what wraps it knows its tensors'
    layout in memory."""
    for model in job.models:
        if isinstance(model, DataParallel | DistributedDataParallel):
            name = type(model).__name__
            raise CannotApply(f"{name} has laid out its buffers for the parameters as they are")
