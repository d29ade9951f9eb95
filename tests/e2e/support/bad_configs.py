"""Configurations that are refused: flags, environment, files. The program ends with status 1 and one sentence that
names the setting and where it came from.
"""

from dataclasses import dataclass, field
from pathlib import Path

MODEL = ["--model", "nowhere"]  # --check-config opens no model


@dataclass(frozen=True)
class BadConfig:
    """A configuration about which sluice-server --check-config says `words`."""

    name: str
    words: str
    flags: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    # Content of the file that --config names.
    file: bytes | None = None
    program: str = "sluice-server"

    def arguments(self, folder: Path) -> list[str]:
        flags = [*self.flags, "--check-config"]
        if self.file is not None:
            (folder / "c.yaml").write_bytes(self.file)
            flags += ["--config", str(folder / "c.yaml")]
        return flags


def flag_cases() -> list[BadConfig]:
    """Returns values outside their type or range, and flags that do not exist."""
    values = {
        "max_sequences": ["0", "4097", "-1", "x", "", "1.5", "1e3", "99999999999999999999", "1 2"],
        "hbm_bytes": ["0", "-1", "AUTO", "auto ", "12parsecs", "1.5", "1e9", "9223372036854775808", "100000TiB", "nan", "GiB", "1GiB2"],
        "lease_seconds": ["0", "-1s", "nan", "inf", "1e308", "86401", "5 parsecs", "1h1", "0.049"],
        "drain_timeout_seconds": ["-0.1", "25h"],
        "block_tokens": ["15", "257"],
        "max_context": ["1048577", "4294967296"],
        "max_chunk_bytes": ["4095", "1025MiB", "auto"],
        "seed": ["18446744073709551616", "-1"],
        "listen": ["", "nowhere", "127.0.0.1", "127.0.0.1:65536", "127.0.0.1:x", "[::1", ":7000", "http://x:1"],
        "admin_listen": ["nowhere"],
        "device": ["tpu", "CPU"], "policy": ["wishful", "", "oracle", "offload-naive"], "kv_dtype": ["int1"], "kernels": ["fast"],
        "log_level": ["loud"], "load_format": ["pickle"],
        "model": ["", "a\nb", "x" * 4097], "log_prompts": ["maybe", "2"],
        "local_prefill": ["true", "", "on-failure"],
    }
    cases = [BadConfig(f"{name}={value[:24]!r}", f"{name} (--{name.replace('_', '-')}) must ",
                       [*([] if name == "model" else MODEL), f"--{name.replace('_', '-')}={value}"])
             for name, texts in values.items() for value in texts]
    return cases + [
        BadConfig("no model", "model is required: give --model"),
        BadConfig("an unknown flag", "unknown flag --hbm-byts (did you mean --hbm-bytes?)", ["--hbm-byts=1GiB"]),
        BadConfig("an unknown flag of 1 MB", "unknown flag --xxx", ["--" + "x" * 100_000]),
        BadConfig("a flag without its value", "--hbm-bytes needs a value", [*MODEL, "--hbm-bytes"]),
        BadConfig("a flag twice", "--threads is given twice", [*MODEL, "--threads", "1", "--threads=2"]),
        BadConfig("a switch and its negation", "--log-prompts is given twice",
                  [*MODEL, "--log-prompts", "--no-log-prompts"]),
        BadConfig("a negation with a value", "--no-log-prompts takes no value", [*MODEL, "--no-log-prompts=1"]),
        BadConfig("a stray argument", 'unexpected argument "stray"', [*MODEL, "stray"]),
        BadConfig("one dash", "unexpected argument \"-model\" (did you mean --model?)", ["-model", "x"]),
        BadConfig("two actions", "give one of them", [*MODEL, "--print-plan"]),
        BadConfig("a flag of the other program", "--dram-bytes is a flag of sluice-server", [*MODEL, "--dram-bytes=1GiB"],
                  program="sluice-prefill"),
        BadConfig("a file that is not there", "--config: configuration file /no/such/file.yaml: No such file",
                  ["--config", "/no/such/file.yaml"]),
        BadConfig("a file that is a folder", "is not a regular file", ["--config", "/"]),
        BadConfig("a file that is a device", "is not a regular file", ["--config", "/dev/zero"]),
        BadConfig("no name of a file", "--config names no file", ["--config", ""]),
    ]


def environment_cases() -> list[BadConfig]:
    return [
        BadConfig("environment: a value", "threads (SLUICE_THREADS) must be", MODEL, {"SLUICE_THREADS": "many"}),
        BadConfig("environment: empty", "max_sequences (SLUICE_MAX_SEQUENCES) must be", MODEL,
                  {"SLUICE_MAX_SEQUENCES": ""}),
        BadConfig("environment: an unknown name",
                  "unknown environment variable SLUICE_THREAD (did you mean SLUICE_THREADS?)", MODEL,
                  {"SLUICE_THREAD": "2"}),
        BadConfig("environment: a file that is not there", "SLUICE_CONFIG: configuration file /no/such",
                  MODEL, {"SLUICE_CONFIG": "/no/such"}),
        # The flag wins, but the value of the variable is checked all the same.
        BadConfig("environment: overridden", "hbm_bytes (SLUICE_HBM_BYTES) must be", [*MODEL, "--hbm-bytes=1GiB"],
                  {"SLUICE_HBM_BYTES": "lots"}),
    ]


def file_cases() -> list[BadConfig]:
    bomb = b"a: &a [x, x]\n" + b"".join(b"%c: &%c [*%c, *%c]\n" % (c, c, c - 1, c - 1) for c in range(98, 123))
    files = {
        "an unknown key": (b"model: x\nmax_sequence: 5\n",
                           "unknown setting max_sequence ({file}:2) (did you mean max_sequences?)"),
        "a value": (b"model: x\nmax_sequences: 0\n", "max_sequences ({file}:2) must be a whole number from 1 to 4096"),
        "a key twice": (b"model: x\nthreads: 1\nthreads: 2\n", "{file}:3: threads is set twice, first on line 2"),
        "a number in quotes": (b'model: x\nthreads: "2"\n', "threads ({file}:2) must be"),
        "null": (b"model: x\nthreads:\n", "{file}:2: threads has no value"),
        "a policy's setting at the top": (
            b"model: x\ness_warm_up: false\n",
            "ess_warm_up ({file}:2) is written in a file as ess: {warm_up: false}"),
        "an unknown key of a policy": (b"model: x\ness:\n  warm: false\n",
                                       "unknown setting warm of ess ({file}:3)"),
        "a value of a policy": (b"model: x\ness: {warm_up: 7}\n", "ess_warm_up ({file}:2) must be true or false"),
        "a policy's value": (b"model: x\ness: 0.2\n", "{file}:2: ess must be a mapping of settings, such as ess: {"),
        "a policy without settings": (b"model: x\ness:\n", "{file}:2: ess must be a mapping of settings"),
        "a policy twice": (b"ess: {warm_up: true}\ness: {prefetch: 1}\n", "{file}:2: ess is set twice, first on line 1"),
        "a mapping in a policy": (b"ess: {warm_up: {a: b}}\n",
                                  "{file}:1: warm_up must be a single value, but is a mapping"),
        "a setting of measurements": (b"model: x\ness: {lru: false}\n", "unknown setting lru of ess ({file}:2)"),
        "a list": (b"model: [x]\n", "{file}:1: model must be a single value, but is a list"),
        "a mapping": (b"model: {a: b}\n", "{file}:1: model must be a single value, but is a mapping"),
        "a list of mappings": (b"- model: x\n", "{file}:1: expected lines of the form name: value, found a list"),
        "one word": (b"model\n", "{file}:1: expected lines of the form name: value"),
        "an alias": (b"model: &m x\naddress_file: *m\n", "{file}:2: aliases (*name) are not read"),
        "a bomb of aliases": (bomb, "{file}:1: a must be a single value, but is a list"),
        "10,000 lists": (b"model: " + b"[" * 10_000 + b"]" * 10_000, "model must be a single value, but is a list"),
        "100,000 open lists": (b"[" * 100_000, "found a list"),
        "100,000 open mappings": (b"{" * 100_000, "expected"),
        "10,000 lists by indentation": (b"- " * 10_000 + b"x", "found a list"),
        "JSON, nested": (b'{"model": {"model": "x"}}', "{file}:1: model must be a single value, but is a mapping"),
        "JSON, cut": (b'{"model": "x', "{file}:1: is neither YAML nor JSON"),
        "two documents": (b"model: x\n---\nmodel: y\n", "more than one YAML document"),
        "a tab": (b"model: x\n\tthreads: 2\n", "{file}:2"),
        "an escape of a NUL": (b'model: "a\\0b"\n', "model ({file}:1) must be text without control characters"),
        "noise": (bytes(range(128, 256)) * 8, "{file}"),
        "NULs": (bytes(64), "{file}"),
        "2 MiB": (b"#" * (2 << 20), "has 2097152 bytes; a configuration file may have at most 262144"),
        "a key of 1 kB": (b"x" * 1000 + b": 1\n", "unknown setting xxx"),
        "a key of 100 kB": (b"x" * 100_000 + b": 1\n", "{file}:1: is neither YAML nor JSON"),
        "a text of 100 kB": (b"model: " + b"x" * 100_000 + b"\n", "model ({file}:1) must be at most 4096 bytes"),
    }
    return [BadConfig(f"file: {name}", words, file=text) for name, (text, words) in files.items()]


CONFIGS = flag_cases() + environment_cases() + file_cases()
