"""Compiles models in every usual way and prints, for each, what Dynamo made of it.

With the argument `late` it begins measuring when all is compiled already, and ends it before the end.
"""

import json
import sys

import torch
from torch import nn
from torch._dynamo.utils import counters, get_compilation_metrics

BACKEND = "aot_eager"
STEPS = 30


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.rest = nn.Sequential(nn.Linear(16, 16), nn.ReLU())

    def forward(self, x):
        return self.rest(torch.relu(self.linear(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Broken(Model):
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
            torch._dynamo.graph_break()
        return self.head(x)


class Other(Model):
    """A class that nothing has called before."""


criterion = nn.CrossEntropyLoss()


def plain(model, call):
    return lambda optimizer, x, y: criterion(call(x), y)


def module():
    model = Model()
    return model, plain(model, torch.compile(model, backend=BACKEND, fullgraph=True))


def method():
    model = Other()
    model.compile(backend=BACKEND, fullgraph=True)
    return model, plain(model, model)


def called_before():
    model = Model()
    model(torch.randn(8, 16))
    return model, plain(model, torch.compile(model, backend=BACKEND, fullgraph=True))


def sequential_in_sequential():
    inner = nn.Sequential(nn.Linear(16, 16), nn.ReLU())
    model = nn.Sequential(nn.Linear(16, 16), inner, nn.Linear(16, 4))
    return model, plain(model, torch.compile(model, backend=BACKEND, fullgraph=True))


def regions():
    model = Model()
    for block in model.blocks:
        block.compile(backend=BACKEND, fullgraph=True)
    return model, plain(model, model)


def graph_break():
    model = Broken()
    return model, plain(model, torch.compile(model, backend=BACKEND))


def function_of_the_loss():
    model = Model()

    @torch.compile(backend=BACKEND, fullgraph=True)
    def loss_of(x, y):
        return criterion(model(x), y)

    return model, lambda optimizer, x, y: loss_of(x, y)


def whole_step():
    model = Model()

    @torch.compile(backend=BACKEND)
    def step(optimizer, x, y):
        loss = criterion(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return model, step


def optimizer_step():
    model = Model()
    compiled = torch.compile(lambda optimizer: optimizer.step(), backend=BACKEND)

    def step(optimizer, x, y):
        loss = criterion(model(x), y)
        loss.backward()
        compiled(optimizer)
        optimizer.zero_grad()
        return loss.detach()

    return model, step


def sizes_that_change():
    model = Model()
    call = torch.compile(model, backend=BACKEND, fullgraph=True)

    def loss_of(optimizer, x, y):
        size = next(sizes)
        return criterion(call(x[:size]), y[:size])

    sizes = iter([8, 7, 6, 5] * STEPS)
    return model, loss_of


def train(model, loss_of, steps=STEPS):
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for index in range(steps):
        x, y = torch.randn(8, 16), torch.randint(0, 4, (8,))
        loss = loss_of(optimizer, x, y)
        if loss.requires_grad:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if index % 10 == 9:
            model.eval()
            with torch.no_grad():
                model(x)
            model.train()
    return loss.item()


def what_dynamo_made():
    return {
        "stats": dict(counters["stats"]),
        "frames": dict(counters["frames"]),
        "breaks": dict(counters["graph_break"]),
        "recompiles": dict(counters["recompiles"]),
        "compiled": sorted(f"{m.co_filename}:{m.co_name}" for m in get_compilation_metrics()),
    }


WAYS = (
    module,
    method,
    called_before,
    sequential_in_sequential,
    regions,
    graph_break,
    function_of_the_loss,
    whole_step,
    optimizer_step,
    sizes_that_change,
)


def all_ways():
    for way in WAYS:
        torch._dynamo.reset()
        counters.clear()
        torch._dynamo.utils.clear_compilation_metrics()
        torch.manual_seed(0)
        model, loss_of = way()
        loss = train(model, loss_of)
        print(json.dumps({"way": way.__name__, "loss": loss, **what_dynamo_made()}))


def late():
    import diagnose

    model, loss_of = module()
    train(model, loss_of)
    before = what_dynamo_made()
    diagnose.attach("run")
    train(model, loss_of)
    during = what_dynamo_made()
    profile = diagnose.detach()
    train(model, loss_of)
    print(json.dumps([before, during, what_dynamo_made(), profile.steps.count, list(profile.notes)]))


if __name__ == "__main__":
    late() if sys.argv[1:] == ["late"] else all_ways()
