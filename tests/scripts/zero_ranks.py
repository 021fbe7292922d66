"""Trains a DDP model on every rank by many optimizers, left alone and with the state shared on and off.

Each rank prints one line of JSON: by optimizer, digests of weights and of the states that it asked for.

RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python -m tests.scripts.zero_ranks
"""

import contextlib
import copy
import hashlib
import json
import pickle
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from diagnose.actions import _zero_peers
from diagnose.actions.base import CannotApply
from diagnose.actions.zero_one import CLASSES, ZeroOne
from diagnose.core.job import Job

STEPS = 14
FIRST = 2
ACTION = ZeroOne()
OPTIONS = {
    "SGD": {"momentum": 0.9},
    "RMSprop": {"momentum": 0.5, "centered": True},
    "AdamW": {"amsgrad": True},
}
SHARED = range(FIRST, 6), range(9, 13)
"""Steps with the state shared."""


class Net(nn.Module):
    """A model with a layer that is not trained, and a convolution laid out with channels last."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3).to(memory_format=torch.channels_last)
        wide = 16 * 36
        self.rest = nn.Sequential(
            nn.Flatten(), nn.Linear(wide, 16), nn.Tanh(), nn.Linear(16, wide), nn.Linear(wide, 3)
        )
        self.frozen = nn.Linear(3, 3).requires_grad_(False)

    def forward(self, image_NCHW):
        return self.frozen(self.rest(self.first(image_NCHW)))


def make(kind, **more):
    torch.manual_seed(0)
    model = DistributedDataParallel(Net())
    body, head = model.module.first, [*model.module.rest.parameters(), *model.module.frozen.parameters()]
    groups = [{"params": body.parameters(), "weight_decay": 0.1}, {"params": head}]
    options = {"lr": 0.01, **OPTIONS.get(kind.__name__, {}), **more}
    return model, kind(groups if kind is not torch.optim.Rprop else model.parameters(), **options)


def image(step):
    return torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1000 * step + dist.get_rank()))


def digest(value):
    """Of tensors in dictionaries and lists, with their keys in order."""
    made = hashlib.sha256()

    def add(value):
        if isinstance(value, dict):
            for key, each in value.items():
                made.update(str(key).encode())
                add(each)
        elif isinstance(value, list | tuple):
            for each in value:
                add(each)
        elif isinstance(value, torch.Tensor):
            made.update(f"{value.dtype}{value.shape}{value.stride()}".encode())
            made.update(value.detach().contiguous().numpy().tobytes())
        else:
            made.update(str(value).encode())

    add(value)
    return made.hexdigest()[:16]


def held_bytes(optimizer):
    held = [v for state in optimizer.state.values() for v in state.values() if v.dim()]
    return sum(v.numel() * v.element_size() for v in held)


def train(kind, *, shared=(), saves=lambda step: False, after=lambda step, optimizer: None, **more):
    """Returns the model, the optimizer, digests of states that were asked for, and bytes held by step."""
    model, optimizer = make(kind, **more)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    job = Job(models=[model], optimizers=[optimizer])
    saved, held, before = {}, [], None
    with contextlib.ExitStack() as preparation, contextlib.ExitStack() as application:
        prepared = None
        for step in range(STEPS):
            if shared and step == FIRST:
                ACTION.check(job)
                before = ACTION.state(job)
                prepared = preparation.enter_context(ACTION.prepare(job, None))
            if shared and step >= FIRST and not any(step - 1 in each and step in each for each in shared):
                application.close()
                ACTION.verify_undone(job, before)
                if any(step in each for each in shared):
                    application.enter_context(ACTION.apply(job, prepared))
            optimizer.zero_grad()
            model(image(step)).square().mean().backward()
            if saves(step):  # the others go on meanwhile, to where they need this rank
                saved[step] = digest(optimizer.state_dict())
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            scheduler.step()
            after(step, optimizer)
            held.append(held_bytes(optimizer))
    if shared:
        ACTION.verify_undone(job, before)
    return model, optimizer, saved, held


def compared(kind, **more):
    """Trains twice; every rank asks for the state after some steps, the first rank after others, too."""
    rank = dist.get_rank()

    def saves(step):
        if rank == 0 and step in (3, 10):
            time.sleep(0.05)  # the other one is far ahead
        return step == 4 or (rank == 0 and step in (3, 10, 11))

    alone, its, its_saved, its_held = train(kind, saves=saves, **more)
    model, ours, saved, held = train(kind, shared=SHARED, saves=saves, **more)
    return {
        "weights": [digest(alone.state_dict()), digest(model.state_dict())],
        "state": [digest(its.state_dict()), digest(ours.state_dict())],
        "saved": [its_saved, saved],
        "held_share": held[4] / its_held[4],
        "held_after": held[-1] / its_held[-1],
    }


def copies():
    """What copies, pickles and checkpoints made while it is shared hold, beside those of a script alone."""
    found = {True: {}, False: {}}
    for is_shared, seen in found.items():
        kept = {}

        def after(step, optimizer, seen=seen, kept=kept):
            if step == 3:
                seen["copied"] = digest(copy.deepcopy(optimizer).state_dict())
                kept.update(copy.deepcopy(optimizer.state_dict()))
            if step == 4:
                seen["pickled"] = digest(pickle.loads(pickle.dumps(optimizer)).state_dict())
            if step == 5:
                optimizer.load_state_dict(kept)

        model, optimizer, _, _ = train(
            torch.optim.AdamW, shared=(range(FIRST, 12),) if is_shared else (), after=after
        )
        seen["weights"], seen["state"] = digest(model.state_dict()), digest(optimizer.state_dict())
    return [found[False], found[True]]


def with_closure():
    """Trains with a closure that the step calls."""
    found = []
    for is_shared in (False, True):
        model, optimizer = make(torch.optim.Adam)
        job = Job(models=[model], optimizers=[optimizer])
        with contextlib.ExitStack() as stack:
            for step in range(6):
                if is_shared and step == FIRST:
                    prepared = stack.enter_context(ACTION.prepare(job, None))
                    stack.enter_context(ACTION.apply(job, prepared))

                def closure(step=step, model=model, optimizer=optimizer):
                    optimizer.zero_grad()
                    loss = model(image(step)).square().mean()
                    loss.backward()
                    return loss

                optimizer.step(closure)
        found.append([digest(model.state_dict()), digest(optimizer.state_dict())])
    return found


def held_up():
    """Undoes it while the first rank is held up for longer than the other waits."""
    found = []
    patience_s, _zero_peers.TOGETHER_S = _zero_peers.TOGETHER_S, 0.2
    for is_shared in (False, True):
        model, optimizer = make(torch.optim.AdamW)
        job = Job(models=[model], optimizers=[optimizer])
        with contextlib.ExitStack() as preparation, contextlib.ExitStack() as application:
            for step in range(8):
                if is_shared and step == FIRST:
                    prepared = preparation.enter_context(ACTION.prepare(job, None))
                    application.enter_context(ACTION.apply(job, prepared))
                if is_shared and step == 5:
                    time.sleep(0.6 * (dist.get_rank() == 0))
                    application.close()
                optimizer.zero_grad()
                model(image(step)).square().mean().backward()
                optimizer.step()
        found.append([digest(model.state_dict()), digest(optimizer.state_dict())])
    _zero_peers.TOGETHER_S = patience_s
    return found


def refusals():
    model, optimizer = make(torch.optim.Adam)
    outside = torch.optim.Adam([nn.Parameter(torch.ones(3))])
    differing_model, differing = make(torch.optim.SGD)
    for each in (0, 1):
        model(image(each)).mean().backward()
        optimizer.step()
        differing_model(image(each)).mean().backward()
        differing.step()
    with torch.no_grad():
        next(differing_model.parameters()).add_(dist.get_rank())
    plain = torch.optim.SGD(model.parameters())
    plain.step()
    lbfgs = torch.optim.LBFGS(model.parameters())
    return {
        "none wrapped": refusal([model.module], [optimizer]),
        "no optimizer": refusal([model], []),
        "no state": refusal([model], [plain]),
        "LBFGS": refusal([model], [lbfgs]),
        "outside": refusal([model], [outside]),
        "different": refusal([differing_model], [differing], prepare=True),
    }


def refusal(models, optimizers, prepare=False):
    job = Job(models=models, optimizers=optimizers)
    try:
        ACTION.check(job)
        if prepare:
            with ACTION.prepare(job, None):
                pass
    except CannotApply as error:
        return str(error)
    return ""


if __name__ == "__main__":
    torch.set_num_threads(1)
    _zero_peers.POLL_S = 0.01  # there are many checkpoints
    dist.init_process_group("gloo")
    results = {kind.__name__: compared(kind) for kind in CLASSES}
    results["fused AdamW"] = compared(torch.optim.AdamW, fused=True)
    print(
        json.dumps(
            {
                "results": results,
                "copies": copies(),
                "closure": with_closure(),
                "held up": held_up(),
                "refusals": refusals(),
            }
        )
    )
    dist.destroy_process_group()
