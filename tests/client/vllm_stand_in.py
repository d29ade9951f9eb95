"""Stands in for the parts of vLLM that the connector sees: classes of its names, and an engine that computes by steps.

tests/engines has the real one, which is too heavy to be everywhere.
"""

import enum
import sys
import types
from types import SimpleNamespace

import numpy as np


class KVConnectorRole(enum.Enum):
    SCHEDULER = 0
    WORKER = 1


class KVConnectorMetadata:
    pass


class KVConnectorWorkerMetadata:
    pass


class KVConnectorBase_V1:  # noqa: N801 - vLLM's name
    def __init__(self, vllm_config, role, kv_cache_config):
        self._kv_transfer_config = vllm_config.kv_transfer_config
        self._metadata = None

    def bind_connector_metadata(self, metadata):
        self._metadata = metadata

    def clear_connector_metadata(self):
        self._metadata = None

    def has_connector_metadata(self):
        return self._metadata is not None

    def _get_connector_metadata(self):
        return self._metadata


def install() -> None:
    """Makes `import vllm.distributed...base` find the classes above."""
    name = ""
    for part in "vllm.distributed.kv_transfer.kv_connector.v1.base".split("."):
        name = f"{name}.{part}" if name else part
        sys.modules.setdefault(name, types.ModuleType(name))
    base = sys.modules[name]
    for stand_in in (KVConnectorRole, KVConnectorMetadata, KVConnectorWorkerMetadata, KVConnectorBase_V1):
        setattr(base, stand_in.__name__, stand_in)


def spec(kind: str, **fields):
    """Returns a cache's form whose class has vLLM's name."""
    made = type(kind, (SimpleNamespace,), {})(block_size=16, num_kv_heads=3, head_size=4, sliding_window=None)
    made.__dict__.update(fields)
    return made


class Module:
    """An attention layer of a backend."""

    def __init__(self, backend: str):
        self.get_attn_backend = lambda: SimpleNamespace(get_name=lambda: backend)
        self.isa = "vec"


def config(layers: int, extra: dict, *, rank=0, ranks=1, backend="FLASH_ATTN", specs=None, replicas=1, dtype="auto",
           **parallel):
    """Returns vLLM's configuration and that of its caches, for `layers` layers of one attention each."""
    names = [f"model.layers.{i}.self_attn.attn" for i in range(layers)]
    specs = specs or {name: spec("FullAttentionSpec", num_kv_heads=3 * replicas // ranks) for name in names}
    group = SimpleNamespace(layer_names=list(specs), enable_kv_transfer=True,
                            kv_cache_spec=SimpleNamespace(kv_cache_specs=specs))
    return (SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra),
        parallel_config=SimpleNamespace(**({"rank": rank, "tensor_parallel_size": ranks} | parallel)),
        cache_config=SimpleNamespace(cache_dtype=dtype),
        compilation_config=SimpleNamespace(static_forward_context={name: Module(backend) for name in specs}),
        model_config=SimpleNamespace(max_model_len=512, hf_config=SimpleNamespace(
            model_type="llama", num_hidden_layers=layers, kv_lora_rank=8))),
        SimpleNamespace(kv_cache_groups=[group], kv_tp_replicas=replicas))


class Engine:
    """A scheduler and ranks of a connector, whose caches are [blocks, heads, 16 tokens, K and V]."""

    BLOCK = 16

    def __init__(self, connector, extra: dict, layers: int, heads: int, dim: int, *, ranks=1, dtype=np.float32):
        self.layers, self.heads, self.dim = layers, heads, dim
        self.scheduler = connector(*self._of(extra, 0, ranks, KVConnectorRole.SCHEDULER))
        self.ranks, self.caches = [], []
        for rank in range(ranks):
            made = connector(*self._of(extra, rank, ranks, KVConnectorRole.WORKER))
            caches = {f"model.layers.{i}.self_attn.attn": np.zeros((64, heads // ranks, self.BLOCK, 2 * dim), dtype)
                      for i in range(layers)}
            made.register_kv_caches(caches)
            self.ranks.append(made)
            self.caches.append(caches)
        self.free = list(range(63, 0, -1))
        self.finished: set[str] = set()

    def _of(self, extra, rank, ranks, role):
        vllm_config, caches = config(self.layers, extra, rank=rank, ranks=ranks)
        return vllm_config, role, caches

    @staticmethod
    def request(request_id: str, prompt: list[int], params=None, **fields):
        return SimpleNamespace(request_id=request_id, prompt_token_ids=prompt, kv_transfer_params=params,
                               output_token_ids=[], **fields)

    def blocks(self, tokens: int) -> list[int]:
        return [self.free.pop() for _ in range(-(-tokens // self.BLOCK))]

    def store(self, blocks: list[int], kv: list, begin: int, end: int) -> None:
        """Computes tokens [begin, end): `kv` is K and V [tokens, heads, dim] of each layer."""
        own = self.heads // len(self.ranks)
        for rank, caches in enumerate(self.caches):
            for i, cache in enumerate(caches.values()):
                for t in range(begin, end):
                    rows = [part[t, rank * own:(rank + 1) * own] for part in kv[i]]
                    cache[blocks[t // self.BLOCK], :, t % self.BLOCK] = np.concatenate(rows, axis=1)

    def step(self, new=(), cached=(), preempted=(), resumed=()) -> set[str]:
        """Runs a step. `new` and `cached` are (id, new blocks, computed before, tokens now, compute). Returns what
        all ranks have sent."""
        output = SimpleNamespace(
            preempted_req_ids=set(preempted),
            scheduled_new_reqs=[SimpleNamespace(req_id=r, block_ids=(b,), num_computed_tokens=c)
                                for r, b, c, _, _ in new],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[x[0] for x in cached], new_block_ids=[(x[1],) if x[1] else None for x in cached],
                num_computed_tokens=[x[2] for x in cached], resumed_req_ids=set(resumed)),
            num_scheduled_tokens={x[0]: x[3] for x in (*new, *cached)})
        plan = self.scheduler.build_connector_meta(output)
        for x in (*new, *cached):
            x[4]()
        done = []
        for rank in self.ranks:
            rank.handle_preemptions(plan)
            rank.bind_connector_metadata(plan)
            for name in self.caches[0]:
                rank.save_kv_layer(name, None, None)
            rank.wait_for_save()
            sent, _ = rank.get_finished(set())
            report = rank.build_connector_worker_meta()
            done.append(sent or set())
            self.scheduler.update_connector_output(SimpleNamespace(finished_sending=None,
                                                                   kv_connector_worker_meta=report))
            rank.clear_connector_metadata()
        self._partly = getattr(self, "_partly", {})
        for sent in done:
            for r in sent:
                self._partly[r] = self._partly.get(r, 0) + 1
        sent = {r for r, n in self._partly.items() if n == len(self.ranks)}
        for r in sent:
            del self._partly[r]
        self.scheduler.update_connector_output(SimpleNamespace(finished_sending=sent, kv_connector_worker_meta=None))
        return sent
