"""OCI bundles for guests: the configuration file that tells a runtime what to start.

Pure data. The root filesystem is the template's, shared and read-only to the runtime (which keeps changes in
memory); agent and zygote are mounted over the empty files the template holds for them. Everything the
sandbox's user may not do is decided by the agent, which drops to that user; the guest's first process is root
inside.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

_CAPABILITIES = (
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_FOWNER",
    "CAP_FSETID",
    "CAP_KILL",
    "CAP_SETGID",
    "CAP_SETUID",
    "CAP_SETPCAP",
    "CAP_SYS_ADMIN",
    "CAP_SYS_RESOURCE",
    "CAP_IPC_OWNER",
    "CAP_NET_BIND_SERVICE",
    "CAP_SYS_CHROOT",
    "CAP_MKNOD",
)
"""What the agent needs inside (mounts, users, signals, limits), and what a command that asks for root may
expect."""
_CAPABILITY_SETS = ("bounding", "effective", "inheritable", "permitted")
AGENT_PATH = "/usr/lib/tidemill/agent"
ZYGOTE_PATH = "/usr/lib/tidemill/zygote.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleSpec:
    """What a bundle is made from. Paths are the host's; `tmpfs_bytes` limits each folder the user can write.
    """

    rootfs: Path
    agent: Path
    zygote: Path
    tmpfs_bytes: int
    hostname: str = "sandbox"


def bundle_config(spec: BundleSpec) -> dict[str, Any]:
    """The bundle's config.json as data. The same spec gives the same bytes: a restore compares them with the
    saved one."""
    return {
        "ociVersion": "1.0.2",
        "process": {
            "terminal": False,
            "user": {"uid": 0, "gid": 0},
            "args": [AGENT_PATH, "--tmpfs-bytes", str(spec.tmpfs_bytes)],
            "env": ["PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"],
            "cwd": "/",
            "capabilities": {kind: list(_CAPABILITIES) for kind in _CAPABILITY_SETS},
            "noNewPrivileges": False,
            "oomScoreAdj": 1000,
        },
        "root": {"path": str(spec.rootfs), "readonly": False},
        "hostname": spec.hostname,
        "mounts": [
            {
                "destination": "/proc",
                "type": "proc",
                "source": "proc",
                "options": ["nosuid", "noexec", "nodev"],
            },
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755"]},
            {
                "destination": "/sys",
                "type": "sysfs",
                "source": "sysfs",
                "options": ["nosuid", "noexec", "nodev", "ro"],
            },
            _file(AGENT_PATH, spec.agent),
            _file(ZYGOTE_PATH, spec.zygote),
        ],
        "linux": {"namespaces": [{"type": kind} for kind in ("pid", "network", "ipc", "uts", "mount")]},
    }


def _file(inside: str, outside: Path) -> dict[str, Any]:
    return {
        "destination": inside,
        "type": "bind",
        "source": str(outside),
        "options": ["bind", "ro", "nosuid", "nodev"],
    }
