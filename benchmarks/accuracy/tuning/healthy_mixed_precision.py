"""bfloat16 autocast with an average of the weights by torch's own AveragedModel."""

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU(), torch.nn.Linear(512, 512))
average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.99))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
x = torch.randn(256, 512)
for step in range(140):  # the training loop
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = (net(x) - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 4 == 0:
        average.update_parameters(net)
