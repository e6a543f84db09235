"""One torch thread for each test process: the tensors are small, and pytest-xdist runs a process per core."""

import torch

torch.set_num_threads(1)
