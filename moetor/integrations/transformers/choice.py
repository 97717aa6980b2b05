"""Which backend each experts module of a model runs, by the keys of its config.

A model's config has sub-configs, at any depth; "" is the config itself and "a.b" the sub-config b
of its sub-config a. A choice for a key holds for everything below that is not named otherwise.
The choice is a string on each experts module and nowhere else, so that models which share a
config object do not share it.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ...core.errors import BackendUnavailable, InvalidInput, unknown_name
from ...core.interface import ExpertsInterface
from .adapters import SEAM, facts_of, install, is_experts, runner_of

Choice = str | Mapping[str, str]

CHOICE = "_moetor_choice"


def require_known(choice: Choice) -> None:
    """Raise for a name that is no backend, or that no device of this machine can run."""
    for name in _as_dict(choice).values():
        backend = ExpertsInterface[name]
        for device in _devices():
            backend.load(device)
        reasons = {device: backend.machine_why_not(device) for device in _devices()}
        if all(reasons.values()):
            listed = "; ".join(f"{device}: {reason}" for device, reason in reasons.items())
            raise BackendUnavailable(f"experts backend {name!r} cannot run on this machine: {listed}")


def plan(model: PreTrainedModel, choice: Choice, otherwise: str | None = None) -> list[tuple[nn.Module, str]]:
    """Every experts module that the choice reaches, with its backend; nothing is changed.

    Args:
        otherwise: the backend of those that it does not reach and nobody chose one for before.

    Experts that moetor cannot read accept only "eager", which leaves them to transformers: they are
    not in the result.

    Raises:
        UnknownBackend: an unknown backend, or an unknown key.
        BackendUnavailable: a backend that no device of this machine can run.
        InvalidInput: a backend other than eager for a part without experts, or for experts that
            moetor cannot read.
    """
    require_known(choice)
    wanted = _as_dict(choice)
    experts = experts_by_key(model)
    keys = config_keys(model.config)
    name: str | None
    for key, name in wanted.items():
        if key not in keys:
            raise unknown_name("sub-config", key, [known or '""' for known in keys])
        # "auto" for the whole is what loading asks for when no backend was named
        if name != "eager" and (key, name) != ("", "auto") and not any(_under(own, key) for own in experts):
            where = f"sub-config {key!r} of {type(model).__name__}" if key else type(model).__name__
            raise InvalidInput(f"{where} has no experts that moetor runs; it accepts only 'eager', got {name!r}")
    planned = []
    for own, modules in experts.items():
        reaching = [key for key in wanted if _under(own, key)]
        name = wanted[max(reaching, key=len)] if reaching else otherwise
        for module in modules:
            if name is None or (not reaching and CHOICE in module.__dict__):
                continue
            if reason := unreadable(module):
                if name == "eager":
                    continue
                raise InvalidInput(
                    f"{reason}; experts_implementation='eager' leaves it to transformers"
                )  # before any module is changed
            planned.append((module, name))
    return planned


def unreadable(module: nn.Module) -> str | None:
    """Why moetor cannot run one experts module, or None."""
    try:
        facts_of(module)
    except InvalidInput as error:
        return str(error)
    return None


def set_backend(module: nn.Module, name: str) -> None:
    """Send one experts module through moetor, by the backend of this name."""
    facts_of(module)
    install(module)
    module.__dict__[CHOICE] = name


def backend_of(module: nn.Module) -> str:
    """The name on one experts module; transformers' own choice if moetor does not run it.

    A model that nobody attached has it from transformers: "moetor" is auto, "moetor:eager" is eager.
    """
    runner = runner_of(module)
    if runner == SEAM:
        ours: str = module.__dict__.get(CHOICE, "auto")
        return ours
    return runner.removeprefix(f"{SEAM}:")


def current(model: PreTrainedModel, name_of: Callable[[nn.Module], str] = backend_of) -> dict[str, str]:
    """The backend of every key, in the form that `plan` accepts.

    A key without experts of its own reads what all those below it run, if that is one name,
    else "eager".
    """
    running = {key: name_of(modules[0]) for key, modules in experts_by_key(model).items()}
    out = {}
    for key in config_keys(model.config):
        below = {name for own, name in running.items() if _under(own, key)}
        out[key] = running[key] if key in running else below.pop() if len(below) == 1 else "eager"
    return out


def config_keys(config: Any) -> dict[str, Any]:
    """Every key of a config and the config it names, the outermost first."""
    keys = {"": config}
    for name in getattr(config, "sub_configs", None) or {}:
        child = getattr(config, name, None)
        if child is None or isinstance(child, dict):
            continue
        for below, nested in config_keys(child).items():
            keys[f"{name}.{below}" if below else name] = nested
    return keys


def experts_by_key(model: PreTrainedModel) -> dict[str, list[nn.Module]]:
    """The experts modules of a model under the key of the config that they were built from."""
    keys = config_keys(model.config)
    found: dict[str, list[nn.Module]] = {}
    for key, module in _walk(model, "", keys):
        found.setdefault(key, []).append(module)
    return found


def _walk(module: nn.Module, key: str, keys: dict[str, Any]) -> Iterator[tuple[str, nn.Module]]:
    for child in module.children():
        if is_experts(child):
            yield key, child
        else:
            yield from _walk(child, _key_of(child, key, keys), keys)


def _key_of(module: nn.Module, outer: str, keys: dict[str, Any]) -> str:
    """The key of a nested model's config: the same object, else the only one of its class below."""
    if not isinstance(module, PreTrainedModel):
        return outer
    for key, config in keys.items():
        if config is module.config:
            return key
    alike = [key for key, config in keys.items() if type(config) is type(module.config) and _under(key, outer)]
    return alike[0] if len(alike) == 1 else outer


def _under(key: str, outer: str) -> bool:
    return not outer or key == outer or key.startswith(f"{outer}.")


def _as_dict(choice: Choice) -> dict[str, str]:
    if isinstance(choice, str):
        return {"": choice}
    if not isinstance(choice, Mapping) or not all(isinstance(name, str) for pair in choice.items() for name in pair):
        raise InvalidInput(
            "experts_implementation must be a backend's name or a dict from sub-config to name,"
            f" got {type(choice).__name__} {choice!r}"
        )
    return dict(choice)


def _devices() -> list[torch.device]:
    """Every device of this machine that torch can use, CPU first."""
    devices = [torch.device("cpu")]
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is not None:
        devices += [torch.device(accelerator.type, index) for index in range(torch.accelerator.device_count())]
    return devices
