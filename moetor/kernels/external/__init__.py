"""Kernels of other projects: what they need of a machine, and where they are found.

`machine` holds the facts, `requirements` the sentences about them, `packages` the libraries.
"""
