"""Trains as a notebook does: in cells that lie in no file, after an earlier one has failed."""

import linecache
import sys

CELLS = [
    """
import time
import torch
from torch import nn
from torch.nn import functional
import diagnose

model = nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def get_batch():
    time.sleep(0.004)
    return torch.randn(16, 8), torch.randint(2, (16,))

def loss_of(out, y):
    time.sleep(0.004)
    return functional.cross_entropy(out, y)
""",
    """
diagnose.attach(sys.argv[1])
for step in range(120):
    x, y = get_batch()
    loss = loss_of(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
diagnose.detach()
""",
]

sys.last_type, sys.last_value = NameError, NameError("of an earlier cell")
names = {"__name__": "__main__", "sys": sys}
for number, cell in enumerate(CELLS):
    file = f"/tmp/ipykernel_7/{number}.py"
    linecache.cache[file] = (len(cell), None, cell.splitlines(keepends=True), file)
    exec(compile(cell, file, "exec"), names)
