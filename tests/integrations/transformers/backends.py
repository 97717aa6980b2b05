"""The backends that these tests, which are all on CPU, can run."""

import torch

from moetor import ExpertsInterface

ON_CPU = tuple(
    name for name in ExpertsInterface.names() if ExpertsInterface[name].machine_why_not(torch.device("cpu")) is None
)
