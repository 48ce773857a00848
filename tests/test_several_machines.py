"""The files of the page "Several machines", run here: stand-ins for ssh and srun start the ranks on this machine."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from _waiting import wait_until
from conftest import REPOSITORY

pytestmark = pytest.mark.slow

EXAMPLES = REPOSITORY / "examples"
SSH = """#!{python}
import os, pty, sys
[flag, host, command] = sys.argv[1:]
assert flag == "-tt"
for name in [name for name in os.environ if name.startswith("PIPESGD_")]:
    del os.environ[name]
sys.exit(os.waitstatus_to_exitcode(pty.spawn([*{enter}, "sh", "-c", command])))
"""
"""Stand-in for ssh: the command's terminal is one of its own, which turns what is typed on Ctrl-C into the signal.
Variables stay here."""
SRUN = """#!/bin/bash
[ "$1" = --kill-on-bad-exit=1 ] || exit 99
tasks=()
for number in $(seq 0 $((SLURM_NNODES - 1))); do SLURM_NODEID=$number "${@:2}" & tasks+=($!); done
code=0
for task in "${tasks[@]}"; do wait "$task" || code=$?; done
exit $code
"""
TRAIN = [
    "-m",
    "pipesgd.train",
    "--dataset",
    "digits",
    "--hidden-sizes",
    "30",
    "--iterations",
    "20",
    "--output",
    "runs/a",
]
FOREVER = [*TRAIN[:-4], "--iterations", "1000000", "--checkpoint-iterations", "20", *TRAIN[-2:]]


def program(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder of a user, whose .venv is this environment, and in which stand-ins come first on PATH."""
    (tmp_path / ".venv").symlink_to(sys.prefix)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    program(tmp_path / "bin" / "ssh", SSH.format(python=sys.executable, enter=[]))
    return tmp_path


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


def test_hosts_by_ssh_train(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOSTS", "127.0.0.1 localhost")
    monkeypatch.setenv("PORT", free_port())
    done = subprocess.run([EXAMPLES / "hosts.sh", *TRAIN], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout
    assert "rank 1: done; results are on " in done.stdout
    assert (folder / "runs" / "a" / "summary.json").exists()


def test_hosts_by_ssh_give_the_code_of_a_failure(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOSTS", "127.0.0.1 localhost")
    monkeypatch.setenv("PORT", free_port())
    words = [EXAMPLES / "hosts.sh", "-m", "pipesgd.train", "--dataset", "a folder's name"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stdout
    assert """got "a folder's name\"""" in done.stdout
    monkeypatch.setenv("PIPESGD_SECRET_FILE", "a lost key")
    done = subprocess.run([EXAMPLES / "hosts.sh", *TRAIN], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stdout
    assert "PIPESGD_SECRET_FILE must be a file that can be read; got a lost key" in done.stdout


def test_ctrl_c_reaches_all_hosts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOSTS", "127.0.0.1 localhost")
    monkeypatch.setenv("PORT", free_port())
    with subprocess.Popen([EXAMPLES / "hosts.sh", *FOREVER], stdout=subprocess.PIPE, text=True) as running:
        try:
            wait_until(lambda: list(folder.glob("runs/a/checkpoints/iteration-*")) != [], 120)
            running.send_signal(signal.SIGINT)
            said, _ = running.communicate(timeout=60)
        finally:
            running.kill()
    assert running.returncode == 130, said
    assert "stopped by Ctrl-C after iteration" in said


@contextlib.contextmanager
def two_hosts() -> Iterator[list[str]]:
    """Make two network namespaces that a cable connects, at 10.79.0.1 and 10.79.0.2, and yield their names."""
    names = [f"pipesgd-{os.getpid()}-{number}" for number in (1, 2)]
    ends = [f"eth0 netns {name}" for name in names]
    commands = [f"ip netns add {name}" for name in names]
    commands += [f"ip link add {ends[0]} type veth peer {ends[1]}".replace(" peer eth0", " peer name eth0")]
    for number, name in enumerate(names, start=1):
        commands += [f"ip -n {name} address add 10.79.0.{number}/24 dev eth0"]
        commands += [f"ip -n {name} link set {device} up" for device in ("eth0", "lo")]
    try:
        for command in commands:
            subprocess.run(command.split(), check=True, capture_output=True)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("ip"), reason="needs root: networks of its own")
def test_hosts_on_networks_of_their_own_train(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with two_hosts() as names:
        enter = f'["ip", "netns", "exec", {names!r}[int(host[-1]) - 1]]'
        program(folder / "bin" / "ssh", SSH.format(python=sys.executable, enter=enter))
        monkeypatch.setenv("HOSTS", "10.79.0.1 10.79.0.2")
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
        done = subprocess.run([EXAMPLES / "hosts.sh", *TRAIN], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout
    assert "network: ranks at 10.79.0.1 (eth0), 10.79.0.2 (eth0)" in done.stdout
    assert "rank 1: done; results are on 10.79.0.1 in runs/a" in done.stdout


def test_slurms_file_trains(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(folder / "bin" / "srun", SRUN)
    program(folder / "bin" / "scontrol", '#!/bin/sh\n[ "$*" = "show hostnames 127.0.0.[1-2]" ] && echo 127.0.0.1\n')
    variables = {"NNODES": "2", "JOB_ID": str(int(free_port()) % 10000), "JOB_NODELIST": "127.0.0.[1-2]"}
    for name, value in {**variables, "CPUS_PER_TASK": "1"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    text = (EXAMPLES / "slurm.sbatch").read_text(encoding="utf-8")
    program(folder / "slurm.sbatch", text.replace("--epochs 10", "--iterations 20 --hidden-sizes 30"))
    done = subprocess.run(["bash", "slurm.sbatch"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "starting rank 1 of 2" in done.stderr
    assert (folder / "runs" / "digits" / "summary.json").exists()


def documents() -> dict[str, Any]:
    text = (EXAMPLES / "kubernetes.yaml").read_text(encoding="utf-8")
    return {one["kind"]: one for one in yaml.safe_load_all(text)}


def test_the_pods_of_kubernetes_train(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pod = documents()["Job"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    [script] = container["args"]
    for old, new in {"pipesgd-0.pipesgd": "127.0.0.1", "29500": free_port(), "/runs/": "runs/"}.items():
        assert old in script
        script = script.replace(old, new)
    script = script.replace("exec python", f"exec {sys.executable}").replace("--epochs 10", "--iterations 20")
    pods = []
    for index in ("0", "1"):
        words = [*container["command"], script]
        pods.append(subprocess.Popen(words, env={**os.environ, "JOB_COMPLETION_INDEX": index}))
    deadline = time.monotonic() + 120
    try:
        assert [one.wait(max(0.0, deadline - time.monotonic())) for one in pods] == [0, 0]
    finally:
        for one in pods:
            one.kill()
    assert (folder / "runs" / "digits" / "summary.json").exists()


def test_the_parts_of_kubernetes_file_name_each_other() -> None:
    """The file was also checked against Kubernetes' schema, by kubernetes-validate --strict."""
    job, service, policy = (documents()[kind] for kind in ("Job", "Service", "NetworkPolicy"))
    name = job["metadata"]["name"]
    label = {"batch.kubernetes.io/job-name": name}
    assert service["spec"]["selector"] == label
    assert policy["spec"]["podSelector"]["matchLabels"] == label
    spec = job["spec"]
    assert spec["completions"] == spec["parallelism"] == 2
    pod = spec["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"]
    script = pod["containers"][0]["args"][0]
    assert f"--nnodes {spec['completions']} " in script
    assert f"--master-addr {name}-0.{pod['subdomain']} " in script
