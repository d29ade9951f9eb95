"""What the sender takes from SGLang, compared with SGLang's own source: names, signatures, values and layouts.

Runs only where the source is: SGLANG_SOURCE names the folder that holds the package `sglang`, else an installed one is
taken, such as tests/engines has. The source is read and not run, so neither torch nor SGLang's requirements are needed.
"""

import ast
import os
from pathlib import Path

import pytest
import sglang_stand_in as stand_in

stand_in.install()

from sluice_client.sglang_sender import backend, plugin  # noqa: E402
from sluice_client.sglang_sender.hand_over import State  # noqa: E402


def source_root() -> Path | None:
    if os.environ.get("SGLANG_SOURCE"):
        return Path(os.environ["SGLANG_SOURCE"]) / "sglang/srt"
    installed = next(Path(__file__).resolve().parents[2].glob("build/engines/sglang/lib/python3*/site-packages"), None)
    if installed is not None:
        return installed / "sglang/srt"
    return None


ROOT = source_root()
pytestmark = pytest.mark.skipif(ROOT is None or not ROOT.is_dir(),
                                reason="no SGLang source: set SGLANG_SOURCE, or tools/test --engines installs it")


def parsed(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text())


def named(tree, kind, name: str):
    """Returns the class or function of a name in a module or class."""
    found = [node for node in tree.body if isinstance(node, kind) and node.name == name]
    assert found, name
    return found[-1]  # overloads come first


def class_of(path: str, name: str) -> ast.ClassDef:
    return named(parsed(path), ast.ClassDef, name)


def arguments(function: ast.FunctionDef) -> list[str]:
    return [a.arg for a in function.args.args]


def text_of(path: str, owner: str, name: str) -> str:
    return ast.unparse(named(class_of(path, owner), ast.FunctionDef, name))


def constants(node: ast.ClassDef) -> dict:
    return {s.targets[0].id: ast.literal_eval(s.value) for s in node.body if isinstance(s, ast.Assign)}


CONN = "disaggregation/base/conn.py"
PREFILL = "disaggregation/prefill.py"
POOL = "mem_cache/memory_pool.py"


def test_states_are_those_of_kvpoll():
    theirs = constants(class_of(CONN, "KVPoll"))
    assert theirs == {"Failed": State.FAILED, "Bootstrapping": State.BOOTSTRAPPING, "Transferring": State.TRANSFERRING,
                      "WaitingForInput": State.WAITING_FOR_INPUT, "Success": State.SUCCESS}
    assert theirs == {name: getattr(stand_in.KVPoll, name) for name in theirs}


@pytest.mark.parametrize("ours, base", [(backend.SluiceKVManager, "BaseKVManager"), (backend.SluiceKVSender, "BaseKVSender"),
                                        (backend.NoBootstrapServer, "BaseKVBootstrapServer")])
def test_every_abstract_method_is_there_with_its_arguments(ours, base):
    for method in class_of(CONN, base).body:
        if isinstance(method, ast.FunctionDef) and any("abstract" in ast.unparse(d) for d in method.decorator_list):
            mine = getattr(ours, method.name)
            assert list(mine.__code__.co_varnames[:mine.__code__.co_argcount]) == arguments(method), method.name


def test_a_backend_can_be_added_at_run_time():
    choices = (ROOT / "arg_groups/choices.py").read_text()
    assert "add_disagg_transfer_backend_choices = DISAGG_TRANSFER_BACKEND_CHOICES.extend" in choices
    utils = parsed("disaggregation/utils.py")
    assert plugin.BACKEND not in constants(named(utils, ast.ClassDef, "TransferBackend")).values()
    kinds = constants(named(utils, ast.ClassDef, "KVClassType"))
    assert set(kinds.values()) == {kind.value for kind in stand_in.KVClassType}
    assert arguments(named(utils, ast.FunctionDef, "get_kv_class")) == ["transfer_backend", "class_type"]
    assert constants(named(utils, ast.ClassDef, "DisaggregationMode"))["PREFILL"] == "prefill"
    plugins = (ROOT / "plugins/__init__.py").read_text()
    assert 'GENERAL_PLUGINS_GROUP = "sglang.srt.plugins"' in plugins
    hooks = constants(class_of("plugins/hook_registry.py", "HookType"))
    assert (hooks["AFTER"], hooks["AROUND"]) == ("after", "around")


def test_the_queue_makes_managers_and_senders_as_the_hooks_expect():
    queue = class_of(PREFILL, "PrefillBootstrapQueue")
    assert arguments(named(queue, ast.FunctionDef, "create_sender"))[:2] == ["self", "req"]
    assert arguments(named(queue, ast.FunctionDef, "_init_kv_manager")) == ["self"]
    text = text_of(PREFILL, "PrefillBootstrapQueue", "create_sender")
    assert "mgr=self.kv_manager" in text
    # The request's own max_new_tokens is there until its sender is.
    assert text.index("kv_sender_class(") < text.index("self._process_req(req)")
    made = text_of(PREFILL, "PrefillBootstrapQueue", "__init__")
    assert "self.token_to_kv_pool = token_to_kv_pool" in made and "self.scheduler = scheduler" in made
    assert made.index("self.token_to_kv_pool") < made.index("self._init_kv_manager()")
    scheduler = (ROOT / "managers/scheduler.py").read_text()
    for name in ("self.attn_tp_cpu_group =", "self.sliding_window_size ="):
        assert name in scheduler, name


def test_chunks_are_pages_whose_last_one_may_be_short():
    text = text_of(PREFILL, "SchedulerDisaggregationPrefillMixin", "_send_kv_chunk")
    assert "end_idx = end_idx - end_idx % page_size" in text and "num_kv_tokens=seg_end - seg_start" in text
    assert "kv_to_page_indices(kv_indices, page_size)" in text
    pages = ast.unparse(named(parsed("mem_cache/common.py"), ast.FunctionDef, "kv_to_page_indices"))
    assert "kv_indices[::page_size] // page_size" in pages
    # The token is there before the last chunk, and the answer goes out after the success.
    result = text_of(PREFILL, "SchedulerDisaggregationPrefillMixin", "process_batch_result_disagg_prefill")
    assert result.index("req.output_ids.append(next_token_id)") < result.index("self.send_kv_chunk(req, last_chunk=True)")
    assert "req.customized_info" in (ROOT / "managers/scheduler_components/output_streamer.py").read_text()


def test_all_ranks_look_at_their_senders_together():
    utils = parsed("disaggregation/utils.py")
    assert "ReduceOp.MIN" in ast.unparse(named(utils, ast.FunctionDef, "_all_reduce_polls"))
    polled = [node for node in ast.walk(parsed(PREFILL)) if isinstance(node, ast.Attribute) and node.attr == "poll"]
    assert not polled  # only poll_and_all_reduce... does


def test_pools_lie_as_they_are_read():
    mha = ast.unparse(class_of(POOL, "MHATokenToKVPool"))
    assert "rows = self.size + self.page_size" in mha and "(rows, self.head_num, self.head_dim)" in mha
    assert "self.k_buffer = [buf[0, :rows] for buf in fused]" in mha
    for name in ("kv_cache_layout", "v_head_dim", "is_quantized_kv_cache"):
        assert name in mha, name
    mla = ast.unparse(class_of(POOL, "MLATokenToKVPool"))
    assert "torch.zeros((self.size + self.page_size, 1, self.kv_cache_dim), dtype=self.store_dtype" in mla
    index = ast.unparse(class_of("mem_cache/index_key_cache.py", "IndexKeyCache"))
    assert "pool.index_head_dim + pool.index_head_dim // pool.quant_block_size * 4" in index
    move = text_of("mem_cache/index_key_cache.py", "IndexKeyCache", "move")
    assert "keys = index_k[:, :key_bytes]" in move and "scales = index_k[:, key_bytes:]" in move
    indexer = (ROOT / "layers/attention/dsa/dsa_indexer.py").read_text()
    assert "if self.use_dsa_indexer_fusion or self.use_aiter_fused_fp8_writer:\n            return x" in indexer
    assert "scale=hidden_size**-0.5" in indexer


def test_requests_have_what_the_sender_reads():
    made = text_of("managers/schedule_batch.py", "Req", "__init__")
    for name in ("origin_input_ids", "output_ids", "sampling_params", "bootstrap_room", "lora_id", "input_embeds",
                 "multimodal_inputs", "positional_embed_overrides", "customized_info", "rid"):
        assert f"self.{name}" in made, name
    assert "custom_params" in (ROOT / "sampling/sampling_params.py").read_text()
