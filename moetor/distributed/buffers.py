"""Memory that processes share for a kernel, freed on purpose."""

from ..kernels.external.buffers import free_buffers

__all__ = ["free_buffers"]
