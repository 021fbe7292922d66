"""Compiles what moves tensors, measured as on a build of torch for a device, and with copies looked up.

Prints, for each, the methods in its graph. Measuring begins before Dynamo looks at those of torch.
"""

import json

import torch

import diagnose

torch.accelerator.current_accelerator = lambda: torch.device("cuda")
original = torch.Tensor.to
diagnose.attach("run")
assert torch.Tensor.to is not original

from diagnose.actions._careful import Failure  # noqa: E402
from diagnose.actions._device_copies import Copies  # noqa: E402


class Side:
    device = torch.device("cuda")


class Casting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)

    def forward(self, x):
        return x @ self.linear.weight.to(x.dtype)


FUNCTIONS = {
    "a type": lambda x: x.to(torch.float64) + 1,
    "a device": lambda x: x.to("cpu", non_blocking=True) + 1,
    "of a weight": Casting(),
    "to the host": lambda x: x.cpu() + 1,
    "into another": lambda x: torch.zeros(2, 2).copy_(x) + 1,
    "of the class": lambda x: torch.Tensor.to(x, torch.float64) + torch.Tensor.cpu(x),
}


def methods_of(function):
    found = []

    def backend(graph, inputs):
        found.append([node.target for node in graph.graph.nodes if node.op == "call_method"])
        return graph.forward

    torch._dynamo.reset()
    torch.compile(function, backend=backend, fullgraph=True)(torch.ones(2, 2))
    return found


measured = {name: methods_of(function) for name, function in FUNCTIONS.items()}
with Copies(Side(), Failure()).looked_up():
    looked_up = {name: methods_of(function) for name, function in FUNCTIONS.items()}
diagnose.detach()
print(json.dumps([measured, looked_up, {name: methods_of(f) for name, f in FUNCTIONS.items()}]))
