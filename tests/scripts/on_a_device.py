"""Trains on the CPU in a process whose `torch.cuda` says that it has a device, as far as settings go.

    on_a_device.py SECONDS ALLOCATOR UUID

It trains at least so long, and on until nobody reads the device's driver any more, but not for ever.
ALLOCATOR is a JSON file: what `torch.cuda.memory_stats_as_nested_dict` returns, one after the other.
"""

import itertools
import json
import sys
import threading
import time
from types import SimpleNamespace

import torch

seconds, allocator, uuid = float(sys.argv[1]), sys.argv[2], sys.argv[3]
with open(allocator) as file:
    states = json.load(file)
told = itertools.chain(states, itertools.repeat(states[-1]))
properties = SimpleNamespace(
    name="NVIDIA A100-SXM4-80GB", major=8, minor=0, total_memory=80 << 30, uuid=uuid, pci_bus_id=0x65
)
torch.cuda.is_initialized = lambda: True
torch.cuda.current_device = lambda: 0
torch.cuda.get_device_name = lambda: properties.name
torch.cuda.get_device_properties = lambda index: properties
torch.cuda.memory_stats_as_nested_dict = lambda index: next(told)

torch.manual_seed(0)
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
begun = time.monotonic()


def is_read():
    return any(thread.name == "diagnose-nvml" for thread in threading.enumerate())


while (took := time.monotonic() - begun) < seconds or (is_read() and took < 60):
    loss = model(torch.ones(64, 64)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    time.sleep(0.002)
print(f"{loss.item():.3f}")
