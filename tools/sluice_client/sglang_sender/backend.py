"""The classes that SGLang makes for the transfer backend `sluice`. Only a process of SGLang imports this file."""

from concurrent.futures import ThreadPoolExecutor

from sglang.srt.disaggregation.base.conn import (BaseKVBootstrapServer, BaseKVManager, BaseKVSender, KVPoll,
                                                 KVTransferMetric)

from sluice_client.hand_off.reservation import WORKERS
from sluice_client.sglang_sender.hand_over import Engine, HandOver
from sluice_client.sglang_sender.pools import engine_shape, keys_transformed, pool_caches, refused
from sluice_client.sglang_sender.ranks import Ranks
from sluice_client.sglang_sender.settings import read_settings


class SluiceKVManager(BaseKVManager):
    """What all senders of a scheduler share. Raises ValueError at the start for an engine whose caches it cannot send."""

    def __init__(self, args, disaggregation_mode, server_args, is_mla_backend=False):
        super().__init__(args, disaggregation_mode, server_args, is_mla_backend)
        if disaggregation_mode.value != "prefill":
            raise ValueError("--disaggregation-transfer-backend sluice is for prefill nodes: the decode node is Sluice's")
        self.kv_args = args
        self.settings = read_settings()
        self.engine: Engine | None = None
        # The request for which SGLang is making a sender, which it tells the sender nothing of but its room.
        self.request = None

    def attach(self, queue, parallel) -> None:
        """Takes the pool of SGLang's PrefillBootstrapQueue; `parallel` is its ParallelContext."""
        scheduler, pool = queue.scheduler, queue.token_to_kv_pool
        for name in ("pp_size", "attn_cp_size", "attn_dcp_size"):
            if getattr(parallel, name) > 1:
                raise refused(name, getattr(parallel, name), "give 1, and divide the model by tensor parallelism alone")
        if getattr(scheduler, "sliding_window_size", None):
            raise refused("the sliding window", scheduler.sliding_window_size, "take a model without one")
        ranks = Ranks(scheduler.attn_tp_cpu_group)
        transformed = False
        if type(pool).__name__.startswith("DSA"):
            import torch  # noqa: PLC0415 - absent where stand-ins are tested
            if torch.version.hip:
                raise refused("the order of index keys", "that of ROCm's kernels", "take a GPU of NVIDIA")
            transformed = keys_transformed(scheduler.tp_worker.model_runner.model.modules())
        self.engine = Engine(
            self.settings, engine_shape(pool, scheduler.model_config, ranks.number), ranks,
            pool_caches(pool, transformed), pool.page_size,
            ThreadPoolExecutor(WORKERS, thread_name_prefix="sluice-calls"))

    def register_to_bootstrap(self):
        pass  # The decode node is named by SGLANG_SLUICE.


class SluiceKVSender(BaseKVSender):
    """Sends one request's caches. Its poll() is called on all ranks together."""

    def __init__(self, mgr, bootstrap_addr, bootstrap_room, req_has_disagg_prefill_dp_rank=False):
        self.kv_mgr = mgr
        self.bootstrap_room = bootstrap_room
        self._early_send_wait_event = None  # SGLang sets it for cached prefixes that a forward may still write.
        self._hand_over = HandOver(mgr.engine, mgr.request)

    def init(self, num_kv_indices, aux_index=None):
        pass

    def should_send_kv_chunk(self, num_pages, last_chunk):
        return num_pages > 0 or last_chunk

    def send(self, kv_indices, state_indices=None, num_kv_tokens=None):
        event, self._early_send_wait_event = self._early_send_wait_event, None
        if event is not None:
            event.wait()  # It makes this thread's stream wait, not the thread.
        self._hand_over.send([int(page) for page in kv_indices], num_kv_tokens)

    def mark_prefill_complete(self):
        pass  # Room at the decode node has been reserved since before the prefill.

    def poll(self) -> KVPoll:
        return int(self._hand_over.poll())

    def get_transfer_metric(self):
        return KVTransferMetric(transfer_latency_s=self._hand_over.seconds())

    def failure_exception(self):
        # SGLang calls it on all ranks when one has failed.
        self._hand_over.abort("another rank of the prefill node could not send its caches")
        raise RuntimeError(self._hand_over.error)

    def abort(self):
        self._hand_over.abort("the prefill node gave the request up")


class NoBootstrapServer(BaseKVBootstrapServer):
    """Nothing listens at the bootstrap port: decode legs meet their prefill legs at the decode node."""

    def __init__(self, host, port):
        pass
