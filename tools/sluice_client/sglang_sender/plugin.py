"""The plugin that SGLang loads in each of its processes: it registers the transfer backend `sluice`.

It does so only where SGLANG_SLUICE is set, so that an SGLang that has it installed and does not use it is as before.
"""

import os

from sluice_client.sglang_sender.settings import VARIABLE, read_settings

BACKEND = "sluice"
_UTILS = "sglang.srt.disaggregation.utils"
_QUEUE = "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue"


def register() -> None:
    """Registers the backend and the hooks. Raises ValueError for wrong settings."""
    if VARIABLE not in os.environ:
        return
    read_settings()
    from sglang.srt.arg_groups.choices import (  # noqa: PLC0415
        DISAGG_TRANSFER_BACKEND_CHOICES, add_disagg_transfer_backend_choices)
    from sglang.srt.disaggregation.utils import TransferBackend  # noqa: PLC0415
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415

    if BACKEND not in DISAGG_TRANSFER_BACKEND_CHOICES:
        add_disagg_transfer_backend_choices([BACKEND])
    _add_member(TransferBackend)
    HookRegistry.register(f"{_UTILS}.get_kv_class", _class_of, HookType.AROUND)
    HookRegistry.register(f"{_QUEUE}._init_kv_manager", _attach, HookType.AFTER)
    HookRegistry.register(f"{_QUEUE}.create_sender", _with_request, HookType.AROUND)


def _add_member(backends) -> None:
    """Makes TransferBackend("sluice") a member. The enumeration has no other way to take one more."""
    member = object.__new__(backends)
    member._name_, member._value_ = BACKEND.upper(), BACKEND
    backends._missing_ = classmethod(lambda cls, value: member if value == BACKEND else None)


def _class_of(original, transfer_backend, class_type):
    """get_kv_class: the classes of this backend; those of others are SGLang's."""
    if transfer_backend.value != BACKEND or class_type.value == "kvargs":
        return original(transfer_backend, class_type)
    from sluice_client.sglang_sender import backend  # noqa: PLC0415
    return {"manager": backend.SluiceKVManager, "sender": backend.SluiceKVSender,
            "bootstrap_server": backend.NoBootstrapServer}.get(class_type.value)


def _attach(manager, queue):
    """PrefillBootstrapQueue._init_kv_manager: gives the manager the pool itself, whose KVArgs has addresses alone."""
    from sluice_client.sglang_sender.backend import SluiceKVManager  # noqa: PLC0415
    if isinstance(manager, SluiceKVManager):
        from sglang.srt.runtime_context import get_parallel  # noqa: PLC0415
        manager.attach(queue, get_parallel())


def _with_request(original, queue, req, *args, **kwargs):
    """PrefillBootstrapQueue.create_sender: gives the manager the request, before SGLang cuts its max_new_tokens to 1."""
    queue.kv_manager.request = req
    try:
        return original(queue, req, *args, **kwargs)
    finally:
        queue.kv_manager.request = None
