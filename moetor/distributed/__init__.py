"""Experts and processes.

>>> free_buffers()  # what Mega MoE's kernel keeps between calls; captured graphs that used it are dead
"""

from .buffers import free_buffers

__all__ = ["free_buffers"]
