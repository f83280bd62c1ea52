"""A real Slurm on this machine: a controller and two node daemons on loopback, each with 16 pretended CPUs."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

NODES = ("node1", "node2")
DONE = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")

CONFIGURATION = """\
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={root}/munge/socket,cred_expire=5
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool-%n
SlurmctldPidFile={root}/pid/slurmctld
SlurmdPidFile={root}/pid/slurmd-%n
SlurmctldLogFile={root}/log/slurmctld
SlurmdLogFile={root}/log/slurmd-%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=30
NodeName=node[1-2] NodeHostname=localhost NodeAddr=127.0.0.1 Port={first}-{last} CPUs=16 RealMemory=8000 State=UNKNOWN
PartitionName=test Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Cluster:
    """Started at once; ``close`` ends jobs and daemons. Everything it writes is under ``root``."""

    def __init__(self, root: Path, port: int = 17000) -> None:
        self.root = root
        for folder in ("munge", "state", "pid", "log", *(f"spool-{node}" for node in NODES)):
            (root / folder).mkdir()
        user = subprocess.check_output(["id", "-un"], text=True).strip()
        text = CONFIGURATION.format(root=root, port=port, first=port + 1, last=port + 2, user=user)
        (root / "slurm.conf").write_text(text)
        (root / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # else slurmd looks for one, and may find none
        self.environment = {**os.environ, "SLURM_CONF": str(root / "slurm.conf")}
        self._start_munge()
        for daemon in (["slurmctld"], *(["slurmd", "-N", node] for node in NODES)):
            self._run(daemon[0], "-f", str(root / "slurm.conf"), *daemon[1:])
        self.wait(lambda: self._run("sinfo", "-h", "-N", "-o", "%T").split().count("idle") == len(NODES), 30)

    def submit(self, script: Path, folder: Path, **environment: str) -> int:
        """``sbatch`` in ``folder``; the job's number."""
        environment = {**self.environment, **environment}
        out = self._run("sbatch", "--parsable", str(script), cwd=folder, environment=environment)
        return int(out.strip())

    def command(self, *words: str) -> str:
        """One of Slurm's commands."""
        return self._run(*words)

    def job(self, number: int) -> dict[str, str]:
        """What ``scontrol show job`` says."""
        return dict(re.findall(r"(\w+)=(\S*)", self._run("scontrol", "show", "job", str(number))))

    def finish(self, number: int, seconds: float = 240) -> dict[str, str]:
        """The job when it has ended for good."""
        self.wait(lambda: self.job(number)["JobState"] in DONE, seconds)
        return self.job(number)

    def wait(self, until, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not until():
            if time.monotonic() > deadline:
                raise TimeoutError(f"not after {seconds} s: {self._run('squeue', '-l')}\n{self._logs()}")
            time.sleep(0.2)

    def close(self) -> None:
        """Jobs before daemons: tasks outlive slurmd."""
        with suppress(Exception):
            self._run("scancel", "--user", subprocess.check_output(["id", "-un"], text=True).strip())
            self.wait(lambda: not self._run("squeue", "-h"), 60)
        names = [f"slurmd-{node}" for node in NODES] + ["slurmctld", "munged"]
        for name in names:
            with suppress(FileNotFoundError, ProcessLookupError, ValueError):
                os.kill(int((self.root / "pid" / name).read_text()), signal.SIGTERM)
        deadline = time.monotonic() + 20
        while any(self._alive(name) for name in names) and time.monotonic() < deadline:
            time.sleep(0.1)

    def _start_munge(self) -> None:
        folder = self.root / "munge"
        key = folder / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        command = ["munged", f"--key-file={key}", f"--socket={folder}/socket", f"--pid-file={folder}/pid"]
        command += [f"--log-file={folder}/log", f"--seed-file={folder}/seed", "--num-threads=4"]
        if os.getuid() == 0:  # it wants its files to be its own, and their folder passable
            for path in (folder, key):
                shutil.chown(path, "munge", "munge")
            folder.chmod(0o755)
            for parent in folder.parents:
                if parent.stat().st_mode & 0o001 == 0:
                    parent.chmod(parent.stat().st_mode | 0o011)
            command = ["setpriv", "--reuid=munge", "--regid=munge", "--clear-groups", *command]
        subprocess.run(command, check=True, capture_output=True, text=True)
        (self.root / "pid" / "munged").symlink_to(folder / "pid")

    def _alive(self, name: str) -> bool:
        try:
            pid = int((self.root / "pid" / name).read_text())
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, ValueError):
            return False
        return state != "Z"  # not reaped in a container without an init

    def _run(self, *words: str, cwd: Path | None = None, environment: dict[str, str] | None = None) -> str:
        done = subprocess.run(
            words, cwd=cwd, env=environment or self.environment, capture_output=True, text=True, timeout=60, check=False
        )
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(words)}: {done.stderr}\n{self._logs()}")
        return done.stdout

    def _logs(self) -> str:
        return "\n".join(path.read_text(errors="replace")[-1500:] for path in (self.root / "log").glob("*"))
