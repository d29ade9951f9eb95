"""The class that vLLM loads. It hands each of vLLM's calls to the half of its role."""

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole

from sluice_client.vllm_connector.engine import check_engine
from sluice_client.vllm_connector.hand_offs import HandOffs
from sluice_client.vllm_connector.plan import RankReport, StepPlan
from sluice_client.vllm_connector.rank import Rank
from sluice_client.vllm_connector.settings import read_settings


class SluiceConnector(KVConnectorBase_V1):
    """Hands prompts over to Sluice. Raises ValueError at the start for an engine whose caches it cannot send."""

    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        settings = read_settings(dict(self._kv_transfer_config.kv_connector_extra_config or {}))
        shape = check_engine(vllm_config, kv_cache_config)
        scheduler = role == KVConnectorRole.SCHEDULER
        self._hand_offs = HandOffs(settings, shape) if scheduler else None
        self._rank = None if scheduler else Rank(settings, shape, vllm_config, kv_cache_config)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config) -> bool:
        return True  # save_kv_layer must run between the layers of a step.

    # The scheduler's half.

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        # Nothing is ever loaded. None lets a prompt wait until room for it is reserved.
        return (0 if self._hand_offs.may_run(request) else None), False

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        pass

    def build_connector_meta(self, scheduler_output) -> StepPlan:
        return self._hand_offs.plan(scheduler_output)

    def request_finished(self, request, block_ids):
        return self._hand_offs.finish(request)

    def update_connector_output(self, connector_output):
        report = connector_output.kv_connector_worker_meta
        errors = report.errors if isinstance(report, RankReport) else {}
        self._hand_offs.sent(connector_output.finished_sending or (), errors)

    def has_pending_push_work(self) -> bool:
        return self._hand_offs.sending()

    # A rank's half.

    def register_kv_caches(self, kv_caches):
        self._rank.register(kv_caches)

    def handle_preemptions(self, kv_connector_metadata):
        self._rank.drop(kv_connector_metadata.dropped)

    def start_load_kv(self, forward_context, **kwargs):
        pass

    def wait_for_layer_load(self, layer_name):
        pass

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        self._rank.save(layer_name, self._get_connector_metadata().parts)

    def wait_for_save(self):
        # Blocks are kept until get_finished has named their request, so the step need not wait.
        if self.has_connector_metadata():
            self._rank.end(self._get_connector_metadata())

    def get_finished(self, finished_req_ids):
        return self._rank.finished() or None, None

    def build_connector_worker_meta(self):
        errors = self._rank.take_errors()
        return RankReport(errors) if errors else None

    def shutdown(self):
        for half in (self._hand_offs, self._rank):
            if half is not None:
                half.close()
