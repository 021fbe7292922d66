# Teaches a walking robot that only feels its joints to act like a teacher that sees the terrain.
import argparse
import itertools

import torch
from torch import nn

FEELS, SEES, ACTS = 48, 187, 12
FEET = 4
HISTORY = 16
FRAMES = 12000


def mlp(*widths):
    layers = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ELU()]
    return nn.Sequential(*layers[:-1])


def record_walk():
    """One long walk on rough ground, at 50 frames a second."""
    time = torch.arange(FRAMES)[:, None] / 50
    felt = torch.sin(time * torch.linspace(2, 20, FEELS)) + 0.1 * torch.randn(FRAMES, FEELS)
    seen = 0.2 * torch.randn(FRAMES, SEES)
    touching = (torch.sin(9 * time + torch.arange(FEET) * 1.5) > 0).float()
    effort = felt[:, :ACTS].square().sum(1, keepdim=True)
    return felt, seen, touching, effort


def write_log(touching, effort):
    """The same walk in the form in which the robot's own logger gives it."""
    return [
        {"frame": frame, "contact": contact, "effort": work}
        for frame, (contact, (work,)) in enumerate(zip(touching.tolist(), effort.tolist(), strict=False))
    ]


def running_means(values, frames=50):
    total = torch.cat([torch.zeros(1, values.shape[1]), values.double().cumsum(0).float()])
    ends = torch.arange(1, len(values) + 1)
    return (total[ends] - total[(ends - frames).clamp(min=0)]) / frames


def gait_before(log, end, frames):
    down, effort = [0.0] * FEET, 0.0
    window = log[max(0, end - frames) : end]
    for entry in window:
        for foot, touches in enumerate(entry["contact"]):
            down[foot] += touches
        effort += entry["effort"]
    return [*(total / len(window) for total in down), effort / len(window)]


def batches(walk, rows, recall):
    felt, seen, touching, effort = walk
    histories = felt.unfold(0, HISTORY, 1)
    gaits = running_means(torch.cat([touching, effort], 1))
    log = write_log(touching, effort) if recall else []
    while True:
        last = torch.randint(HISTORY, FRAMES, (rows,))
        if recall:
            gait = torch.tensor([gait_before(log, end + 1, recall) for end in last.tolist()])
        else:
            gait = gaits[last]
        history = histories[last - HISTORY + 1].flatten(1)
        yield torch.cat([history, gait], 1), torch.cat([felt[last], seen[last]], 1)


@torch.no_grad()
def ask(teacher, everything):
    return teacher(everything)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rows", type=int, default=384)
    parser.add_argument("--recall", type=int, default=0, help="frames of the log that describe the gait")
    parser.add_argument("--teacher-layers", type=int, default=2)
    parser.add_argument("--inline-labels", action="store_true", help="take the labels in the training step")
    args = parser.parse_args()

    torch.manual_seed(23)
    teacher = mlp(FEELS + SEES, *[512] * (args.teacher_layers + 1), ACTS)
    student = mlp(HISTORY * FEELS + FEET + 1, 512, 512, 256, ACTS)
    optimizer = torch.optim.Adam(student.parameters(), lr=3e-4, fused=True)
    feed = batches(record_walk(), args.rows, args.recall)

    for step in range(1, args.steps + 1):  # the training loop
        proprioception, everything = next(feed)
        wanted = teacher(everything) if args.inline_labels else ask(teacher, everything)
        loss = nn.functional.mse_loss(student(proprioception), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step}: imitation error {loss.item():.5f}")


if __name__ == "__main__":
    main()
