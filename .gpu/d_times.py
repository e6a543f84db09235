"""Steps of the table's launches and folds of whole heads: no flush, mixed, batch 256 (and 8)."""
import multiprocessing as mp, os, sys, time
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from lib import *
from quantize_state.evals.speed import bench
from quantize_state.kernels import sequence, launch
NAMES = ("nemotron-3-super", "qwen3.5-4b", "glm-5.3-flash")
import torch
