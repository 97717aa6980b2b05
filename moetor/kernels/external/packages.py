"""Libraries of kernels, loaded once: an installed package first, else from the hub when somebody selects it."""

import importlib
import importlib.util
import logging
from types import ModuleType

from ...core.errors import BackendUnavailable
from .machine import Machine
from .requirements import Library, distribution_of

_logger = logging.getLogger("moetor")
_loaded: dict[str, ModuleType] = {}
_described: dict[str, str] = {}
_failed: dict[str, str] = {}


def not_loaded(library: Library, machine: Machine) -> str | None:
    """Load what is installed; why the library is not there, or None. Nothing is downloaded for the asking."""
    if library.module in _loaded:
        return None
    if library.module in _failed:
        return _failed[library.module]
    distribution = distribution_of(library, machine)
    if distribution is None:
        return (
            f"has not loaded {library.hub} yet; ExpertsInterface.load(name) does, or choosing the backend for a model"
        )
    try:
        module = importlib.import_module(library.module)
    except Exception as error:  # whatever an import of native code raises
        _failed[library.module] = f"cannot import {library.module}: {type(error).__name__}: {error}"
        return _failed[library.module]
    _keep(library, module, f"{distribution} {machine.versions[distribution]}")
    return None


def fetch(library: Library, machine: Machine) -> None:
    """Load the library, from the hub if it is not installed and the package `kernels` is.

    Raises:
        BackendUnavailable: the hub's kernel cannot be loaded.
    """
    if library.module in _loaded or distribution_of(library, machine) or "kernels" not in machine.versions:
        return
    _logger.info("loading %s from the hub, by kernels %s", library.hub, machine.versions["kernels"])
    try:
        module = importlib.import_module("kernels").get_kernel(library.hub)
    except Exception as error:  # network, missing build, native code
        raise BackendUnavailable(f"cannot load {library.hub}: {type(error).__name__}: {error}") from error
    _keep(library, module, library.hub)


def loaded(library: Library) -> ModuleType:
    """The module; `not_loaded` or `fetch` has been called before."""
    if library.module not in _loaded:
        raise BackendUnavailable(f"{library.module} is not loaded; ExpertsInterface.load(name) loads it")
    return _loaded[library.module]


def is_loaded(library: Library) -> bool:
    """Whether the module is here."""
    return library.module in _loaded


def described(library: Library) -> str:
    """What was loaded, and from where: "sonic-moe 0.1.2 from /…/sonicmoe/__init__.py"."""
    return _described[library.module]


def _keep(library: Library, module: ModuleType, what: str) -> None:
    _loaded[library.module] = module
    _described[library.module] = f"{what} from {getattr(module, '__file__', None) or 'memory'}"
    _logger.info("loaded %s", _described[library.module])
