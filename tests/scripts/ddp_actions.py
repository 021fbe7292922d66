"""Trains small DDP models on every rank, left alone and with an action switched on and off between steps.

Each rank prints one line of JSON: by scenario, digests of the weights, how far apart they are, what the
reducer said of itself only with the action in force, and how many passes were not averaged; and refusals.

RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python -m tests.scripts.ddp_actions
"""

import contextlib
import hashlib
import json

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from diagnose.actions._ddp import comm_hook
from diagnose.actions.base import CannotApply
from diagnose.actions.ddp_bf16_hook import DdpBf16Hook
from diagnose.actions.ddp_bucket_size import DdpBucketSize
from diagnose.actions.find_unused_off import FindUnusedOff
from diagnose.actions.no_sync import NoSync
from diagnose.actions.static_graph import StaticGraph
from diagnose.core.job import Job
from tests.toggled import WARMUP, tuned

STEPS = 18
WEIGHTS_MIB = 4


def make_model(norm=False, **options):
    torch.manual_seed(0)
    layers = [nn.Linear(512, 512) for _ in range(WEIGHTS_MIB)]
    if norm:
        layers.insert(1, nn.BatchNorm1d(512))
    return DistributedDataParallel(nn.Sequential(nn.Linear(16, 512), *layers), **options)


def batches(steps):
    generator = torch.Generator().manual_seed(dist.get_rank() + 1)
    return DataLoader(TensorDataset(torch.randn(4 * steps, 16, generator=generator)), batch_size=4)


def train(
    model, accumulate=1, batches_per_epoch=STEPS, epochs=1, of_known_length=True, look=0, then=0, each=None
):
    """Returns what the reducer said of itself after each step.

    From epoch `look` on the first rank calls its model once more in each step. After the first epoch comes
    another optimizer, which steps on `then` batches.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    said = []
    for epoch in range(epochs):
        if then and epoch == 1:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            accumulate = then
        loader = batches(batches_per_epoch)
        if not of_known_length:
            loader = list(loader)
        for index, (input_BF,) in enumerate(loader, 1):
            if look and epoch >= look and dist.get_rank() == 0 and index % accumulate == 2:
                model(input_BF)
            (model(input_BF).square().mean() / accumulate).backward()
            if index % accumulate == 0 or index == len(loader):
                if of_known_length:
                    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
                if each is not None:
                    each(len(said))
                data = model._get_ddp_logging_data()
                said.append(
                    (
                        len((data.get("rebuilt_bucket_sizes") or data["bucket_sizes"]).split(",")),
                        bool(model.find_unused_parameters),
                        bool(model.static_graph),
                        comm_hook(model),
                    )
                )
    return said


def weights_of(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def digest(weights):
    return hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16]


def told_apart(alone, usual, model, said):
    """Says how two trainings ended."""
    reference, ours = weights_of(alone), weights_of(model)
    return {
        "alone": digest(reference),
        "ours": digest(ours),
        "distance": ((ours - reference).norm() / reference.norm()).item(),
        "said": sorted(set(said) - set(usual)),
    }


def with_fresh_reducers(action, value=None, **options):
    """Switches an action on for four steps and off for four, and so on: buckets settle after two."""
    alone, model = make_model(**options), make_model(**options)
    usual = train(alone)
    job = Job(models=[model])
    before = action.state(job)
    with contextlib.ExitStack() as application:

        def switch(step):
            if step % 4 == 0:
                application.close()
                action.verify_undone(job, before)
                if step % 8 == 0:
                    application.enter_context(action.apply(job, value))

        said = train(model, each=switch)
    action.verify_undone(job, before)
    return told_apart(alone, usual, model, said)


def without_averages(norm=False, **loop):
    """Lets `NoSync` leave out what it can, with the hooks that find steps and passes."""
    alone, model = make_model(norm), make_model(norm)
    usual = train(alone, **loop)
    not_averaged = 0
    no_sync = DistributedDataParallel.no_sync

    def counted(model):
        nonlocal not_averaged
        not_averaged += 1
        return no_sync(model)

    DistributedDataParallel.no_sync = counted
    on = lambda step: step >= WARMUP + NoSync.learning_steps  # noqa: E731
    # Until it is known that another optimizer took the place of one, its steps are passes of a longer one.
    with tuned(NoSync(), on=on, may_give_up="then" in loop):
        said = train(model, **loop)
    DistributedDataParallel.no_sync = no_sync
    pairs = zip(model.buffers(), alone.buffers(), strict=True)
    buffers = [(ours - own).abs().max().item() for ours, own in pairs]
    told = {"not_averaged": not_averaged, "buffers": max(buffers, default=0.0)}
    return {**told_apart(alone, usual, model, said), **told}


def refusal(action, *models, **facts):
    try:
        action.check(Job(models=models, **facts))
    except CannotApply as error:
        return str(error)
    return ""


def with_hook():
    model = make_model()
    model.register_comm_hook(None, allreduce_hook)
    return model


torch.set_num_threads(1)
dist.init_process_group("gloo")
looking = {"find_unused_parameters": True}
scenarios = {
    "ddp-bucket-size": with_fresh_reducers(DdpBucketSize(), 1),
    "ddp-bucket-size of views": with_fresh_reducers(DdpBucketSize(), 1, gradient_as_bucket_view=True),
    "static-graph": with_fresh_reducers(StaticGraph(), **looking),
    "find-unused-off": with_fresh_reducers(FindUnusedOff(), **looking),
    "ddp-bf16-hook": with_fresh_reducers(DdpBf16Hook()),
    "no-sync": without_averages(accumulate=3, batches_per_epoch=20, epochs=2),
    "no-sync of unknown length": without_averages(
        accumulate=3, batches_per_epoch=35, of_known_length=False
    ),
    "no-sync with a look on one rank": without_averages(
        look=1, accumulate=3, batches_per_epoch=21, epochs=2
    ),
    "no-sync with another optimizer": without_averages(
        then=2, accumulate=3, batches_per_epoch=42, epochs=2, of_known_length=False
    ),
    "no-sync of one batch": without_averages(),
    "no-sync with batch norm": without_averages(norm=True, accumulate=3, batches_per_epoch=21, epochs=2),
}
refusals = {
    "none wrapped": refusal(DdpBucketSize(), make_model().module),
    "own hook": refusal(DdpBf16Hook(), with_hook()),
    "half": refusal(DdpBf16Hook(), DistributedDataParallel(nn.Linear(2, 2).half())),
    "off already": refusal(FindUnusedOff(), make_model()),
    "static already": refusal(StaticGraph(), make_model(static_graph=True)),
    "static with own no_sync": refusal(StaticGraph(), make_model(), facts={"ddp": {"synced_share": 0.25}}),
    "one batch": refusal(NoSync(), make_model(), steps=10, backward_passes=10),
    "own no_sync": refusal(NoSync(), make_model(), facts={"ddp": {"synced_share": 0.25}}),
    "two models": refusal(NoSync(), make_model(), make_model()),
    "unused": refusal(NoSync(), make_model(**looking)),
}
print(json.dumps({"scenarios": scenarios, "refusals": refusals}))
dist.destroy_process_group()
