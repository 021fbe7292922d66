"""Averages gradients on every rank by each communication hook, and trains with it switched on and off.

Each rank prints one line of JSON: by hook, how far its average is from the true one, what became of a
gradient that is not finite, the bytes it handed over, and what training with it came to.

RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python -m tests.scripts.ddp_compression
"""

import contextlib
import hashlib
import json

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from diagnose.actions._ddp import comm_hook
from diagnose.actions.base import CannotApply
from diagnose.actions.ddp_fp16_hook import DdpFp16Hook
from diagnose.actions.ddp_fp16_scaled_hook import DdpFp16ScaledHook
from diagnose.actions.ddp_int8_hook import DdpInt8Hook
from diagnose.actions.ddp_power_sgd_hook import DdpPowerSgdHook
from diagnose.actions.ddp_top_k_hook import DdpTopKHook
from diagnose.core.job import Job

ACTIONS = {
    "ddp-fp16-hook": DdpFp16Hook(),
    "ddp-fp16-scaled-hook": DdpFp16ScaledHook(),
    "ddp-int8-hook": DdpInt8Hook(),
    "ddp-top-k-hook": DdpTopKHook(),
    "ddp-power-sgd-hook": DdpPowerSgdHook(),
}
STEPS = 20
SENDS = ("all_reduce", "all_to_all_single", "all_gather_single", "all_gather_into_tensor")


def make_model(**options):
    torch.manual_seed(0)
    layers = [nn.Linear(16, 256), nn.Tanh(), *(nn.Linear(256, 256) for _ in range(3)), nn.Conv2d(1, 2, 3)]
    head = nn.Sequential(*layers[:-1], nn.Unflatten(1, (1, 16, 16)), layers[-1], nn.Flatten())
    return DistributedDataParallel(head, bucket_cap_mb=0.3, **options)


def batch(step, size=8):
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(size, 16, generator=generator)


def average(model, step, scale=1.0, size=8):
    """Returns the averaged gradient of one batch."""
    model.zero_grad()
    (model(batch(step, size)).square().mean() * scale).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def digest(tensor):
    return hashlib.sha256(tensor.detach().numpy().tobytes()).hexdigest()[:16]


@contextlib.contextmanager
def in_force(action, model):
    job = Job(models=[model])
    before = action.state(job)
    with action.prepare(job, None) as prepared, action.apply(job, prepared):
        yield
    action.verify_undone(job, before)


@contextlib.contextmanager
def counted(sent):
    """Counts the bytes of the tensors that collectives are handed to send."""
    originals = {name: getattr(dist, name) for name in SENDS if hasattr(dist, name)}

    def counting(original):
        def send(*tensors, **options):
            sent.append(tensors[-1].numel() * tensors[-1].element_size())
            return original(*tensors, **options)

        return send

    for name, original in originals.items():
        setattr(dist, name, counting(original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def averages(action):
    """Looks at single averages. Each gradient twice: after the first step there are other buckets."""
    model, found, sent = make_model(), {}, []
    for name, scale in {"usual": 1.0, "huge": 1e12, "tiny": 1e-12}.items():
        alone = average(model, 1, scale)
        with in_force(action, model):
            average(model, 0, scale)
            action_only = average(model, 1, scale)
        found[name] = ((action_only - alone).norm() / alone.norm()).item()
        found[f"{name} is equal"] = torch.equal(action_only, alone)
        found[f"{name} digest"] = digest(action_only)
    with in_force(action, model):
        average(model, 0)
        with counted(sent):
            average(model, 1)
        found["sent_share"] = sum(sent) / (4 * alone.numel())
        average(model, 2, scale=float("inf") if dist.get_rank() == 0 else 1.0)
        bad = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        found["bad"] = not bad.isfinite().all()
        found["healed"] = bool(average(model, 3).isfinite().all() and average(model, 4).any())
    with in_force(action, model):  # two samples: of rank 2 on all ranks together
        average(model, 0, size=1)
        ours = average(model, 1, size=1)
    alone = average(model, 1, size=1)
    found["of low rank"] = ((ours - alone).norm() / alone.norm()).item()
    return found


def delivered(action, steps=200):
    """Returns how far the sum of what came is from the sum of what should have come, for one gradient that
    stays the same."""
    model = make_model()
    alone, total = average(model, 1), 0.0
    with in_force(action, model):
        for _ in range(steps):
            total = total + average(model, 1)
    return ((total / steps - alone).norm() / alone.norm()).item()


def trained(action=None, **options):
    """Trains, with the action on for four steps and off for four; returns weights and names of hooks."""
    model = make_model(**options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    job = Job(models=[model])
    hooks, before = set(), action and action.state(job)
    with contextlib.ExitStack() as preparation, contextlib.ExitStack() as application:
        prepared = preparation.enter_context(action.prepare(job, None)) if action else None
        for step in range(STEPS):
            if action and step % 4 == 0:
                application.close()
                action.verify_undone(job, before)
                if step % 8 == 0:
                    application.enter_context(action.apply(job, prepared))
                    hooks.add(comm_hook(model))
            average(model, step)
            optimizer.step()
    if action:
        action.verify_undone(job, before)
    return torch.cat([p.detach().flatten() for p in model.parameters()]), sorted(hooks)


def refusal(action, model):
    try:
        action.check(Job(models=[model]))
    except CannotApply as error:
        return str(error)
    return ""


torch.set_num_threads(1)
dist.init_process_group("gloo")
alone, _ = trained()
results = {}
random = torch.get_rng_state()
for name, action in ACTIONS.items():
    weights, hooks = trained(action)
    of_views, _ = trained(action, gradient_as_bucket_view=True)
    results[name] = {
        **averages(action),
        "hooks": hooks,
        "moved the generator": not torch.equal(torch.get_rng_state(), random),
        "weights": digest(weights),
        "weights of views": digest(of_views),
        "distance": ((weights - alone).norm() / alone.norm()).item(),
    }
for name in ("ddp-top-k-hook", "ddp-power-sgd-hook"):
    results[name]["delivered"] = delivered(ACTIONS[name])
static, _ = trained(ACTIONS["ddp-int8-hook"], static_graph=True)
sparse = DistributedDataParallel(nn.Sequential(nn.Embedding(4, 4, sparse=True)))
half = DistributedDataParallel(nn.Linear(2, 2).half())
refusals = {
    name: [refusal(action, make_model().module), refusal(action, sparse), refusal(action, half)]
    for name, action in ACTIONS.items()
}
small = refusal(ACTIONS["ddp-power-sgd-hook"], DistributedDataParallel(nn.Linear(8, 8)))
print(json.dumps({"results": results, "refusals": refusals, "small": small, "static": digest(static)}))
dist.destroy_process_group()
