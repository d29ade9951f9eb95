"""Stands in for the parts of SGLang that the sender sees: classes of its names, and a scheduler that computes by chunks.

tests/engines has the real one, which is too heavy to be everywhere. test_sglang_source.py compares the names, the values
and the layouts here with SGLang's source where that is found.
"""

import enum
import functools
import pkgutil
import sys
import types
from abc import ABC
from types import SimpleNamespace

import numpy as np


class KVPoll:
    Failed, Bootstrapping, WaitingForInput, Transferring, Success = range(5)


class BaseKVManager(ABC):
    def __init__(self, args, disaggregation_mode, server_args, is_mla_backend=False):
        pass


class BaseKVSender(ABC):
    def pop_decode_prefix_len(self):
        return 0

    def get_max_transfer_tokens(self):
        return None

    def clear(self):
        pass


class BaseKVBootstrapServer(ABC):
    pass


class KVTransferMetric(SimpleNamespace):
    pass


class TransferBackend(enum.Enum):
    MOONCAKE = "mooncake"
    FAKE = "fake"


class KVClassType(enum.Enum):
    KVARGS = "kvargs"
    MANAGER = "manager"
    SENDER = "sender"
    RECEIVER = "receiver"
    BOOTSTRAP_SERVER = "bootstrap_server"


class DisaggregationMode(enum.Enum):
    PREFILL = "prefill"
    DECODE = "decode"


def get_kv_class(transfer_backend, class_type):
    if class_type is KVClassType.KVARGS:
        return SimpleNamespace
    if transfer_backend is TransferBackend.FAKE:
        return "fake"
    raise ValueError(f"Unsupported transfer backend: {transfer_backend}")


class HookType(enum.Enum):
    AFTER = "after"
    AROUND = "around"


class HookRegistry:
    """Applies a hook at once, where SGLang's own waits until all plugins have run."""

    originals: list = []

    @classmethod
    def register(cls, target, hook, hook_type=HookType.AFTER):
        path, name = target.rsplit(".", 1)
        owner = pkgutil.resolve_name(path)
        original = getattr(owner, name)
        cls.originals.append((owner, name, original))

        @functools.wraps(original)
        def around(*args, **kwargs):
            return hook(original, *args, **kwargs)

        @functools.wraps(original)
        def after(*args, **kwargs):
            result = original(*args, **kwargs)
            changed = hook(result, *args, **kwargs)
            return result if changed is None else changed

        setattr(owner, name, around if hook_type is HookType.AROUND else after)

    @classmethod
    def reset(cls):
        while cls.originals:
            setattr(*cls.originals.pop())


class PrefillBootstrapQueue:
    """As SGLang's makes its manager and senders."""

    def __init__(self, scheduler, pool, transfer_backend):
        self.scheduler, self.token_to_kv_pool, self.transfer_backend = scheduler, pool, transfer_backend
        self.kv_manager = self._init_kv_manager()

    def _class(self, kind):
        return sys.modules["sglang.srt.disaggregation.utils"].get_kv_class(self.transfer_backend, kind)

    def _init_kv_manager(self):
        return self._class(KVClassType.MANAGER)(self._class(KVClassType.KVARGS)(), DisaggregationMode.PREFILL, None, False)

    def create_sender(self, req, num_kv_heads):
        req.disagg_kv_sender = self._class(KVClassType.SENDER)(
            mgr=self.kv_manager, bootstrap_addr="h:1", bootstrap_room=req.bootstrap_room,
            req_has_disagg_prefill_dp_rank=False)
        req.sampling_params.max_new_tokens = 1
        return True


def install() -> None:
    """Makes `import sglang.srt...` find the classes above."""
    parallel = SimpleNamespace(pp_size=1, attn_cp_size=1, attn_dcp_size=1)
    choices = ["mooncake", "fake"]
    for name, members in {
            "sglang.srt.disaggregation.base.conn": [BaseKVManager, BaseKVSender, BaseKVBootstrapServer, KVPoll,
                                                    KVTransferMetric],
            "sglang.srt.disaggregation.utils": [TransferBackend, KVClassType, DisaggregationMode, get_kv_class],
            "sglang.srt.disaggregation.prefill": [PrefillBootstrapQueue],
            "sglang.srt.plugins.hook_registry": [HookRegistry, HookType],
            "sglang.srt.arg_groups.choices": [], "sglang.srt.runtime_context": []}.items():
        path, parent = "", None
        for part in name.split("."):
            path = f"{path}.{part}" if path else part
            module = sys.modules.setdefault(path, types.ModuleType(path))
            if parent is not None:
                setattr(parent, part, module)
            parent = module
        for member in members:
            setattr(module, member.__name__, member)
    sys.modules["sglang.srt.arg_groups.choices"].DISAGG_TRANSFER_BACKEND_CHOICES = choices
    sys.modules["sglang.srt.arg_groups.choices"].add_disagg_transfer_backend_choices = choices.extend
    sys.modules["sglang.srt.runtime_context"].get_parallel = lambda: parallel


class MHATokenToKVPool:
    """K and V of `heads` heads, [slots, heads, dim] in each layer."""

    kv_cache_layout, is_quantized_kv_cache, start_layer = "nhd", False, 0

    def __init__(self, layers, heads, dim, page_size, slots=1024, dtype=np.float32):
        self.layer_num, self.head_num, self.head_dim, self.v_head_dim = layers, heads, dim, dim
        self.page_size, self.dtype = page_size, dtype
        self.k_buffer, self.v_buffer = ([np.zeros((slots + page_size, heads, dim), dtype) for _ in range(layers)]
                                        for _ in range(2))


class MLATokenToKVPool:
    """Latent entries, [slots, 1, dim] in each layer."""

    start_layer = 0

    def __init__(self, layers, rank, rope, page_size, pages, dtype, entry=None):
        self.layer_num, self.kv_lora_rank, self.page_size, self.dtype = layers, rank, page_size, dtype
        self.kv_cache_dim = entry or rank + rope
        self.kv_buffer = [np.zeros((pages * page_size, 1, self.kv_cache_dim), dtype) for _ in range(layers)]


class DSATokenToKVPool(MLATokenToKVPool):
    """And index keys: a page's values, then its scales."""

    index_kpool = 1

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.index_page_size = self.page_size
        pages = self.kv_buffer[0].shape[0] // self.page_size
        self.index_k_with_scale_buffer = [np.zeros((pages, self.page_size * 132), np.uint8)
                                          for _ in range(self.layer_num)]


def model_config(layers, heads, context=512):
    """Returns SGLang's configuration of a model."""
    config = SimpleNamespace(model_type="llama", num_hidden_layers=layers)
    return SimpleNamespace(hf_config=config, hf_text_config=config, context_len=context,
                           get_total_num_kv_heads=lambda: heads)


def request(rid, prompt, room=None, **fields):
    """Returns a request of SGLang's."""
    sampling = SimpleNamespace(max_new_tokens=fields.pop("max_new_tokens", 16),
                               custom_params=fields.pop("custom_params", None))
    return SimpleNamespace(rid=rid, origin_input_ids=prompt, bootstrap_room=room, sampling_params=sampling, output_ids=[],
                           input_embeds=None, lora_id=None, multimodal_inputs=None, **fields)


class Scheduler:
    """One rank's scheduler, as far as it deals with senders."""

    def __init__(self, pool, layers, heads, group=None, sliding_window_size=None, modules=()):
        self.pool, self.start = pool, {}
        model = SimpleNamespace(modules=lambda: iter(modules))
        scheduler = SimpleNamespace(
            attn_tp_cpu_group=group, sliding_window_size=sliding_window_size, model_config=model_config(layers, heads),
            tp_worker=SimpleNamespace(model_runner=SimpleNamespace(model=model)))
        self.queue = PrefillBootstrapQueue(scheduler, pool, TransferBackend("sluice"))

    def create(self, req):
        self.queue.create_sender(req, self.pool.head_num)

    def send(self, req, slots, end, last=False):
        """Sends what is computed before token `end`, as _send_kv_chunk does. `slots` are those of the prompt's tokens."""
        page, start = self.pool.page_size, self.start.get(req.rid, 0)
        if not last:
            end -= end % page
        if end < start:
            return
        pages = (slots[start:end] // page)[::page].astype(np.int32)
        if req.disagg_kv_sender.should_send_kv_chunk(len(pages), last):
            req.disagg_kv_sender.send(pages, [] if last else None, num_kv_tokens=end - start)
        self.start[req.rid] = end
