"""`pip install ./tools` gives the client, the connectors for vLLM and SGLang, and the stubs of the protos."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_wheel_has_everything(tmp_path):
    # A copy, because setuptools writes beside what it builds.
    for name in ("tools", "proto"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
    done = subprocess.run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w",
                           tmp_path / "out", tmp_path / "tools"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    wheel, = (tmp_path / "out").glob("sluice-*.whl")
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
        entry = next(file.read(n).decode() for n in names if n.endswith("entry_points.txt"))
        file.extractall(tmp_path / "site")
    assert {"sluice/v1/ingest_pb2.py", "sluice/v1/ingest_pb2_grpc.py", "sluice_client/pusher.py",
            "sluice_client/vllm_connector/connector.py", "sluice_client/hand_off/sender.py",
            "sluice_client/sglang_sender/plugin.py"} <= names
    assert "sluice = sluice_client.cli:main" in entry
    assert "[sglang.srt.plugins]\nsluice = sluice_client.sglang_sender.plugin:register" in entry
    shown = subprocess.run([sys.executable, "-S", "-c", "import sys; sys.path[:0] = sys.argv[1:]; "
                            "from sluice_client import cli, pusher; print(cli.__file__); cli.main(['--help'])",
                            tmp_path / "site", *(p for p in sys.path if "site-packages" in p)],
                           capture_output=True, text=True, timeout=60)
    assert str(tmp_path / "site") in shown.stdout and "prefill-hf" in shown.stdout, shown.stderr
