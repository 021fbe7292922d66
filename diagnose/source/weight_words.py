"""What weights and gradients are called, and the methods that give them, keep them or hook onto them."""

from __future__ import annotations

from typing import Literal

from diagnose.source.kinds import Definition

ASKED = {"parameters", "named_parameters", "state_dict"}
"""Methods of a model that give its weights."""

OVER_WEIGHTS = {*ASKED, "params", "grads", "param_groups"}
"""What a loop over weights or gradients goes over, by name."""

GRADIENTS = {"grad", "grads", "gradients"}

HOOKS = {"register_hook", "register_post_accumulate_grad_hook"}
"""Methods of a weight that are given a function, which a backward pass calls with the gradient, or with the
weight."""

PASS_ON = {
    *("list", "tuple", "dict", "sorted", "zip", "enumerate", "filter", "reversed", "iter", "set", "chain"),
    *("deepcopy", "copy", "items", "values", "from_iterable", "OrderedDict"),
}
"""What they are given, or called on, they hold."""

KEEPS = {"detach", "clone", "to", "cpu", "float", "double", "requires_grad_", "deepcopy", "copy"}
"""What of a weight is still a weight."""

RESHAPES = {"view", "reshape", "flatten", "ravel", "numpy"}
"""What of a gradient is still one, besides."""

Scope = Definition | None
"""A function; `None` is what the whole file sees: names of the module, and attributes."""

Kind = Literal["weights", "gradients"]
