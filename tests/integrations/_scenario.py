"""Arguments of the programs of this folder, ``SCENARIO FOLDER``: a job, and where each rank writes what it found."""

import os
import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parent.parent))  # helpers of tests, for the programs

GPU = " on a GPU"
"""End of the name of a scenario whose ranks share a GPU."""
SCENARIO, FOLDER = sys.argv[1].removesuffix(GPU), Path(sys.argv[2])
ON_GPU = sys.argv[1].endswith(GPU)
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
if ON_GPU:
    os.environ["LOCAL_RANK"] = "0"  # each rank is the only one of its node, so that all have the first GPU
