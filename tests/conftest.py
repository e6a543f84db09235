"""One torch thread for each test process, as pytest-xdist runs one per core, and Triton's interpreter for kernels."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # counts only before Triton is first imported, by whatever test

import torch

torch.set_num_threads(1)
