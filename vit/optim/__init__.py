"""Optimizers, parameter groups and learning rate schedules."""

from vit.optim.create import create_optimizer
from vit.optim.groups import parameter_groups
from vit.optim.muon import Muon
from vit.optim.schedule import create_schedule

__all__ = ["Muon", "create_optimizer", "create_schedule", "parameter_groups"]
