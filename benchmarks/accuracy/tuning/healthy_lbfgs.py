"""Full-batch fitting with L-BFGS, whose closure is the step."""

import torch

torch.manual_seed(0)
inputs, wanted = torch.randn(600, 40), torch.randn(600, 1)
net = torch.nn.Sequential(torch.nn.Linear(40, 256), torch.nn.Tanh(), torch.nn.Linear(256, 1))
lbfgs = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=4, history_size=5)


def closure():
    lbfgs.zero_grad()
    error = torch.nn.functional.mse_loss(net(inputs), wanted)
    error.backward()
    return error


for _ in range(120):  # the training loop
    lbfgs.step(closure)
