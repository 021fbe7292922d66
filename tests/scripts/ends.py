"""Trains a tiny model, prints every loss in full, and ends in the way it is told to.

python ends.py [STEPS] [WAY]
"""

import os
import sys
import time

import torch

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 30
WAY = sys.argv[2] if len(sys.argv) > 2 else "returns"

torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


def end():
    time.sleep(0.8)  # records are written twice a second
    if WAY == "raises":
        raise ValueError("the data ran out")
    if WAY == "exits with a text":
        sys.exit("gave up")
    if WAY == "exits at once":
        os._exit(7)
    if WAY == "crashes":
        import ctypes

        ctypes.string_at(0)
    if WAY == "waits":
        time.sleep(60)


for step in range(STEPS):
    input_BF = torch.randn(4, 8)
    optimizer.zero_grad()
    loss = model(input_BF).square().mean()
    loss.backward()
    optimizer.step()
    print(step, loss.item().hex(), flush=True)
    time.sleep(0.002)
print("trained", flush=True)
end()
