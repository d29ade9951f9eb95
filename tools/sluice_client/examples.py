"""The ends of `tools/sluice COMMAND --help`: examples, and what a script can rely on."""

NODES = """
SLUICE_DECODE and SLUICE_PREFILL in the environment stand in for --decode and --prefill; a flag wins over them.
"""

EPILOGS = {
    "generate": """examples:
  tools/sluice generate --prefill 127.0.0.1:7100 --decode 127.0.0.1:7000 \\
      --tokenizer models/smollm2-135m-instruct --chat --prompt "Why is the sky blue?"
  tools/sluice generate --prefill 127.0.0.1:7100 --decode 127.0.0.1:7000 \\
      --prompt-ids 1,2,3 --max-tokens 16 --json

Without a prefill node the decode node computes the prompt itself, if it was started with --local-prefill always.
--json prints one object: prompt_ids, output_ids, output_text (null without --tokenizer), logprobs and
top_logprobs (null without --logprobs), finish_reason ("stop" or "length"), exact_tokens (how many output tokens, from
the first on, were computed with attention to everything), drafted_tokens and accepted_tokens (drafts that the node
verified, and those that became output tokens), ttft_seconds (from sending the request to the first token) and
itl_seconds (the gaps between tokens).
Exit status: 0, 1 for an error, 2 for a wrong command line.
""" + NODES,
    "chat": """example:
  tools/sluice chat --prefill 127.0.0.1:7100 --decode 127.0.0.1:7000 \\
      --tokenizer models/smollm2-135m-instruct --system "Answer briefly."

The decode node keeps the conversation between two messages, for --keep seconds at most, and is sent only what is
new. Where it has lost the conversation, all of it is sent again; --verbose says which of the two happened.
Ctrl-C stops the running answer, /exit or Ctrl-D leaves.
""" + NODES,
    "push": """example:
  tools/sluice push --decode 127.0.0.1:7000 --kv tests/fixtures/tiny-llama/golden.safetensors --case 1

The file holds for case C the tensor caseC.prompt (int32 ids), and for every layer L caseC.k.L and caseC.v.L
([tokens, kv_heads, head_dim], K after RoPE). For a model with latent caches (DeepSeek) it holds caseC.latent.L
([tokens, rank], after kv_a_layernorm), caseC.rope.L ([tokens, rope], after RoPE, pairs side by side) and, where
the model has an indexer, caseC.index.L ([tokens, 128], after RoPE); they are converted to the form that the node
keeps. Decoding is greedy. The output and --json are those of `generate`.
""" + NODES,
    "prefill-hf": """example:
  tools/sluice prefill-hf models/smollm2-135m-instruct --decode 127.0.0.1:7000 --chat --prompt "Why is the sky blue?"

transformers computes the prompt and its first token; the decode node goes on greedily. It needs torch and transformers
in the Python environment: `pip install ./tools torch transformers` in one of your own, then `sluice prefill-hf`.
The output and --json are those of `generate`.
""" + NODES,
    "status": """examples:
  tools/sluice status --decode 127.0.0.1:7000
  tools/sluice status --prefill 127.0.0.1:7100
  tools/sluice status --decode 127.0.0.1:7000 --watch

Every node that is named is shown. In the bars # is in use, - is promised to sequences, . is free.
--json prints one object on a line for each node.
""" + NODES,
    "doctor": """examples:
  tools/sluice doctor
  tools/sluice doctor --config configs/server.yaml
  tools/sluice doctor --decode 10.0.0.2:7000 --prefill 10.0.0.3:7000 --ca ca.pem --cert me.pem --key me.key

It looks at the NVIDIA driver, each GPU and its compute capability, the limit of locked memory, huge pages, memory
nodes (NUMA), the ports that a node would listen on, TLS files (readable, in PEM, valid today, key and certificate
one pair), and at the nodes that are named: whether they answer, and whether both have the same model and the same
form of caches. It changes nothing, and needs neither a GPU nor a node.
Each line begins with ok, warning or problem. Lines with a warning or a problem end with the remedy.
Exit status: 0, 1 if there is a problem, 2 for a wrong command line.
""" + NODES,
    "failpoint": """examples:
  tools/sluice failpoint list --decode 127.0.0.1:7000
  tools/sluice failpoint set --decode 127.0.0.1:7000 kv.reserve=error*1 'kv.copy=delay(50ms)'
  tools/sluice failpoint clear --decode 127.0.0.1:7000

A term is NAME=ACTION[%PROBABILITY][*COUNT][@SKIP]; ACTION is error, delay(TIME), jump(TIME), kill or off.
set and clear need a node that was started with --allow-failpoints.
""" + NODES,
    "drain": """examples:
  tools/sluice drain --decode 127.0.0.1:7000
  tools/sluice drain --decode 127.0.0.1:7000 --timeout 120 --no-wait

The command waits until no sequence runs or waits at the node. Sequences that are alive when the time is over end
with UNAVAILABLE. --json prints one object: idle, running, waiting, was_draining.
Exit status: 0, 1 for an error (also when somebody resumed the node meanwhile), 2 for a wrong command line.
""" + NODES,
    "resume": """example:
  tools/sluice resume --decode 127.0.0.1:7000
""" + NODES,
    "trace": """example:
  tools/sluice trace --decode 127.0.0.1:7000 --steps 200 --out trace.json
""" + NODES,
    "texts": """examples:
  tools/sluice texts --tokenizer models/smollm2-135m-instruct --out texts.json
  build/release/bin/sluice-bench policies --model models/smollm2-135m-instruct --quality --texts texts.json

Without --text there are three texts of each of four kinds (licence, code, news, dialogue), from what this machine's
packages carry; the command names the files. Pass keys are hidden in parts of these texts: one key (single), four
keys of which one is asked for (multi), or a key in a text that goes on as a text of another kind (topic). The first
N cases are a fair sample of all of them.
""",
    "plot-policies": """example:
  build/release/bin/sluice-bench policies --model models/smollm2-135m-instruct --out policies-run
  tools/sluice plot-policies --run policies-run

It needs matplotlib: .venv/bin/pip install matplotlib
""",
    "plot-heads": """example:
  build/release/bin/sluice-profile --model models/smollm2-135m-instruct --clo --no-intervals --out heads.json
  tools/sluice plot-heads --profile heads.json

A row is a layer, a square a KV head: in how many lookups it keeps its selection, how similar its queries in
neighbouring steps are, and from which clo_persistent_share on its whole cache lies in HBM.
It needs matplotlib: .venv/bin/pip install matplotlib
""",
    "plot-simulate": """example:
  build/release/bin/sluice-bench simulate --operators tests/bench/simulate/h200_operators.json \\
      --model configs/models/deepseek-v3.2-ep32 --batches 8,26,76 --misses 189:21:572 --json simulate.json
  tools/sluice plot-simulate --report simulate.json

Bars have the parts of each step, lines tokens/s by batch. Both are forecasts.
It needs matplotlib: .venv/bin/pip install matplotlib
""",
    "plot-fluxion": """example:
  build/release/bin/sluice-profile fluxion summary m.samples --predictor m.predictor --json summary.json
  build/release/bin/sluice-profile fluxion check m.predictor --model models/m --texts other.json --json check.json
  tools/sluice plot-fluxion --summary summary.json --check check.json --out fluxion.png
  build/release/bin/sluice-profile fluxion figures --model models/m --texts other.json --json figures.json
  tools/sluice plot-fluxion --figures figures.json

A summary gives the budget over the size of block of heads that do not stream (median, quartiles, and heads one by
one), the line of equation 1 with its R², and maps of layers and query heads: in how many samples a head streams, and
in how many the predictor says so. A check gives what each way to budget reads, and its heads further off than tau:
what lies below and to the left of the grey lines is better than the fixed budget. Figures are 3, 4, 10b and 11 of the
paper: what a share of the scores is worth, the sink, what heads contribute, the effect of tau, and how normal q k is.
It needs matplotlib: .venv/bin/pip install matplotlib
""",
}
